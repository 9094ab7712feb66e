"""Pictures of chapter 10: the roofline, timelines of host and device, where a step goes, versions side by side."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from minivllm.course.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PALETTE,
    PINK,
    RED,
    SKY,
    YELLOW,
    blank_axes,
    box,
)

Bar = tuple[str, float, float, str]  # lane, start, end, text


def draw_roofline(points: Mapping[str, tuple[float, float]], read_tb_s: float, matrix_tflop_s: float) -> Figure:
    """Reached TFLOP/s against FLOPs per byte, both logarithmic, under the two roofs; {name: (intensity, TFLOP/s)}."""
    fig, ax = plt.subplots(figsize=(8.4, 4.0))
    x = np.logspace(-0.3, 4.3, 200)
    ax.plot(x, np.minimum(x * read_tb_s, matrix_tflop_s), color=INK, lw=2)
    knee = matrix_tflop_s / read_tb_s
    ax.plot([knee, knee], [9, matrix_tflop_s], "--", color=GREY, lw=1, zorder=0)
    ax.text(knee * 1.12, 13, f"{knee:.0f} FLOPs per byte", size=9)
    ax.text(1.1, 1.1 * read_tb_s * 1.5, f"{read_tb_s:.1f} TB/s", rotation=32, size=9, ha="center")
    ax.text(9000, matrix_tflop_s * 1.2, f"{matrix_tflop_s:.0f} TFLOP/s", size=9, ha="center")
    for (name, (intensity, reached)), color in zip(points.items(), PALETTE, strict=False):
        roof = min(intensity * read_tb_s, matrix_tflop_s)
        ax.plot([intensity, intensity], [reached, roof], ":", color=color, lw=1.5)
        ax.plot(intensity, reached, "o", color=color, ms=8, label=f"{name}: {reached / roof:.0%} of its roof")
    ax.set(xscale="log", yscale="log", xlabel="FLOPs per byte read", ylabel="TFLOP/s", ylim=(0.5, 2500))
    ax.legend(loc="lower right", fontsize=9)
    return fig


def draw_timelines(timelines: Mapping[str, Sequence[Bar]], unit: str, *, ticks: float) -> Figure:
    """One axis per timeline, titled by its name: boxes in the lanes `host` and `GPU`, on one scale of time."""
    end = max(bar[2] for bars in timelines.values() for bar in bars)
    fig, axes = plt.subplots(len(timelines), 1, figsize=(8.8, 1.55 * len(timelines) + 0.4), sharex=True)
    colors = {"host": SKY, "GPU": ORANGE}
    for ax, (title, bars) in zip(np.atleast_1d(axes), timelines.items(), strict=True):
        for lane, start, stop, text in bars:
            y = 1 if lane == "host" else 0
            ax.barh(y, stop - start, 0.72, start, color=colors[lane], edgecolor=INK, linewidth=0.8)
            ax.text((start + stop) / 2, y, text, ha="center", va="center", size=8)
        ax.set(title=title, yticks=[0, 1], yticklabels=["GPU", "host"], xlim=(0, end * 1.01), ylim=(-0.5, 1.5))
        ax.set_xticks(np.arange(0, end * 1.01, ticks))
    ax.set_xlabel(unit)
    return fig


KINDS = {
    "matrix products": BLUE,
    "attention": ORANGE,
    "between the products": GREEN,
    "head and sampler": PINK,
    "everything else": YELLOW,
    "nothing runs": PALE,
}


def draw_step_bars(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """One bar per kind of step, in shares of its time: {name: {kind: ms}}, the kinds in the order of KINDS."""
    fig, ax = plt.subplots(figsize=(8.8, 0.75 * len(steps) + 1.3))
    for y, parts in enumerate(steps.values()):
        total, left = sum(parts.values()), 0.0
        for kind, color in KINDS.items():
            share = parts.get(kind, 0.0) / total
            ax.barh(y, share, 0.62, left, color=color, edgecolor=INK, linewidth=0.6, label=kind if y == 0 else None)
            if share > 0.055:
                light = kind == "matrix products"
                ax.text(
                    left + share / 2,
                    y,
                    f"{parts[kind]:.2f}",
                    ha="center",
                    va="center",
                    size=9,
                    color="white" if light else INK,
                )
            left += share
        ax.text(1.01, y, f"{total:.2f} ms", va="center", size=9)
    ax.set(yticks=range(len(steps)), yticklabels=list(steps), xlim=(0, 1.12), xticks=[])
    ax.invert_yaxis()
    ax.spines["bottom"].set_visible(False)
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


def draw_waterfall(rates: Mapping[str, Mapping[str, float]]) -> Figure:
    """Tokens per second of each version, a panel for each load: {version: {load: tok/s}}."""
    loads = list(next(iter(rates.values())))
    fig, axes = plt.subplots(1, len(loads), figsize=(9.4, 0.42 * len(rates) + 1.0), sharey=True)
    for ax, load in zip(axes, loads, strict=True):
        values = [row[load] for row in rates.values()]
        ax.barh(range(len(values)), values, 0.66, color=[GREY] + [BLUE] * (len(values) - 1))
        for y, value in enumerate(values):
            ax.text(value + max(values) * 0.015, y, f"{value:,.0f}", va="center", size=9)
        ax.set(title=f"{load}, tokens per second", xlim=(0, max(values) * 1.22), xticks=[])
        ax.spines["bottom"].set_visible(False)
    axes[0].set(yticks=range(len(rates)), yticklabels=list(rates))
    axes[0].invert_yaxis()
    return fig


def draw_padding(columns: Mapping[str, Sequence[object]], num_real: int) -> Figure:
    """The inputs of a recorded step of several rows, the padded ones pale: {field: its value in each row}."""
    num_rows = len(next(iter(columns.values())))
    fig, ax = blank_axes(8.8, 0.55 + 0.5 * num_rows)
    for c, (name, values) in enumerate(columns.items()):
        left = 0.9 + 1.58 * c
        ax.text(left + 0.75, 0.25, name, ha="center", va="center", size=9, color=INK)
        for r, value in enumerate(values):
            real = r < num_real
            box(
                ax,
                left,
                0.42 + 0.5 * r,
                1.5,
                0.42,
                str(value),
                face=SKY if real else PALE,
                color=INK if real else RED,
                size=9,
            )
    for r in range(num_rows):
        text = "ABCDEFGH"[r] if r < num_real else "pad"
        ax.text(0.45, 0.63 + 0.5 * r, text, ha="center", va="center", size=10, weight="bold")
    return fig
