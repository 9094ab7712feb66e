"""Checks of chapter 03: slots, blocks, and a pool that forgets to forget."""

from collections.abc import Callable, Iterator
from itertools import combinations, product

from minivllm.course.exercises import Case, exercise


@exercise("3.1")
def one_more_token(slot_for_b: int, blocks_of_b: int, blocks_of_a: int) -> Iterator[Case]:
    yield (
        slot_for_b not in (5, 9),
        "(a) that is a place in the pool's first blocks: look up B's second block in its table",
    )
    yield slot_for_b != 24, "(a) tokens are counted from 0: B has the tokens 0 to 4, and slot 24 holds number 4"
    yield (
        slot_for_b == 25,
        "(a) the first slot of the block is its number in the pool times 4; then add the place in it",
    )
    yield blocks_of_b == 2, "(b) B's second block has room for three more tokens"
    yield blocks_of_a == 4, "(c) A's 12 tokens fill its three blocks to the last slot: where does the 13th go?"


@exercise("3.2")
def blocks_to_take(new_blocks: Callable[[int, int, int], int]) -> Iterator[Case]:
    for block_size, num_tokens, num_new in product((4, 1, 3, 16), range(35), (*range(1, 35), 0)):
        before = {position // block_size for position in range(num_tokens)}
        after = {position // block_size for position in range(num_tokens + num_new)}
        expected, got = len(after - before), new_blocks(num_tokens, num_new, block_size)
        reason = f"blocks of {block_size}, {num_tokens} held and {num_new} more: you take {got}, {expected} are needed"
        yield got == expected, reason


class CarelessPool:
    """A pool with a mistake in it."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}

    def allocate(self, name: str, num_blocks: int) -> None:
        self.tables[name] = [self.free_blocks.pop() for _ in range(num_blocks)]

    def free(self, name: str) -> None:
        self.free_blocks.extend(self.tables[name])


class _WatchedPool(CarelessPool):
    """Keeps a diary of who is alive, beside a twin that sees the calls and nothing else."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.alive: dict[str, list[int]] = {}
        self.twin = CarelessPool(num_blocks)

    def allocate(self, name: str, num_blocks: int) -> None:
        super().allocate(name, num_blocks)
        self.twin.allocate(name, num_blocks)
        self.alive[name] = list(self.tables[name])

    def free(self, name: str) -> None:
        super().free(name)
        self.twin.free(name)
        self.alive.pop(name, None)


@exercise("3.3")
def a_shared_block(break_it: Callable[[CarelessPool], object]) -> Iterator[Case]:
    pool = _WatchedPool(8)
    break_it(pool)
    by_calls_alone = (pool.free_blocks, pool.tables) == (pool.twin.free_blocks, pool.twin.tables)
    yield by_calls_alone, "use the methods, do not change the attributes"
    running = ", ".join(map(str, pool.alive)) or "none"
    yield len(pool.alive) > 1, f"two requests must be running at the end; running: {running}"
    shared = any(set(one) & set(other) for one, other in combinations(pool.alive.values(), 2))
    yield shared, "no two tables share a block: " + ", ".join(f"{name} has {t}" for name, t in pool.alive.items())


@exercise("3.4")
def room_for_requests(pool_blocks: int, paged_requests: int, reserved_requests: int) -> Iterator[Case]:
    yield pool_blocks != 37_449, "(a) that is the number of slots; a block has 16"
    yield pool_blocks != 2_341, "(a) the last block would stand half outside of the 4 GiB: round down"
    yield pool_blocks == 2_340, "(a) a block takes 16 × 112 KiB; how many whole ones go into 4 GiB?"
    yield paged_requests != 4, "(b) a request needs blocks for its 500 tokens, not a block for each token"
    yield paged_requests != 74, "(b) a request takes whole blocks: count blocks, not slots"
    yield paged_requests == 73, "(b) 500 tokens need more than 31 blocks, and a request cannot have a part of a block"
    yield reserved_requests == 9, "(c) slots in all, divided by 4,096, rounded down"


@exercise("3.5")
def empty_slots(mean_waste: Callable[[int], float]) -> Iterator[Case]:
    yield mean_waste(1) == 0, "blocks of 1: there is no empty slot in a block that holds one token"
    for block_size in (4, 5, 16):
        expected = sum(block_size - filled for filled in range(1, block_size + 1)) / block_size
        got = mean_waste(block_size)
        reason = f"blocks of {block_size}: {got} is not the mean of the empty slots, with 1, 2, … or {block_size} full"
        yield abs(got - expected) < 1e-9, reason
