"""Pictures of chapter 01: positions as clock hands, and one layer of the model as data flows."""

import math

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from minivllm.course.drawing import BLUE, GREY, INK, ORANGE, PALE, SKY, arrow, blank_axes, box


def draw_clocks(pairs: list[tuple[int, int]], speed: float) -> Figure:
    """One clock per (query position, key position), both hands turned by speed × position radians."""
    fig, axes = plt.subplots(1, len(pairs), figsize=(8.4, 2.5))
    for ax, (query, key) in zip(axes, pairs, strict=True):
        ax.add_patch(plt.Circle((0, 0), 1, fill=False, color=GREY))
        for position, color, label in [(query, ORANGE, "query"), (key, BLUE, "key")]:
            x, y = math.cos(speed * position), math.sin(speed * position)
            ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 2})
            side = "left" if x > 0 else "right"  # a label begins at its hand and leads away from the circle
            ax.text(1.12 * x, 1.12 * y, f"{label} at {position}", color=color, ha=side, va="center", size=9)
        ax.set(xlim=(-2, 2), ylim=(-1.1, 1.3), aspect="equal")
        ax.set_title(f"apart {query - key}: dot {math.cos(speed * (query - key)):.2f}", loc="center")
        ax.axis("off")
    return fig


def draw_layer(hidden_size: int) -> Figure:
    """The hidden state as a line, and the two detours of a layer that are added back to it."""
    fig, ax = blank_axes(9.2, 2.2)
    ax.plot([0.1, 8.7], [1.6, 1.6], color=INK, lw=2)
    arrow(ax, (8.7, 1.6), (9.15, 1.6))
    attention = ["norm", "q, k, v\nprojections", "norm of q, k\nand rotation", "attention", "output\nprojection"]
    for x, texts in [(0.3, attention), (6.3, ["norm", "gated\nMLP"])]:
        ax.plot([x, x], [1.6, 0.6], color=INK, lw=1.2)
        for text in texts:
            arrow(ax, (x, 0.6), (x + 0.2, 0.6))
            box(ax, x + 0.2, 0.3, 0.92, 0.6, text, face=SKY if text == "attention" else PALE, size=8.5)
            x += 1.12
        ax.plot([x, x + 0.1], [0.6, 0.6], color=INK, lw=1.2)
        arrow(ax, (x + 0.1, 0.6), (x + 0.1, 1.45))
        plus = {"boxstyle": "circle", "fc": "white", "ec": INK}
        ax.text(x + 0.1, 1.6, "+", ha="center", va="center", size=11, bbox=plus)
    ax.text(0.1, 1.95, f"the hidden state: {hidden_size} numbers for each token", size=9)
    return fig
