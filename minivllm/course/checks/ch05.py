"""Checks of chapter 05: the tables of a step, what a wrong length breaks, flat positions, storing by position."""

import dis
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import torch

from minivllm.course.exercises import Case, exercise

HIDDEN_LOOPS = ("map", "starmap", "filter", "vectorize", "frompyfunc", "apply_along_axis")


@exercise("5.1")
def tables_of_next_step(slots: list[int], bounds: list[int], lens: list[int]) -> Iterator[Case]:
    yield all(hasattr(each, "__len__") for each in (slots, bounds, lens)), "three lists are asked for, not numbers"
    yield len(slots) == 3, f"slot_mapping: one slot for each token of the step, three here; you gave {len(slots)}"
    for name, got, expected in zip("ABC", slots, (1, 25, 15), strict=True):
        yield got == expected, f"slot_mapping: {name}'s slot is not {got}; which block holds its next position?"
    yield list(bounds) == [0, 1, 2, 3], "cu_seqlens_q: a running total of new tokens, beginning with 0"
    yield list(lens) == [14, 6, 4], "context_lens: the keys that each request has after this step, the new one included"


@exercise("5.2")
def shortened_context(requests: str, position: int) -> Iterator[Case]:
    yield set(requests) <= set("ABC"), f"the requests are A, B and C; you wrote {requests!r}"
    yield "A" in requests, "A: its row would be the last of 12 tokens, but it is token number 12, the thirteenth"
    yield "B" in requests and "C" in requests, "B and C: with a context of 0, where do their own keys count?"
    yield isinstance(position, int), f"the position is an integer; you gave {position!r}"
    yield position != 11, "the position: number 11 is among the 12 keys that are still seen"
    yield position == 12, "the position: which of A's keys was written in this very step?"


@exercise("5.3")
def flat_positions_of_batch(flat: Callable[[list[int], list[int]], np.ndarray]) -> Iterator[Case]:
    for starts, new in [([12, 0, 0], [1, 5, 3]), ([0], [4]), ([7, 3], [2, 1]), ([5, 9, 2], [1, 1, 1])]:
        expected = [start + k for start, count in zip(starts, new, strict=True) for k in range(count)]
        got = flat(list(starts), list(new))
        yield isinstance(got, np.ndarray), f"the result should be a NumPy array, not {type(got).__name__}"
        yield np.issubdtype(got.dtype, np.integer), f"positions are integers; your array holds {got.dtype}"
        yield got.tolist() == expected, f"starts {starts}, new {new}: {expected} is wanted, you returned {got.tolist()}"
    yield not _loops(flat), "a Python loop, open or in disguise, is in your code: let NumPy do the 100,000 requests"
    many = flat(list(range(100_000)), [2] * 100_000)
    yield many[-2:].tolist() == [99_999, 100_000], "100,000 requests of 2 tokens: the last two positions are off"


def _loops(function: Callable) -> bool:
    """Whether the function iterates: for, while and comprehensions jump back in byte code, map and its like hide it."""
    codes = [function.__code__, *(c for c in function.__code__.co_consts if hasattr(c, "co_code"))]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    jumps = any(step.opname == "FOR_ITER" or "BACKWARD" in step.opname for step in steps)
    return jumps or any(step.argval in HIDDEN_LOOPS for step in steps)


@exercise("5.4")
def store_of_positions(store: Callable[..., None]) -> Iterator[Case]:
    from minivllm.core.block_manager import slot_of

    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    yield not _loops(store), "a Python loop is in your code: index with two tensors"
    for block_size, first, count in [(4, 0, 4), (4, 2, 5), (4, 12, 1), (8, 3, 12), (8, 3, 20)]:
        cache, keys = torch.full((8, block_size, 2, 3), -1.0), torch.arange(count * 6).float().view(count, 2, 3)
        store(keys, cache, table, first)
        expected = torch.full((8 * block_size, 2, 3), -1.0)
        for key, position in zip(keys, range(first, first + count), strict=True):
            expected[slot_of(position, array("i", table.tolist()), block_size)] = key
        wrong = (cache.view(-1, 6) != expected.view(-1, 6)).any(-1).nonzero().flatten().tolist()
        yield (
            not wrong,
            f"blocks of {block_size}, {count} positions from {first}, table {table.tolist()}: slots {wrong} are off",
        )
