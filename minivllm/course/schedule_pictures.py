"""The pictures of chapter 08: who runs when, and what it costs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.course.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, arrow, blank_axes, box

FACES = {"A": SKY, "B": ORANGE, "C": GREEN}
NAMES = "ABCDEFGHIJ"


class Step(Protocol):
    """A step of a simulation: when it began and ended (ms), and tokens computed by request."""

    start: float
    end: float
    work: dict[int, int]


def draw_turns(policies: Mapping[str, Sequence[tuple[int, int, int]]], num_places: int) -> Figure:
    """Places against steps, a panel per policy: (place, first step, steps) of each request; hatched: a place waits."""
    fig, axes = plt.subplots(len(policies), 1, figsize=(8.4, 1.9 * len(policies)), sharex=True)
    for ax, (title, turns) in zip(axes, policies.items(), strict=True):
        end = max(start + length for _, start, length in turns)
        ax.barh(range(num_places), end, color="white", edgecolor=GREY, hatch="////", linewidth=0)
        for name, (place, start, length) in zip(NAMES, turns, strict=False):
            ax.barh(place, length, left=start, color=SKY, edgecolor=INK)
            ax.text(start + length / 2, place, name, ha="center", va="center")
        ax.set(title=f"{title}: {end} steps", yticks=range(num_places), yticklabels=range(1, num_places + 1))
        ax.set_ylabel("place")
        ax.invert_yaxis()
    axes[-1].set_xlabel("step")
    return fig


def draw_step_time(step_ms: Callable[[int, int], float], knee: float) -> Figure:
    """The time of a step against its number of new tokens; left of `knee` reading takes longer than computing."""
    sizes = [1, 2, 5, 10, 20, 50, 100, round(knee), 300, 1000, 3000]
    fig, ax = plt.subplots(figsize=(7.2, 3.0))
    ax.plot(sizes, [step_ms(n, 0) for n in sizes], "o-", color=BLUE, lw=2)
    ax.axvspan(1, knee, color=PALE, zorder=0)
    ax.text(13, 1.6, "reading the weights\ntakes longer", ha="center")
    ax.text(1600, 0.6, "computing\ntakes longer", ha="center")
    ax.set(xscale="log", yscale="log", xlabel="new tokens in the step", ylabel="ms")
    ax.set(xticks=[1, 10, 100, 1000], xticklabels=["1", "10", "100", "1,000"])
    ax.set(yticks=[0.3, 1, 3], yticklabels=["0.3", "1", "3"])
    ax.minorticks_off()
    return fig


def draw_plan(plan: Sequence[Mapping[str, int]], budget: int) -> Figure:
    """Tokens computed in each step, stacked by request, under the budget."""
    fig, ax = plt.subplots(figsize=(7.2, 3.0))
    for step, work in enumerate(plan):
        bottom = 0
        for name, count in work.items():
            ax.bar(step, count, 0.72, bottom, color=FACES[name], edgecolor="white")
            ax.text(step, bottom + count / 2, f"{name} +{count}", ha="center", va="center", size=9.5)
            bottom += count
    ax.axhline(budget, color=RED, lw=1.5)
    ax.text(len(plan) - 0.55, budget + 0.12, "budget", color=RED, ha="right", va="bottom")
    ax.set(xticks=range(len(plan)), xticklabels=[f"step {i}" for i in range(len(plan))])
    ax.set(ylabel="tokens computed", ylim=(0, budget + 1.2))
    return fig


def draw_states() -> Figure:
    """The three states of a sequence, what leads from one to another, and who holds blocks."""
    fig, ax = blank_axes(8.8, 2.3)
    states = {"WAITING": (0.9, "holds no block"), "RUNNING": (3.6, "holds the blocks of its tokens")}
    for name, (x, owns) in {**states, "FINISHED": (6.9, "holds no block")}.items():
        box(ax, x, 0.55, 1.5, 0.6, name, face=SKY if name == "RUNNING" else PALE, bold=True)
        ax.text(x + 0.75, 1.32, owns, size=9, ha="center", color="#555555")
    moves = [(0.1, 0.9, 0.85, -0.12, "add"), (2.4, 3.6, 0.72, -0.12, "admit"), (3.6, 2.4, 1.0, 0.14, "preempt")]
    for x0, x1, y, above, text in [*moves, (5.1, 6.9, 0.85, -0.12, "stop, length, abort")]:
        arrow(ax, (x0, y), (x1, y))
        ax.text((x0 + x1) / 2, y + above, text, size=9, ha="center", va="center")
    ax.plot([1.65, 1.65, 7.65, 7.65], [1.5, 1.9, 1.9, 1.6], color=INK, lw=1.2)
    arrow(ax, (7.65, 1.65), (7.65, 1.44))
    ax.text(4.6, 2.04, "abort", size=9, ha="center", va="center")
    return fig


def draw_gantt(runs: Mapping[str, Sequence[Step]], arrivals: Sequence[float]) -> Figure:
    """One panel per run, one line per request, one bar per step: orange computes a prompt, blue one token."""
    fig, axes = plt.subplots(len(runs), 1, figsize=(8.8, 2.75 * len(runs)), sharex=True)
    for ax, (title, steps) in zip(axes, runs.items(), strict=True):
        _draw_requests(ax, steps, arrivals)
        ax.set(title=title, yticks=range(len(arrivals)), yticklabels=NAMES[: len(arrivals)])
        ax.invert_yaxis()
    axes[-1].set_xlabel("ms on the simulated clock")
    legend = "orange: prompt    blue: one token    grey line: waiting"
    axes[0].text(1.0, 0.9, legend, size=10, ha="right", transform=axes[0].transAxes)
    return fig


def _draw_requests(ax: Axes, steps: Sequence[Step], arrivals: Sequence[float]) -> None:
    for request, arrival in enumerate(arrivals):
        began = next(step.start for step in steps if request in step.work)
        ax.plot([arrival, began], [request, request], color=GREY, lw=1)
    for step in steps:
        for request, count in step.work.items():
            face = SKY if count == 1 else ORANGE
            width = step.end - step.start
            ax.barh(request, width, 0.72, step.start, color=face, edgecolor="white", linewidth=0.6)


def draw_gaps(budgets: Sequence[int], gaps: Sequence[float], bounds: Sequence[float], ttfts: Sequence[float]) -> Figure:
    """Left: a story's longest gap and its bound; right: the mean time to the first token of the prompts (all ms)."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.8, 3.3))
    left.plot(budgets, gaps, "o-", color=BLUE, lw=2)
    left.plot(budgets, bounds, "--", color=RED)
    left.text(500, 4.5, "a step that uses\nthe whole budget", color=RED, ha="center", va="center")
    left.set(title="The story's longest gap", ylabel="ms", ylim=(0, 7))
    right.plot(budgets, ttfts, "o-", color=ORANGE, lw=2)
    right.set(title="The prompts' mean time to the first token", ylabel="ms", ylim=(0, None))
    for ax in (left, right):
        ax.set(xscale="log", xlabel="budget (tokens per step)")
        ax.set(xticks=[64, 256, 1024, 4096], xticklabels=["64", "256", "1,024", "4,096"])
        ax.minorticks_off()
    return fig


def draw_blocks_held(
    held: Sequence[Mapping[str, int]], preempted: Sequence[tuple[int, str]], num_blocks: int
) -> Figure:
    """Blocks held in each step, stacked by request, under the pool's size; (step, request) of each preemption."""
    fig, ax = plt.subplots(figsize=(8.4, 3.2))
    bottom = [0] * len(held)
    for name, face in FACES.items():
        heights = [step.get(name, 0) for step in held]
        ax.bar(range(len(held)), heights, 0.9, bottom, color=face, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.axhline(num_blocks, color=RED, lw=1.5)
    ax.text(len(held) - 0.5, num_blocks + 0.15, f"pool: {num_blocks} blocks", color=RED, ha="right", va="bottom")
    for step, name in preempted:
        tip, text = (step, num_blocks), (step, num_blocks + 1.7)
        ax.annotate(f"{name} preempted", tip, text, ha="center", arrowprops={"arrowstyle": "-|>", "color": INK})
    ax.set(xlabel="step", xticks=range(0, len(held), 3), ylabel="blocks held", ylim=(0, num_blocks + 3))
    ax.legend(loc="upper right", ncols=3)
    return fig
