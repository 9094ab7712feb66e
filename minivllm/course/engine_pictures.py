"""The pictures of chapter 09: what a filter leaves, what a stream shows, a life, a table as a matrix, load."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from minivllm.course.drawing import BLUE, GREY, INK, ORANGE, PALE, RED, SKY, arrow, blank_axes, box

REQUEST_COLORS = {"A": ORANGE, "B": SKY, "C": "#66C2A5"}


def draw_filters(tokens: Sequence[str], panels: Mapping[str, Sequence[float]]) -> Figure:
    """One panel of bars per setting: the probability of each token; one that may not be drawn has a cross."""
    fig, axes = plt.subplots(1, len(panels), figsize=(9.0, 2.6), sharey=True)
    for ax, (title, probs) in zip(axes, panels.items(), strict=True):
        ax.bar(range(len(tokens)), probs, color=[BLUE if p else GREY for p in probs])
        for place, p in enumerate(probs):
            ax.text(place, p + 0.02, f"{p:.2f}" if p else "×", ha="center", size=9 if p else 12)
        ax.set_title(title, size=10.5)
        ax.set(xticks=range(len(tokens)), xticklabels=tokens, ylim=(0, 0.88), yticks=[])
        ax.spines["left"].set_visible(False)
    axes[0].set_ylabel("probability")
    return fig


def draw_stream(tokens: Sequence[str], shown: Sequence[str], stop: str) -> Figure:
    """Tokens of an answer above, below what the reader has seen after each, when `stop` may not be shown."""
    fig, ax = blank_axes(7.6, 2.3)
    ax.text(0.2, 0.3, f"tokens, with the stop string {stop!r}", size=10)
    ax.text(0.2, 1.55, "the reader has seen", size=10)
    held = ""
    for place, (token, text) in enumerate(zip(tokens, shown, strict=True)):
        x = 1.9 + 1.8 * place
        held += token
        box(ax, x, 0.55, 1.1, 0.5, token, face=SKY, bold=True, size=12)
        arrow(ax, (x + 0.55, 1.1), (x + 0.55, 1.65), color=GREY)
        box(ax, x, 1.7, 1.1, 0.45, text, face=PALE, size=12)
        if waiting := held[len(text) :]:
            label = "never shown" if stop in waiting else "held"
            ax.text(x + 0.62, 1.38, f"{label}: {waiting}", size=9.5, color=RED, va="center")
    return fig


def draw_life(queue: float, first: float, last: float) -> Figure:
    """The life of a request on a line: arrival at 0, first computed at `queue`, first token, last token (all ms)."""
    fig, ax = blank_axes(8.8, 2.1)
    left, width = 0.5, 7.8
    at = {name: left + width * t / last for name, t in {"queue": queue, "first": first, "last": last}.items()}
    box(ax, left, 0.85, at["queue"] - left, 0.4, "waiting", face=PALE)
    box(ax, at["queue"], 0.85, at["first"] - at["queue"], 0.4, "prompt", face=ORANGE)
    box(ax, at["first"], 0.85, at["last"] - at["first"], 0.4, "one token after the other", face=SKY)
    spans = [("queue time", left, at["queue"], 0.62), ("TTFT", left, at["first"], 1.5)]
    spans += [("TPOT × (tokens − 1)", at["first"], at["last"], 1.5), ("latency", left, at["last"], 1.95)]
    for name, start, end, y in spans:
        arrow(ax, (start, y), (end, y), style="<|-|>", color=GREY)
        ax.text((start + end) / 2, y - 0.05, name, ha="center", va="bottom", size=10)
    for x, name in ((left, "arrival"), (at["first"], "first token"), (at["last"], "last token")):
        ax.text(x, 0.25, name, ha="center", size=10, weight="bold", color=INK)
        ax.plot([x, x], [0.32, 0.85], color=INK, lw=1)
    return fig


def draw_page_matrix(tables: Mapping[str, Sequence[int]], lens: Mapping[str, int], block_size: int) -> Figure:
    """A row per request, a column per slot of a pool of eight blocks; a filled cell is a key that the request sees."""
    fig, ax = blank_axes(8.8, 1.8)
    cell, left, top = 0.245, 0.75, 0.35
    for row, (name, table) in enumerate(tables.items()):
        y = top + 0.36 * row
        ax.text(left - 0.3, y + 0.16, name, size=12, weight="bold", va="center")
        seen = {table[p // block_size] * block_size + p % block_size: p for p in range(lens[name])}
        for slot in range(8 * block_size):
            face = REQUEST_COLORS[name] if slot in seen else "white"
            text = str(seen[slot]) if slot in seen else ""
            box(ax, left + cell * slot, y, cell, 0.3, text, face=face, edge="#DDDDDD", size=8, line=0.8)
    for block in range(8):
        x = left + cell * block_size * block
        ax.plot([x, x], [top - 0.08, top + 1.1], color=INK, lw=1.2)
        ax.text(x + cell * block_size / 2, top - 0.18, f"block {block}", ha="center", size=9)
    ax.text(left, 1.7, "columns: the slots of the pool; a number is the position of the key in its request", size=9.5)
    return fig


def draw_load(
    loads: Sequence[float],
    throughput: Sequence[float],
    median: Sequence[float],
    worst: Sequence[float],
    capacity: float,
) -> Figure:
    """Left: requests served against requests arriving (both per second); right: latency percentiles in seconds.
    A dotted line in both: the capacity, in requests per second."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.8, 3.2))
    left.plot(loads, loads, "--", color=GREY)
    left.text(0.8 * loads[-1], 0.63 * loads[-1], "all that\narrives", color="#666666", size=10)
    left.plot(loads, throughput, "o-", color=BLUE, lw=2)
    left.set(title="Served", ylabel="requests per second", ylim=(0, None))
    right.plot(loads, worst, "o-", color=RED, lw=2, label="95th percentile")
    right.plot(loads, median, "o-", color=ORANGE, lw=2, label="median")
    right.set(title="Latency", ylabel="seconds", ylim=(0, 1.1 * max(worst)))
    right.legend(loc="upper left")
    left.text(1.03 * capacity, 0.05 * loads[-1], "capacity", color="#666666", size=10)
    for ax in (left, right):
        ax.axvline(capacity, ls=":", color=GREY)
        ax.set(xlabel="arriving requests per second", xlim=(0, None))
    return fig


def draw_ablation(seconds: Mapping[str, float]) -> Figure:
    """A bar per variant of the engine: seconds for the same work."""
    fig, ax = plt.subplots(figsize=(7.6, 0.42 * len(seconds) + 0.7))
    names = list(seconds)
    ax.barh(names, list(seconds.values()), color=[BLUE] + [ORANGE] * (len(names) - 1))
    for place, value in enumerate(seconds.values()):
        ax.text(value, place, f" {value:.2f} s", va="center", size=10)
    ax.invert_yaxis()
    ax.set(xlabel="CPU seconds for the same 16 requests", xlim=(0, 1.15 * max(seconds.values())))
    return fig
