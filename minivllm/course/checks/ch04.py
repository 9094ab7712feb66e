"""Checks of chapter 04: forks, hits, caches that trust too much, and who is evicted first."""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator

from minivllm.course.exercises import Case, exercise

BLOCK_SIZE = 4


@exercise("4.1")
def four_samples(copies_made: int, blocks_together: int, blocks_apart: int) -> Iterator[Case]:
    yield copies_made != 4, "(a) when three have taken their copies, how many tables is the original in?"
    yield copies_made == 3, "(a) only the half-full block is written to while shared, and each of the four writes to it"
    yield blocks_apart == 16, "(c) 10 + 6 tokens, four to a block, four times"
    yield blocks_together != 16, "(b) the full blocks of the prompt are never copied"
    yield blocks_together == 10, "(b) the prompt's two full blocks count once; add what each of the four has for itself"


class NearsightedCache:
    """Names a block by its own tokens, whatever came before."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()

    def blocks(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[i : i + 4]) for i in range(0, len(prompt) // 4 * 4, 4)]

    def add(self, prompt: list[int]) -> None:
        self.known.update(self.blocks(prompt))

    def find(self, prompt: list[int]) -> int:
        found = 0
        for block in self.blocks(prompt):
            if block not in self.known:
                break
            found += 4
        return found


class WeakCache(NearsightedCache):
    """Names a block by a hash of all tokens so far, a weak one, and compares the block's own tokens on a hit."""

    def add(self, prompt: list[int]) -> None:
        name = 0
        for block in self.blocks(prompt):
            name = (name + sum(block)) % 251
            self.known.add((name, *block))

    def find(self, prompt: list[int]) -> int:
        name, found = 0, 0
        for block in self.blocks(prompt):
            name = (name + sum(block)) % 251
            if (name, *block) not in self.known:
                break
            found += 4
        return found


def common_beginning(first: list[int], second: list[int]) -> int:
    """Tokens in full blocks at the start of both prompts: what may be shared."""
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(first), len(second)) if same is None else same) // BLOCK_SIZE * BLOCK_SIZE


def fooled(cache: NearsightedCache, first: list[int], second: list[int]) -> Iterator[Case]:
    """Cases in which `cache` must hand out more of `first` than the two prompts have in common."""
    for prompt in (first, second):
        ids = isinstance(prompt, (list, tuple)) and all(isinstance(token, int) and token >= 0 for token in prompt)
        yield ids, f"a prompt is a list of token ids, integers from 0 up: {prompt!r} is not"
    yield min(len(first), len(second)) >= BLOCK_SIZE, "each prompt needs a full block of four tokens"
    cache.add(list(first))
    found, right = cache.find(list(second)), common_beginning(first, second)
    yield found > 0, "nothing is shared: `find` stops at the first block of the second prompt"
    reason = f"{found} tokens are shared, and rightly so: both prompts begin with the same {right} tokens"
    yield found > right, reason


@exercise("4.2")
def without_the_parent(first: list[int], second: list[int]) -> Iterator[Case]:
    yield from fooled(NearsightedCache(), first, second)


@exercise("4.3")
def with_a_weak_hash(first: list[int], second: list[int]) -> Iterator[Case]:
    yield from fooled(WeakCache(), first, second)


@exercise("4.4")
def predicted_hits(found_1: int, found_2: int, found_3: int, found_4: int) -> Iterator[Case]:
    yield (
        found_1 != 8,
        "1: all 8 are cached, but one token must be left to compute, and only whole blocks are taken",
    )
    yield found_1 == 4, "1: the largest number of whole blocks that leaves a token to compute"
    yield found_2 == 8, "2: tokens 8 and 9 are in a block that is not full, so it is not registered"
    yield found_3 == 8, "3: it goes on where the cached sequence ends; only whole, full blocks count"
    yield found_4 != 8, "4: its second block has another token in it, and so another name"
    yield found_4 == 4, "4: the walk stops at the first block that is not known"


@exercise("4.5")
def order_of_eviction(eviction_order: Callable[[list[list[int]]], list[int]]) -> Iterator[Case]:
    dice = random.Random(0)
    cases = [[[0, 1, 2]], [[3, 1, 4], [5, 9]], [[3, 1], [3, 7]], [[0, 1, 2], [0, 1, 3], [0, 4]]]
    for _ in range(20):
        shared = list(range(dice.randint(0, 3)))
        tables, following = [], 10
        for _ in range(dice.randint(1, 4)):
            own = list(range(following, following + dice.randint(1, 3)))
            tables.append(shared[: dice.randint(0, len(shared))] + own)
            following += len(own)
        cases.append(tables)
    for tables in cases:
        expected, got = _evicted(tables), eviction_order([list(table) for table in tables])
        yield got is not None, "your function returned None: it must return the list of blocks"
        shared = sum(map(len, tables)) > len(expected)
        order = "tables are freed in the order given, each from its end"
        advice = "a block is free only when the last of its tables is" if shared else order
        yield list(got) == expected, f"tables {tables}: you say {list(got)}; {advice}"


def _evicted(tables: list[list[int]]) -> list[int]:
    """A block joins the queue when the last table that holds it is freed; later tables are still held."""
    queue: OrderedDict[int, None] = OrderedDict()
    for i, table in enumerate(tables):
        still_held = {block for later in tables[i + 1 :] for block in later}
        queue.update((block, None) for block in reversed(table) if block not in still_held)
    return list(queue)
