"""Pictures of chapter 02: what a cache saves in each step, and what one piece per request wastes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minivllm.course.drawing import BLUE, GREY, INK, ORANGE, blank_axes

CELL = 0.19  # inches a square
KEPT = "#CFE8F7"  # a pale SKY
DARK_ORANGE = "#9A6700"  # ORANGE as a letter is too light on white


def draw_row(ax: Axes, left: float, top: float, num_squares: int, color: str) -> None:
    """Squares side by side, the first one's corner at (left, top)."""
    for column in range(num_squares):
        ax.add_patch(Rectangle((left + CELL * column, top), CELL, CELL, fc=color, ec="white", lw=0.7))


def draw_triangle(ax: Axes, left: float, top: float, num_tokens: int, color: str) -> None:
    """Every comparison of a query (row) with a key (column) when all tokens are new."""
    for row in range(num_tokens):
        draw_row(ax, left, top + CELL * row, row + 1, color)


def draw_steps(num_prompt_tokens: int, num_steps: int) -> Figure:
    """The comparisons of each decoding step: above with everything computed again, below with a cache."""
    fig, ax = blank_axes(0.6 + 2.05 * num_steps, 4.1)
    for step in range(num_steps):
        length, left = num_prompt_tokens + step, 0.55 + 2.05 * step
        everything = length * (length + 1) // 2
        ax.text(left, 0.3, f"step {step + 1}: {everything} comparisons", size=9.5, color=INK)
        ax.text(left, 2.3, f"step {step + 1}: {length if step else everything} comparisons", size=9.5, color=INK)
        draw_triangle(ax, left, 0.45, length, ORANGE)
        if step == 0:
            draw_triangle(ax, left, 2.45, length, BLUE)
            continue
        last_row = 2.45 + CELL * (length - 1)
        draw_row(ax, left, last_row, length, BLUE)
        draw_row(ax, left, last_row - 1.5 * CELL, length - 1, KEPT)  # half a square apart: no part of the triangle
        ax.text(left, last_row - 1.5 * CELL - 0.06, "K, V kept", size=9, color=INK)
    ax.text(0.25, 1.2, "all again", rotation=90, ha="center", va="center", color=DARK_ORANGE, weight="bold")
    ax.text(0.25, 3.2, "with a cache", rotation=90, ha="center", va="center", color=BLUE, weight="bold")
    return fig


def draw_stretches(lengths: Sequence[int], stretch: int) -> Figure:
    """One stretch of rows per request: filled as far as its text came (`lengths`), hatched where it holds nothing."""
    fig, ax = blank_axes(8.8, 0.58 + 0.29 * len(lengths))
    scale = 7.6 / stretch
    for number, length in enumerate(lengths):
        y = 0.35 + 0.29 * number
        ax.add_patch(Rectangle((0.9, y), stretch * scale, 0.22, fc="white", ec=GREY, hatch="///"))
        ax.add_patch(Rectangle((0.9, y), length * scale, 0.22, fc=BLUE, ec=GREY))
        ax.text(0.8, y + 0.11, f"request {number}", ha="right", va="center", size=9)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        ax.text(0.98 + length * scale, y + 0.11, str(length), va="center", size=9, bbox=box)
    ax.text(0.9, 0.2, "row 0", size=9, color=INK)
    ax.text(8.5, 0.2, f"row {stretch - 1}", size=9, color=INK, ha="right")
    return fig
