"""Checks of chapter 10: a step's floor, sizes to record, what breaks, what running ahead can save."""

from collections.abc import Callable, Iterator

from minivllm.course.exercises import Case, exercise


@exercise("10.1")
def floor_of_a_step(milliseconds: float, limit: str) -> Iterator[Case]:
    yield limit in ("bytes", "operations"), f"the limit is {limit!r}: choose 'bytes' or 'operations'"
    yield abs(1e3 * milliseconds - 1.9) > 0.011, f"{milliseconds} looks like seconds: give milliseconds"
    yield abs(milliseconds / 1e3 - 1.9) > 0.011, f"{milliseconds} looks like microseconds: give milliseconds"
    yield abs(milliseconds - 0.27) > 0.02, "that is the weights alone: 64 contexts of 1,000 tokens are read too"
    yield abs(milliseconds - 1.63) > 0.02, "that is K and V alone: the weights are read too"
    yield abs(milliseconds - 0.11) > 0.02, "that is the time of the operations: is it the longer of the two?"
    yield (
        abs(milliseconds - 1.9) < 0.011,
        f"{milliseconds} ms: add the bytes of the weights and of 64,000 tokens' K and V",
    )
    yield limit == "bytes", "compare the two times: which one would be left if the other were free?"


@exercise("10.2")
def sizes_within_a_share(sizes_within: Callable[[int, float], list[int]]) -> Iterator[Case]:
    cases = [(1, 0.5, 1), (8, 0.0, 8), (8, 0.5, 3), (16, 0.25, 7), (100, 0.5, 6), (33, 0.5, 5), (256, 0.1, 36)]
    for most, waste, fewest in cases:
        what = f"most={most}, waste={waste}"
        sizes = list(sizes_within(most, waste))
        yield sizes == sorted(set(sizes)) and sizes[-1:] == [most], f"{what}: sizes ascend and end with {most}: {sizes}"
        for batch in range(1, most + 1):
            size = min(size for size in sizes if size >= batch)
            wasted = (size - batch) / size
            yield wasted <= waste + 1e-9, f"{what}: a batch of {batch} in a recording of {size} wastes {wasted:.0%}"
        yield len(sizes) <= fewest, f"{what}: {len(sizes)} sizes, and fewer would do: waste is a share of recorded rows"


@exercise("10.3")
def what_breaks(a: str, b: str, c: str, d: str) -> Iterator[Case]:
    kinds = ("wrong tokens", "wasted work", "nothing")
    for name, answer in zip("abcd", (a, b, c, d), strict=True):
        yield answer in kinds, f"{name} is {answer!r}: choose one of {', '.join(map(repr, kinds))}"
    yield a != "nothing", "a: the next step computes a row for a sequence whose answer is complete"
    yield a == "wasted work", "a: does settle give a token to a sequence that has finished?"
    yield b == "wrong tokens", "b: who owns slot 0, and what is written there?"
    yield c != "wasted work", "c: the row is computed in vain with or without it: does freeing early add any work?"
    yield c == "nothing", "c: when does the next owner of the blocks write into them, and does it read before?"
    yield d == "wrong tokens", "d: the device fetches a step's inputs only when the step before has ended"


@exercise("10.4")
def time_of_many_steps(total_ms: Callable[[float, float, int, bool], float]) -> Iterator[Case]:
    cases = [
        (2.0, 3.0, 1, False, 5.0, "one step in turn"),
        (2.0, 3.0, 1, True, 5.0, "one step, ahead of nothing"),
        (2.0, 3.0, 4, False, 20.0, "four steps in turn"),
        (2.0, 3.0, 4, True, 14.0, "four steps ahead, the device is slower"),
        (3.0, 2.0, 4, True, 14.0, "four steps ahead, the host is slower"),
        (2.0, 2.0, 10, True, 22.0, "ten steps ahead, both as slow"),
        (0.0, 1.5, 6, True, 9.0, "a host that takes no time"),
    ]
    for host, device, steps, ahead, right, what in cases:
        found = total_ms(host, device, steps, ahead)
        hint = reason(found, right, host, device, steps, ahead)
        yield abs(found - right) < 1e-6, f"{what}: host {host} ms, device {device} ms: {found} ms, but {hint}"


def reason(found: float, right: float, host: float, device: float, steps: int, ahead: bool) -> str:
    """The rule of exercise 10.4 that an answer breaks."""
    if found > right:
        return "somebody waits for what need not be there yet"
    if not ahead:
        return "in turn nothing overlaps"
    if found < host + steps * device:
        return "the first step has to be prepared, and then the GPU runs one step at a time"
    return "the host prepares one step after the other, and the last one has to run"
