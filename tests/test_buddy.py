"""The allocator that chapter 03 measures paging against."""

import random

import pytest

from minivllm.course.buddy import BuddyAllocator, next_power_of_two


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64)])
def test_next_power_of_two(n: int, power: int) -> None:
    assert next_power_of_two(n) == power


@pytest.mark.parametrize("num_slots", [1, 100, 2048, 15_700])
def test_chunks_never_overlap_and_everything_comes_back(num_slots: int) -> None:
    dice, memory, taken = random.Random(0), BuddyAllocator(num_slots), []
    untouched = {size: sorted(starts) for size, starts in memory.free.items()}
    for _ in range(2_000):
        wanted = dice.randint(1, 300)
        chunk = memory.take(wanted) if dice.random() < 0.6 else None
        if chunk:
            assert chunk[1] == next_power_of_two(wanted) and chunk[0] + chunk[1] <= num_slots
            taken.append(chunk)
        elif taken:
            memory.give_back(taken.pop(dice.randrange(len(taken))))
        slots = [slot for start, size in taken for slot in (start, start + size - 1)]
        assert all(not (a[0] < b[0] < a[0] + a[1]) for a in taken for b in taken)
        assert len(set(slots)) >= len(taken)
    for chunk in taken:
        memory.give_back(chunk)
    assert {size: sorted(starts) for size, starts in memory.free.items()} == untouched


def test_nothing_is_taken_from_a_pool_that_is_too_small() -> None:
    memory = BuddyAllocator(64)
    assert memory.take(65) is None
    assert memory.take(64) == (0, 64)
    assert memory.take(1) is None
