"""The pictures of chapters 03 and 04: slots, blocks, tables, and who holds what."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minivllm.course.drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, PINK, SKY, arrow, blank_axes, box

LIGHT = {"A": SKY, "B": ORANGE, "C": "#66C2A5", "D": PINK}  # one face per sequence, dark text readable on each
SHARED = "#D9D9D9"
CELL = 0.25  # inches

HashFunction = Callable[[int, tuple[int, ...]], int]


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
    fig, ax = blank_axes(0.5 + num_blocks * pitch, 1.2 + 0.55 * len(tables))
    bottom = 0.5 + 0.55 * len(tables)
    holders = Counter(block for table in tables.values() for block in table)
    for block in range(num_blocks):
        draw_block(ax, 0.3 + block * pitch, bottom, [], block_size)
        slots = f"slots {block * block_size} to {(block + 1) * block_size - 1}"
        label = f"block {block}" + (f": count {holders[block]}" if holders[block] > 1 else "")
        ax.text(0.3 + block * pitch, bottom + 0.4, label, fontsize=9, va="center")
        ax.text(0.3 + block * pitch, bottom + 0.58, slots, fontsize=8, va="center", color="#666666")
    for row, (name, table) in enumerate(tables.items()):
        y = 0.15 + 0.55 * row
        ax.text(0.15, y + 0.13, name, weight="bold", va="center", ha="center")
        spare = (num_blocks - 1) * pitch + width - len(table) * (width + 0.12)
        # Rows move to the right a little faster than in even steps: lines from above then pass on their left.
        start = 0.3 + spare * (row / max(1, len(tables) - 1)) ** 0.75
        for i, block in enumerate(table):
            tokens = range(i * block_size, min((i + 1) * block_size, num_tokens[name]))
            left, below = start + i * (width + 0.12), 0.3 + block * pitch
            face = SHARED if holders[block] > 1 else LIGHT[name]
            draw_block(ax, left, y, tokens, block_size, face=face)
            draw_block(ax, below, bottom, tokens, block_size, face=face)
            ax.plot([left + width / 2, below + width / 2], [y + CELL, bottom], color=LIGHT[name], lw=1.6, zorder=0)
    return fig


def draw_film(owners: Sequence[Sequence[int]]) -> Figure:
    """Which request holds which block, step by step: `owners[step][block]` is its number, or −1."""
    colors = [BLUE, ORANGE, GREEN, SKY, PINK, "#D55E00", "#F0E442", GREY]
    fig, ax = plt.subplots(figsize=(8.8, 3.4))
    for step, row in enumerate(owners):
        for block, owner in enumerate(row):
            if owner >= 0:
                ax.add_patch(plt.Rectangle((step, block), 1, 0.9, facecolor=colors[owner % len(colors)]))
    ax.set(xlim=(0, len(owners)), ylim=(len(owners[0]), 0), xlabel="step", ylabel="block of the pool")
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


@dataclass(frozen=True)
class Frame:
    """One picture of a pool: the tables, and the tokens in each block; `copied` draws an arrow from block to block."""

    title: str
    tables: dict[str, list[int]]
    blocks: list[list[str]]
    copied: tuple[int, int] | None = None


def draw_frames(frames: Sequence[Frame], block_size: int) -> Figure:
    """Frames below each other: title and tables on the left, the blocks with their reference counts on the right."""
    fig, ax = blank_axes(8.8, 1.05 * len(frames) + 0.1)
    for row, frame in enumerate(frames):
        y, holders = 0.3 + 1.05 * row, [block for table in frame.tables.values() for block in table]
        ax.text(0.1, y + 0.05, frame.title, fontsize=9.5, weight="bold", va="center")
        tables = "      ".join(f"{name}: {', '.join(map(str, table))}" for name, table in frame.tables.items())
        ax.text(0.33, y + 0.45, f"tables   {tables}", fontsize=10, va="center")
        for block, tokens in enumerate(frame.blocks):
            owner = [name for name, table in frame.tables.items() if block in table]
            face = SHARED if len(owner) > 1 else LIGHT[owner[0]] if owner else PALE
            x = 3.5 + block * 1.35
            draw_block(ax, x, y, tokens, block_size, face=face)
            ax.text(x, y + 0.42, f"block {block}: count {holders.count(block)}", fontsize=9, va="center")
        if frame.copied:
            source, target = (3.5 + block * 1.35 + block_size * CELL / 2 for block in frame.copied)
            style = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=-0.35", "lw": 1.5}
            ax.annotate("", xy=(target, y - 0.02), xytext=(source, y - 0.02), arrowprops=style)
    return fig


def draw_chains(rows: Sequence[tuple[str, Sequence[tuple[int, ...]]]], hash_block: HashFunction) -> Figure:
    """Requests as chains of full blocks: from the hash of one block and the tokens of the next comes the next hash.

    Blocks with the same hash are grey, as shared blocks are everywhere; the others have one colour for the same tokens.
    """
    fig, ax = blank_axes(8.8, 0.75 * len(rows) + 0.1)
    names = [list(accumulate(blocks, hash_block, initial=0))[1:] for _, blocks in rows]
    uses = Counter(name for row in names for name in row)
    faces: dict[tuple[int, ...], str] = {}
    for row, (title, blocks) in enumerate(rows):
        y = 0.3 + 0.75 * row
        ax.text(0.1, y + 0.13, title, weight="bold", va="center", fontsize=10)
        for i, (tokens, name) in enumerate(zip(blocks, names[row], strict=True)):
            x = 1.9 + i * 4.2
            face = SHARED if uses[name] > 1 else faces.setdefault(tokens, list(LIGHT.values())[len(faces) % len(LIGHT)])
            draw_block(ax, x, y, tokens, len(tokens), face=face, size=9)
            arrow(ax, (x + len(tokens) * CELL, y + 0.13), (x + 1.9, y + 0.13))
            ax.text(x + 1.95, y + 0.13, f"…{name % 1000:03d}", va="center", fontsize=11, family="monospace")
            if i + 1 < len(blocks):
                arrow(ax, (x + 2.5, y + 0.13), (x + 4.2, y + 0.13))
    return fig
