"""Picture of chapter 11: what a trace of two steps must count."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.core.block_manager import cdiv
from minivllm.course.drawing import GREY, INK, PALE, blank_axes, box
from minivllm.course.step_pictures import COLORS

CELL, GAP, PANEL, TOP, ROW = 0.22, 0.08, 4.4, 0.62, 0.5


def draw_two_steps(prompts: Mapping[str, int], block_size: int, num_layers: int) -> Figure:
    """The blocks of requests A, B, C after the step that reads their prompts, and after the one that follows."""
    fig, ax = blank_axes(8.8, 2.65)
    before = dict.fromkeys(prompts, 0)
    for step, kernel in enumerate(("paged_prefill", "paged_decode")):
        left, after = 0.2 + step * PANEL, {name: num_tokens + step for name, num_tokens in prompts.items()}
        ax.text(left, 0.25, f"step {step + 1}: {sum(after.values()) - sum(before.values())} tokens", weight="bold")
        for row, name in enumerate(prompts):
            ax.text(left, TOP + ROW * row + 0.15, name, weight="bold", va="center")
            _draw_row(ax, left + 0.27, TOP + ROW * row, before[name], after[name], block_size, COLORS[name])
        opened = sum(cdiv(after[name], block_size) - cdiv(before[name], block_size) for name in prompts)
        blocks = f"{opened} block{'s' if opened > 1 else ''} taken"
        ax.text(left, 2.3, f"each of {num_layers} layers: 1 store_kv, 1 {kernel}\n{blocks}", va="center", size=10)
        before = after
    return fig


def _draw_row(ax: Axes, left: float, top: float, before: int, after: int, block_size: int, color: str) -> None:
    """One request's blocks: a number for each token held, in colour where this step stored it."""
    for block in range(cdiv(after, block_size)):
        x = left + block * (block_size * CELL + GAP)
        for place in range(block_size):
            token = block * block_size + place
            face = "white" if token >= after else color if token >= before else PALE
            box(ax, x + place * CELL, top, CELL, 0.3, str(token) if token < after else "", face=face, edge=GREY, size=8)
        is_new = block >= cdiv(before, block_size)
        box(ax, x, top, block_size * CELL, 0.3, face="none", edge=INK if is_new else GREY, line=2.0 if is_new else 1.0)
