"""The map of the engine: the same picture in every chapter, with that chapter's part lit."""

from dataclasses import dataclass

from IPython.display import Image
from matplotlib.axes import Axes

from minivllm.course.drawing import GREY, INK, ORANGE, arrow, blank_axes, box, show

WIDTH, HEIGHT = 9.2, 4.7


@dataclass(frozen=True)
class Part:
    """A box of the map: which chapter builds it, where it stands (x, y, width, height in inches) and what it does."""

    chapter: int
    place: tuple[float, float, float, float]
    does: str


PARTS = {
    "LLM": Part(9, (0.3, 0.55, 2.5, 0.62), "prompts in, text out"),
    "engine": Part(9, (3.35, 0.55, 2.5, 0.62), "one step, again and again"),
    "scheduler": Part(8, (3.35, 1.6, 2.5, 0.62), "who runs, how far"),
    "block manager": Part(3, (6.4, 1.6, 2.5, 0.62), "which blocks hold whose tokens"),
    "prefix cache": Part(4, (6.4, 0.55, 2.5, 0.62), "who computed this already"),
    "model runner": Part(5, (3.35, 2.65, 2.5, 0.62), "a batch becomes tensors"),
    "context": Part(5, (6.4, 2.65, 2.5, 0.62), "slots, tables, lengths"),
    "model": Part(1, (0.3, 2.65, 2.5, 0.62), "Qwen3: 6 layers here, 28 in 0.6B"),
    "attention": Part(2, (0.3, 3.95, 2.5, 0.62), "queries meet cached keys"),
    "kernels": Part(6, (3.35, 3.95, 2.5, 0.62), "Triton follows the block table"),
    "KV cache": Part(2, (6.4, 3.95, 2.5, 0.62), "K and V of every token"),
    "sampler": Part(9, (0.3, 1.6, 2.5, 0.62), "one token for each row"),
}

# (from, to): arrows leave and arrive at the nearest sides of the two boxes.
FLOW = [
    ("LLM", "engine"),
    ("engine", "scheduler"),
    ("scheduler", "block manager"),
    ("prefix cache", "block manager"),
    ("scheduler", "model runner"),
    ("model runner", "context"),
    ("model runner", "model"),
    ("model", "attention"),
    ("attention", "kernels"),
    ("kernels", "KV cache"),
    ("context", "KV cache"),
    ("model", "sampler"),
    ("sampler", "engine"),
]


def show_map(here: str | tuple[str, ...], *, built_before: int | None = None) -> Image:
    """Draw the map with the parts named in `here` lit. What earlier chapters built is blue, what is to come is pale.

    built_before: the chapter whose predecessors are blue; by default the first one that builds a lit part.

    Raises KeyError, with the parts' names, for a part that is not on the map.
    """
    lit = (here,) if isinstance(here, str) else here
    if unknown := [name for name in lit if name not in PARTS]:
        raise KeyError(f"{unknown[0]!r} is not on the map; its parts are {', '.join(PARTS)}")
    now = min((PARTS[name].chapter for name in lit), default=0) if built_before is None else built_before
    fig, ax = blank_axes(WIDTH, HEIGHT)
    for start, end in FLOW:
        _connect(ax, PARTS[start], PARTS[end])
    for name, part in PARTS.items():
        _draw_part(ax, name, part, lit=name in lit, built=part.chapter < now)
    _draw_legend(ax, colors=bool(lit))
    return show(
        fig, f"map-{'-'.join(lit) or ('built' if now else 'all')}".replace(" ", "-").lower(), alt=_describe(lit, now)
    )


def _draw_part(ax: Axes, name: str, part: Part, *, lit: bool, built: bool) -> None:
    x, y, width, height = part.place
    face = ORANGE if lit else "#CFE8F7" if built else "white"
    color, edge = (INK, INK) if lit or built else ("#666666", GREY)
    box(ax, x, y, width, height, face=face, edge=edge, line=2.0 if lit else 1.0)
    ax.text(x + 0.12, y + 0.24, name, fontsize=11, weight="bold", color=color, va="center")
    ax.text(x + 0.12, y + 0.46, part.does, fontsize=8.5, color=color, va="center")
    ax.text(x + width - 0.1, y + 0.24, f"{part.chapter:02d}", fontsize=8.5, color=color, ha="right", va="center")


def _connect(ax: Axes, start: Part, end: Part) -> None:
    """An arrow between the facing sides of two boxes: straight across, straight down, or out of a corner."""
    (x0, y0, w0, h0), (x1, y1, w1, h1) = start.place, end.place
    if y0 == y1:
        left_to_right = x0 < x1
        arrow(ax, (x0 + w0 if left_to_right else x0, y0 + h0 / 2), (x1 if left_to_right else x1 + w1, y1 + h1 / 2))
    elif x0 == x1:
        down = y0 < y1
        arrow(ax, (x0 + w0 / 2, y0 + h0 if down else y0), (x1 + w1 / 2, y1 if down else y1 + h1))
    else:
        arrow(ax, (x0 + w0 * 0.9, y0), (x1, y1 + h1 * 0.8))


def _draw_legend(ax: Axes, *, colors: bool) -> None:
    meanings = [(ORANGE, "this chapter"), ("#CFE8F7", "built before"), ("white", "to come")] if colors else []
    for index, (face, text) in enumerate(meanings):
        x = 0.3 + 1.75 * index
        box(ax, x, 0.12, 0.24, 0.18, face=face, edge=GREY)
        ax.text(x + 0.34, 0.21, text, fontsize=9, va="center", color=INK)
    ax.text(
        WIDTH - 0.3, 0.21, "number: the chapter that builds it", fontsize=9, va="center", ha="right", color="#666666"
    )


def _describe(lit: tuple[str, ...], now: int) -> str:
    built = [name for name, part in PARTS.items() if part.chapter < now and name not in lit]
    whole = "Map of the engine, from the LLM class down to the KV cache and back through the sampler."
    return f"{whole} Lit: {', '.join(lit) or 'nothing'}. Built before: {', '.join(built) or 'nothing'}."
