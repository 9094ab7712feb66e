"""Checks of chapter 07: tiles with and without a mask, the list of tiles, a wrong diagonal, a sliding window."""

import random
from collections.abc import Callable, Iterator

from minivllm.course.exercises import Case, exercise


@exercise("7.1")
def counting_tiles(free_1: int, free_2: int, masked_1: int, masked_2: int) -> Iterator[Case]:
    yield free_1 != 2, "first query tile, no mask: its first query sees 71 keys, so the second tile of 64 is not whole"
    yield free_1 == 1, "first query tile, no mask: how many whole tiles of 64 lie in the 71 keys of its first query?"
    yield masked_1 == 2, "first query tile, with a mask: its last query sits at position 133, and so sees 134 keys"
    yield free_2 == 2, "second query tile, no mask: its first query sits at position 134"
    yield masked_2 == 1, "second query tile, with a mask: the last of all queries sits at position 169"


@exercise("7.2")
def tiles_of_a_batch(list_tiles: Callable[[list[int], int], list[tuple[int, int]]]) -> Iterator[Case]:
    got = [tuple(tile) for tile in list_tiles([12, 5, 3], 4)]
    told, want = "prompts of 12, 5 and 3, tiles of 4", [(2, 0), (1, 4), (1, 0), (0, 8), (0, 4), (0, 0)]
    yield len(got) == 6, f"{told}: 3 + 2 + 1 tiles hold tokens, you list {len(got)}"
    yield got != sorted(want), f"{told}: the right tiles, but the last request comes first"
    yield got == want or sorted(got) != sorted(want), f"{told}: the right tiles in another order, you list {got}"
    yield got == want, f"{told}: pairs of a request and its tile's first token are asked for, you list {got}"
    empty = [tuple(tile) for tile in list_tiles([0, 4, 0, 1], 4)]
    reason = f"new tokens 0, 4, 0, 1: requests without new tokens have no tile, you list {empty}"
    yield empty == [(3, 0), (1, 0)], reason
    rng = random.Random(0)
    for _ in range(50):
        new, tokens = [rng.randint(0, 30) for _ in range(rng.randint(1, 6))], rng.randint(1, 9)
        got = [tuple(tile) for tile in list_tiles(list(new), tokens)]
        covered = [(s, t) for s, first in got for t in range(first, min(first + tokens, new[s]))]
        everything = [(s, t) for s, n in enumerate(new) for t in range(n)]
        yield sorted(covered) == everything, f"new tokens {new}, tiles of {tokens}: not every token is covered once"
        yield got == sorted(got, reverse=True), f"new tokens {new}, tiles of {tokens}: not last tile first, {got}"


@exercise("7.3")
def wrong_diagonal(queries: list[int]) -> Iterator[Case]:
    queries = sorted(set(queries))
    yield (
        3 not in queries and 7 not in queries,
        "the last query of a tile may see all the keys up to its own tile's end",
    )
    yield queries != [0, 1, 2], "that is the first tile; the second has the same fault"
    yield queries == [0, 1, 2, 4, 5, 6], "which queries of a tile have keys after them in the same tile of keys?"


@exercise("7.4")
def window_borders(borders: Callable[[int, int, int, int], tuple[int, int, int]]) -> Iterator[Case]:
    rng = random.Random(1)
    cases = [(4, 7, 100, 4), (8, 11, 4, 4), (10, 13, 6, 4), (0, 3, 1, 4)]
    cases += [(p, p + rng.randint(0, 15), rng.randint(1, 40), rng.choice([1, 4, 8])) for p in range(40)]
    for first, last, window, keys in cases:
        start, whole, diagonal = answer = borders(first, last, window, keys)
        told = f"queries {first} to {last}, a window of {window}, tiles of {keys} keys"
        yield all(x % keys == 0 for x in answer), f"{told}: each border is a multiple of {keys}, you say {answer}"
        seen = {p: range(max(0, p - window + 1), p + 1) for p in range(first, last + 1)}
        want = min(keys_of.start for keys_of in seen.values()) // keys * keys
        yield start == want, f"{told}: the first tile that any query sees starts at {want}, you say {start}"
        latest = max(keys_of.start for keys_of in seen.values())
        want = -(-latest // keys) * keys
        yield whole == want, f"{told}: from key {latest} on no query is cut off on the left; you say {whole}"
        want = (first + 1) // keys * keys
        yield diagonal == want, f"{told}: the diagonal is where it was without a window, at {want}; you say {diagonal}"
