"""Picture of chapter 05: one step's flat row of tokens above, the pool of blocks below."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.core.block_manager import slot_of
from minivllm.course.drawing import GREY, INK, ORANGE, SKY, arrow, blank_axes, box

COLORS = {"A": ORANGE, "B": SKY, "C": "#66C2A5"}
STEP, CELL, BLOCK_LEFT, POOL_TOP = 0.88, 0.24, 0.32, 2.62


def draw_step(tables: dict[str, list[int]], start: dict[str, int], new: dict[str, int], block_size: int) -> Figure:
    """Requests A, B, C: their new tokens in a row, an arrow from each to its slot in a pool of eight blocks."""
    fig, ax = blank_axes(8.8, 4.1)
    ax.text(0.1, 0.22, "the step's flat row of tokens, and the slot of each", size=10)
    ax.text(0.1, 3.95, "the pool: numbers are positions within the request", size=10)
    slots = {}
    for name in tables:
        for position in range(start[name], start[name] + new[name]):
            slot = slot_of(position, tables[name], block_size)
            x = 0.6 + STEP * len(slots)
            box(ax, x, 0.42, 0.78, 0.52, f"{name}{position}", face=COLORS[name], bold=True)
            ax.text(x + 0.39, 1.1, f"slot {slot}", ha="center", va="center", size=9)
            slots[slot] = x + 0.39
    for block in range(8):
        name = next((name for name in tables if block in tables[name]), None)
        first = tables[name].index(block) * block_size if name else 0
        held = min(block_size, start[name] + new[name] - first) if name else 0
        _draw_block(ax, block, block_size, held, first, COLORS.get(name, "white"), slots)
    return fig


def _draw_block(
    ax: Axes, block: int, block_size: int, held: int, first: int, color: str, slots: dict[int, float]
) -> None:
    """One block: its tokens' positions, arrows to the slots that this step fills, and its number below."""
    left = BLOCK_LEFT + 1.05 * block
    for place in range(block_size):
        slot, x = block * block_size + place, left + CELL * place
        text, face = (str(first + place), color) if place < held else ("", "white")
        box(ax, x, POOL_TOP, CELL, 0.5, text, face=face, size=8, edge=GREY)
        if slot in slots:
            arrow(ax, (slots[slot], 1.22), (x + CELL / 2, POOL_TOP - 0.02), color=GREY)
    box(ax, left, POOL_TOP, CELL * block_size, 0.5, face="none", edge=INK, line=1.6)
    middle = left + CELL * block_size / 2
    ax.text(middle, 3.34, f"block {block}", ha="center", size=9)
    slots_text = f"slots {block * block_size}–{(block + 1) * block_size - 1}"
    ax.text(middle, 3.58, slots_text, ha="center", size=8, color="#666666")
