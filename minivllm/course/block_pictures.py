"""The pictures of chapters 03 and 04: slots, blocks, tables, and who holds what."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.course.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, SKY, arrow, blank_axes, box

LIGHT = {"A": SKY, "B": ORANGE, "C": "#66C2A5", "D": PINK}  # one face per sequence, dark text readable on each
CELL = 0.25  # inches


def draw_block(
    ax: Axes, x: float, y: float, tokens: Sequence[object], block_size: int, *, face: str = PALE, size: float = 8
) -> None:
    """A block of `block_size` slots with its upper left corner at (x, y): filled slots first, the others empty."""
    for i in range(block_size):
        held = i < len(tokens)
        text = str(tokens[i]) if held else ""
        box(ax, x + i * CELL, y, CELL, CELL, text, face=face if held else "white", edge=GREY, line=0.6, size=size)
    box(ax, x, y, block_size * CELL, CELL, face="none", line=1.3)


def draw_reservations(prompts: Sequence[int], limit: int, generated: int, outputs: Sequence[int]) -> Figure:
    """One bar of slots per request: tokens held, slots still to be used, slots that will never be used."""
    fig, ax = blank_axes(8.8, 1.9)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        y = 0.15 + 0.42 * row
        held = prompt + min(generated, output)
        ax.text(0.2, y + 0.15, "ABC"[row], weight="bold", va="center")
        for slot in range(prompt + limit):
            kind = BLUE if slot < held else SKY if slot < prompt + output else "white"
            hatch = "////" if kind == "white" else None
            corner = (0.5 + slot * 0.29, y)
            ax.add_patch(plt.Rectangle(corner, 0.29, 0.3, facecolor=kind, edgecolor=GREY, linewidth=0.6, hatch=hatch))
    kinds = [Patch(facecolor=BLUE, label="holds a token"), Patch(facecolor=SKY, label="reserved, will be used")]
    kinds.append(Patch(facecolor="white", edgecolor=GREY, hatch="////", label="reserved, never used"))
    ax.legend(handles=kinds, loc="lower center", ncol=3, fontsize=10)
    return fig


def draw_tables(
    tables: dict[str, Sequence[int]], num_tokens: dict[str, int], num_blocks: int, block_size: int
) -> Figure:
    """Sequences as they see themselves (above) and where their blocks are (below), joined by their block tables."""
    width = block_size * CELL
    pitch = max(width + 0.1, 8.4 / num_blocks)
    fig, ax = blank_axes(0.5 + num_blocks * pitch, 1.15 + 0.55 * len(tables))
    bottom = 0.5 + 0.55 * len(tables)
    for block in range(num_blocks):
        draw_block(ax, 0.3 + block * pitch, bottom, [], block_size)
        ax.text(0.3 + block * pitch, bottom + 0.4, f"block {block}", fontsize=9, va="center")
    for row, (name, table) in enumerate(tables.items()):
        y = 0.15 + 0.55 * row
        ax.text(0.15, y + 0.13, name, weight="bold", va="center", ha="center")
        for i, block in enumerate(table):
            tokens = range(i * block_size, min((i + 1) * block_size, num_tokens[name]))
            left, below = 0.3 + (i + row * 2.5) * (width + 0.12), 0.3 + block * pitch
            draw_block(ax, left, y, tokens, block_size, face=LIGHT[name])
            draw_block(ax, below, bottom, tokens, block_size, face=LIGHT[name])
            start, end = (left + width / 2, y + CELL), (below + width / 2, bottom)
            ax.plot(*zip(start, end, strict=True), color=LIGHT[name], lw=1.6, zorder=0)
    return fig


def draw_film(owners: Sequence[Sequence[int]]) -> Figure:
    """Which request holds which block, step by step: `owners[step][block]` is its number, or −1."""
    colors = [BLUE, ORANGE, GREEN, SKY, PINK, "#D55E00", "#F0E442", GREY]
    fig, ax = plt.subplots(figsize=(8.8, 3.4))
    for step, row in enumerate(owners):
        for block, owner in enumerate(row):
            if owner >= 0:
                ax.add_patch(plt.Rectangle((step, block), 1, 0.9, facecolor=colors[owner % len(colors)]))
    ax.set(xlim=(0, len(owners)), ylim=(len(owners[0]), 0), xlabel="step", ylabel="physical block")
    return fig


def draw_shares(rows: dict[str, Sequence[float]], paper: dict[str, float]) -> Figure:
    """Stacked bars, in percent of the pool: tokens, reserved, never used, lost outside; the paper's share as a line."""
    kinds = [("holds tokens", BLUE, None), ("reserved, will be used", SKY, None)]
    kinds += [("reserved, never used", "white", "////"), ("in no reservation", PALE, None)]
    fig, ax = plt.subplots(figsize=(8.8, 3.2))
    for y, (name, shares) in enumerate(rows.items()):
        left = 0.0
        for share, (_, face, hatch) in zip(shares, kinds, strict=True):
            ax.barh(y, share, left=left, height=0.62, facecolor=face, edgecolor=GREY, hatch=hatch, linewidth=0.6)
            left += share
        ax.text(1, y, f"{shares[0]:.1f} %", color="white", weight="bold", va="center")
        ax.plot([paper[name]] * 2, [y - 0.38, y + 0.38], color=INK, lw=2.5)
    ax.set(yticks=range(len(rows)), yticklabels=list(rows), xlim=(0, 100), xlabel="% of the pool's slots")
    ax.invert_yaxis()
    handles = [Patch(facecolor=face, edgecolor=GREY, hatch=hatch, label=label) for label, face, hatch in kinds]
    handles += ax.plot([], [], color=INK, lw=2.5, label="tokens, in the paper")
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=3, fontsize=9)
    return fig
