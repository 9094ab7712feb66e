"""Checks of chapter 09: which tokens are left, what a key must not contain, what is held back, goodput."""

from collections.abc import Callable, Iterator, Sequence

from minivllm.course.exercises import Case, exercise


@exercise("9.1")
def tokens_that_are_left(k2: str, p08: str, m02: str) -> Iterator[Case]:
    names = {"top_k=2": "AB", "top_p=0.8": "ABC", "min_p=0.2": "ABC"}
    for given, (setting, right) in zip((k2, p08, m02), names.items(), strict=True):
        letters = isinstance(given, str) and set(given) <= set("ABCDE")
        yield letters, f"{setting}: answer with a string of letters from A to E"
        yield "A" in given, f"{setting}: the most likely token is always kept"
        yield (
            len(given) >= len(right),
            f"{setting}: {len(given)} is too few; which bound did the next one miss?",
        )
        yield len(given) <= len(right), f"{setting}: {len(given)} is too many"
        yield sorted(given) == sorted(right), f"{setting}: more likely tokens are kept before less likely ones"


@exercise("9.2")
def promises_of_a_key(again: bool, crowd: bool, preempted: bool) -> Iterator[Case]:
    for name, given in (("again", again), ("crowd", crowd), ("preempted", preempted)):
        yield isinstance(given, bool), f"{name}: answer True or False, not {given!r}"
    yield again is True, "again: the same requests in the same order take the same rows of the same steps"
    yield crowd is False, "crowd: alone the request is row 0; which row is it behind three others?"
    yield preempted is False, "preempted: while it waits, the steps go on; which step samples its next token now?"


@exercise("9.3")
def held_back_for_one_stop(held: Callable[[str, str], int]) -> Iterator[Case]:
    cases = [("ABC", "DEF", 0), ("ABCDE", "DEF", 2), ("D", "DEF", 1), ("", "DEF", 0), ("ABD", "DEF", 1)]
    cases += [
        ("aa", "aab", 2),
        ("aaa", "aab", 2),
        ("abab", "ababc", 4),
        ("xabab", "abac", 2),
        ("x", "x", 0),
        ("E", "DEF", 0),
    ]
    for text, stop, right in cases:
        found = held(text, stop)
        said = f"text {text!r}, stop {stop!r}: you hold back {found!r}"
        yield isinstance(found, int), f"{said}; answer with a number of characters, 0 if there is nothing to hold"
        yield found <= len(text), f"{said}, and the text is shorter"
        yield found != len(stop) or not text.endswith(stop), f"{said}, the whole stop string"
        yield found < len(stop), f"{said}; a beginning of {stop!r} has at most {len(stop) - 1}"
        yield found >= right, f"{said}, and half a stop string is shown"
        yield found <= right, f"{said}; does {text[len(text) - found :]!r} begin {stop!r}?"


@exercise("9.4")
def share_within_limits(
    goodput: Callable[[Sequence[tuple[float, float | None]], float, float, float], float],
) -> Iterator[Case]:
    metrics = [(0.1, 0.02), (0.3, 0.02), (0.1, 0.08), (0.2, None), (0.2, 0.05)]
    cases = [
        ("all limits wide", (1.0, 1.0, 2.0), 2.5),
        ("a TTFT of 0.2 s at most", (0.2, 1.0, 2.0), 2.0),
        ("a TPOT of 0.05 s at most", (1.0, 0.05, 2.0), 2.0),
        ("both", (0.2, 0.05, 2.0), 1.5),
        ("both, over 4 seconds", (0.2, 0.05, 4.0), 0.75),
        ("limits that nobody keeps", (0.01, 0.01, 1.0), 0.0),
    ]
    for what, (ttft, tpot, seconds), right in cases:
        found = goodput(metrics, ttft, tpot, seconds)
        yield isinstance(found, int | float), f"{what}: answer with a number of requests per second, not {found!r}"
        yield (
            abs(found - right) < 1e-9,
            f"{what}: {found:g} per second, that would be {found * seconds:g} in {seconds:g} s; which of {metrics} "
            f"have a TTFT within {ttft:g} s and a TPOT within {tpot:g} s?",
        )
