"""Pictures of chapters 06 and 07: programs and what they read, work items, tiles, measured ladders."""

from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minivllm.course.drawing import BLACK, BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, arrow, blank_axes, box
from minivllm.course.kernel_results import Results

REQUEST_COLORS = {"A": ORANGE, "B": SKY, "C": "#66C2A5"}
STAGE_COLORS = [GREY, SKY, ORANGE, BLUE, GREEN, RED]
CELL = 0.24


def draw_store(slots: list[int], block_size: int, num_blocks: int) -> Figure:
    """Programs in a row, one for each new token, and an arrow from each to its slot in the pool."""
    fig, ax = blank_axes(8.8, 2.75)
    ax.text(0.1, 0.2, "programs, one for each new token", size=10)
    ax.text(0.1, 2.6, "the pool, block by block", size=10)
    step = 8.4 / len(slots)
    for block in range(num_blocks):
        left = 0.25 + 1.06 * block
        for place in range(block_size):
            taken = block * block_size + place in slots
            box(ax, left + CELL * place, 1.75, CELL, 0.36, face=ORANGE if taken else "white", edge=GREY)
        box(ax, left, 1.75, CELL * block_size, 0.36, face="none", line=1.6)
        ax.text(left + CELL * block_size / 2, 2.28, f"block {block}", ha="center", size=9)
    for number, slot in enumerate(slots):
        x = 0.25 + step * number
        box(ax, x, 0.35, step - 0.12, 0.4, f"program {number}", face=PALE, size=8.5)
        target = 0.25 + 1.06 * (slot // block_size) + CELL * (slot % block_size + 0.5)
        arrow(ax, (x + (step - 0.12) / 2, 0.75), (target, 1.75), color="#666666")
    return fig


def draw_groups() -> Figure:
    """Four query heads and two KV heads: read once per query head, and once per group."""
    fig, ax = blank_axes(8.8, 2.5)
    for left, title, packed in ((0.3, "stage 1: a program per query head", False), (4.7, "stage 2: per KV head", True)):
        ax.text(left, 0.22, title, size=11, weight="bold")
        for kv_head in range(2):
            center = left + 0.95 + 1.9 * kv_head
            box(ax, center - 0.75, 1.75, 1.5, 0.5, f"K, V of head {kv_head}", face=SKY)
            if packed:
                box(ax, center - 0.85, 0.5, 1.7, 0.56, face="none", edge=INK, style="--")
                arrow(ax, (center, 1.75), (center, 1.08), color=BLACK)
            for member in range(2):
                x = center + 0.42 * (2 * member - 1)
                box(ax, x - 0.36, 0.58, 0.72, 0.4, f"q head {2 * kv_head + member}", face=ORANGE, size=8.5)
                if not packed:
                    box(ax, x - 0.4, 0.5, 0.8, 0.56, face="none", edge=INK, style="--")
                    arrow(ax, (center + 0.2 * (2 * member - 1), 1.75), (x, 1.08), color=BLACK)
    ax.text(0.3, 2.42, "dashed: one program; arrow: one reading of the keys and values", size=9, color="#666666")
    return fig


def draw_multiprocessors(cases: list[tuple[str, int]], count: int) -> Figure:
    """For each (title, number of programs): how many of them each of `count` multiprocessors gets."""
    fig, ax = blank_axes(8.8, 3.2)
    for index, (title, programs) in enumerate(cases):
        left = 0.3 + 4.4 * index
        ax.text(left, 0.25, title, size=11, weight="bold")
        for number in range(count):
            share = programs // count + (number < programs % count)
            x, y = left + 0.32 * (number % 12), 0.45 + 0.23 * (number // 12)
            text, face = (str(share), ORANGE) if share else ("", "white")
            box(ax, x, y, 0.27, 0.18, text, face=face, edge=GREY, size=7.5, line=0.8)
    return fig


def draw_items(items: list[tuple[int, int, int, int]], names: str, grid: int) -> Figure:
    """Work items (sequence, first key, end, pieces) as bars over the keys, in the order of their numbers."""
    fig, ax = plt.subplots(figsize=(7.4, 3.2))
    for number, (seq, first, end, _) in enumerate(items):
        name = names[seq]
        ax.barh(number, end - first, left=first, color=REQUEST_COLORS[name], edgecolor=INK, height=0.7)
        keys = f"keys {first} to {end - 1}" if end - first > 1 else f"key {first}"
        ax.text(end + 0.15, number, f"request {name}, {keys}", va="center", size=9)
    for number in range(len(items), grid):
        ax.text(0.15, number, "empty: returns at once", va="center", size=9, color="#666666")
    ax.set(ylim=(grid - 0.5, -0.5), xlim=(0, 16), yticks=range(grid), xticks=range(0, 13, 4))
    ax.set(xlabel="position of the key in its request", ylabel="work item")
    return fig


def draw_ladder(results: Results, cases: list[str], variants: list[str]) -> Figure:
    """Share of the read bandwidth for each decode case, a bar for each variant."""
    fig, ax = plt.subplots(figsize=(9.0, 3.7))
    width = 0.8 / len(variants)
    for index, variant in enumerate(variants):
        shares = [100 * results.share(results.decode(case, variant)) for case in cases]
        at = [number + width * (index - (len(variants) - 1) / 2) for number in range(len(cases))]
        ax.bar(at, shares, width * 0.92, label=variant, color=STAGE_COLORS[index])
        for x, share in zip(at, shares, strict=True):
            ax.text(x, share + 1, f"{share:.0f}", ha="center", size=8.5)
    ax.axhline(100, color=INK, linewidth=1)
    ax.text(len(cases) - 0.45, 102, "reading alone", ha="right", size=9)
    ax.set(ylim=(0, 122), ylabel="% of the read bandwidth", xticks=range(len(cases)), xticklabels=cases)
    ax.legend(ncols=len(variants), loc="upper left", fontsize=9)
    return fig


def draw_tiles(context: int, new: int, tokens: int, keys: int) -> Figure:
    """Query tiles over key tiles of one sequence, and stairs: each query sees the keys on their left."""
    fig, ax = plt.subplots(figsize=(7.6, 3.6))
    cached = context - new
    for row in range(0, new, tokens):
        first, last = cached + row, min(cached + row + tokens, context)
        for column in range(0, context, keys):
            _draw_tile(ax, row, column, tokens, keys, first, last)
    ax.stairs(range(cached + 1, context + 1), range(new + 1), orientation="horizontal", baseline=None, color=INK, lw=2)
    ax.axvline(cached, color=INK, linestyle=":", linewidth=1.2)
    ax.text(cached / 2, -0.35, f"{cached} cached tokens", ha="center", size=9)
    ax.text(cached + new / 2, -0.35, f"{new} new tokens", ha="center", size=9)
    ax.set(xlim=(0, context), ylim=(new, -1.2), xticks=range(0, context + 1, keys), yticks=range(0, new + 1, tokens))
    ax.set(xlabel="key (position)", ylabel="query (new token)")
    return fig


def _draw_tile(ax: Axes, row: int, column: int, tokens: int, keys: int, first: int, last: int) -> None:
    """One tile of queries at positions [first, last) and keys from `column` on."""
    diagonal = (first + 1) // keys * keys
    kind = "free" if column < diagonal else "masked" if column < last else "skipped"
    face = {"free": SKY, "masked": ORANGE, "skipped": "white"}[kind]
    ax.add_patch(plt.Rectangle((column, row), keys, tokens, facecolor=face, edgecolor=GREY))
    text = {"free": "no mask", "masked": "mask", "skipped": "not visited"}[kind]
    ax.text(column + keys / 2, row + tokens / 2, text, ha="center", va="center", size=8.5)


def draw_grid(cu_seqlens_q: list[int], tokens: int) -> Figure:
    """The flat row of new tokens, cut after every `tokens`-th, and below it the tiles of the grid."""
    fig, ax = blank_axes(8.8, 3.4)
    total, num_seqs = cu_seqlens_q[-1], len(cu_seqlens_q) - 1
    tiles = total // tokens + num_seqs
    unit = 8.2 / tiles
    _draw_flat_row(ax, cu_seqlens_q, tokens, unit)
    ax.text(0.3, 1.62, f"the grid: {total} // {tokens} + {num_seqs} = {tiles} tiles", size=10)
    for tile in range(tiles):
        seq = sum(cu_seqlens_q[s] // tokens + s <= tile for s in range(num_seqs)) - 1
        first = (tile - cu_seqlens_q[seq] // tokens - seq) * tokens
        length = min(tokens, cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] - first)
        x, center = 0.3 + unit * tile, 0.3 + unit * (tile + 0.5) - 0.04
        face = REQUEST_COLORS["ABC"[seq]] if length > 0 else "white"
        box(ax, x, 1.8, unit - 0.08, 0.7, face=face, edge=INK if length > 0 else GREY)
        ax.text(center, 2.15, _tokens_of("ABC"[seq], first, length), ha="center", va="center", size=9)
        ax.text(center, 2.7, f"tile {tile}", ha="center", size=9)
    for seq in range(num_seqs):
        start = cu_seqlens_q[seq] // tokens + seq
        where = f"{'ABC'[seq]} starts at {cu_seqlens_q[seq]} // {tokens} + {seq} = {start}"
        ax.text(0.3 + unit * start, 3.1, where, size=9)
    return fig


def _draw_flat_row(ax: Axes, cu_seqlens_q: list[int], tokens: int, unit: float) -> None:
    """All new tokens side by side, `tokens` of them as wide as `unit`, with a line at every cut."""
    cell = unit / tokens
    ax.text(0.3, 0.22, f"all new tokens in one row, {tokens} to a cut", size=10)
    for seq, (first, end) in enumerate(pairwise(cu_seqlens_q)):
        for token in range(first, end):
            box(ax, 0.3 + cell * token, 0.4, cell, 0.4, str(token), face=REQUEST_COLORS["ABC"[seq]], edge=GREY, size=8)
    for cut in range(-(-cu_seqlens_q[-1] // tokens)):
        ax.plot([0.3 + unit * cut] * 2, [0.34, 1.1], color=INK, linewidth=1.6)
        ax.text(0.36 + unit * cut, 1.05, f"cut {cut}", size=9)


def _tokens_of(name: str, first: int, length: int) -> str:
    """What stands in a tile with `length` tokens of a request, from its token `first` on."""
    if length <= 0:
        return "spare:\nreturns"
    return f"{name}, token\n{first}" if length == 1 else f"{name}, tokens\n{first} to {first + length - 1}"


def draw_prefill(results: Results, cases: list[str], variants: dict[str, str]) -> Figure:
    """TFLOP/s of each prefill case, a bar for each variant that was measured; variants: {variant: legend}."""
    fig, ax = plt.subplots(figsize=(9.0, 3.8))
    width, colors = 0.8 / len(variants), dict(zip(variants, [BLUE, ORANGE, GREEN], strict=True))
    for number, case in enumerate(cases):
        measured = [variant for variant in variants if variant in results.variants(case)]
        for index, variant in enumerate(measured):
            x = number + width * (index - (len(measured) - 1) / 2)
            rate = results.prefill(case, variant)["tflop_s"]
            ax.bar(x, rate, width * 0.92, color=colors[variant], label=variants[variant] if number == 0 else None)
            ax.text(x, rate + 6, f"{rate:.0f}", ha="center", size=8.5)
    ceiling = results.ceilings["matmul_tflop_s"]
    ax.axhline(ceiling, color=INK, linewidth=1)
    ax.text(len(cases) - 0.47, ceiling + 10, f"matrix products alone: {ceiling:.0f}", ha="right", size=9)
    ax.set(xlim=(-0.55, len(cases) - 0.45), ylim=(0, 760), ylabel="TFLOP/s that the answer needs")
    ax.set(xticks=range(len(cases)), xticklabels=cases)
    ax.legend(loc="upper right", bbox_to_anchor=(1, 0.88), fontsize=9)
    return fig
