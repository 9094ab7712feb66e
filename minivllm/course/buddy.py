"""The allocator that chapter 03 measures paging against: contiguous chunks whose sizes are powers of two."""

LARGEST = 2048  # slots; a power of two


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n ≥ 1)."""
    return 1 << (n - 1).bit_length()


class BuddyAllocator:
    """`num_slots` slots cut into power-of-two chunks; a chunk splits into two buddies, which merge when both are free.

    Knowlton, "A fast storage allocator", CACM 8 (1965). The vLLM paper assumes it for the systems it compares with.
    """

    def __init__(self, num_slots: int) -> None:
        self.free: dict[int, list[int]] = {1 << k: [] for k in range(LARGEST.bit_length())}  # size → first slots
        start = 0
        while start < num_slots:
            size = min(LARGEST, 1 << ((num_slots - start).bit_length() - 1))
            self.free[size].append(start)
            start += size

    def take(self, num_slots: int) -> tuple[int, int] | None:
        """A chunk (first slot, size) of at least `num_slots` slots, or None when no free chunk is large enough."""
        wanted = next_power_of_two(num_slots)
        size = next((size for size in self.free if size >= wanted and self.free[size]), None)
        if size is None:
            return None
        start = self.free[size].pop()
        while size > wanted:
            size //= 2
            self.free[size].append(start + size)
        return start, size

    def give_back(self, chunk: tuple[int, int]) -> None:
        """Free a chunk and merge it with its buddy as often as that one is free too."""
        start, size = chunk
        while size < LARGEST and (start ^ size) in self.free[size]:
            self.free[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self.free[size].append(start)
