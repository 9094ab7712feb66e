"""Exercises: a check says which case failed and why, and never what the answer is.

A chapter's checks live in `minivllm/course/checks/chNN.py`. Each is a generator of cases:

    @exercise("3.1")
    def new_token(slot: int, blocks: int) -> Iterator[Case]:
        yield slot == 25, "the slot: tokens are counted from 0, so the new one is number 5"
        yield blocks == 2, "the blocks held: six tokens, four to a block"

The first case that is not true is told to the learner. A stub is not an error: answers that are still `...` and
functions that raise NotImplementedError are reported as not answered yet.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

Case = tuple[bool, str]
CaseGenerator = Callable[..., Iterator[Case]]

_exercises: dict[str, CaseGenerator] = {}


class Outcome(Enum):
    """What a check found."""

    UNANSWERED = "not answered yet"
    RIGHT = "right"
    WRONG = "not yet"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check, and for a wrong answer the case that failed."""

    number: str
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.number} · {self.outcome.value}" + (f": {self.reason}" if self.reason else "")


def exercise(number: str) -> Callable[[CaseGenerator], CaseGenerator]:
    """Register a generator of cases as the check of exercise `number`. Raises ValueError when the number is taken."""

    def register(cases: CaseGenerator) -> CaseGenerator:
        if number in _exercises and _exercises[number].__module__ != cases.__module__:
            raise ValueError(f"exercise {number} is defined in {_exercises[number].__module__} already")
        _exercises[number] = cases
        return cases

    return register


def find_exercise(number: str) -> CaseGenerator:
    """The check of exercise `number`, loaded from its chapter. Raises KeyError when there is none."""
    chapter = int(number.split(".")[0])
    importlib.import_module(f"minivllm.course.checks.ch{chapter:02d}")
    if number not in _exercises:
        raise KeyError(f"there is no exercise {number}; chapter {chapter} has {', '.join(numbers_of(chapter))}")
    return _exercises[number]


def numbers_of(chapter: int) -> list[str]:
    """The numbers of a chapter's exercises, after its checks were loaded."""
    return sorted(number for number in _exercises if number.startswith(f"{chapter}."))


def grade(number: str, *answers: object) -> Verdict:
    """Judge answers without printing. A learner's exception is a wrong answer that says what was raised."""
    if any(answer is ... for answer in answers):
        return Verdict(number, Outcome.UNANSWERED)
    cases = find_exercise(number)(*answers)
    try:
        failed = next((reason for passed, reason in cases if not passed), None)
    except NotImplementedError:
        return Verdict(number, Outcome.UNANSWERED)
    except Exception as error:
        return Verdict(number, Outcome.WRONG, f"your code raised {type(error).__name__}: {error}")
    return Verdict(number, Outcome.RIGHT) if failed is None else Verdict(number, Outcome.WRONG, failed)


def check(number: str, *answers: object) -> None:
    """Judge the answers to exercise `number` and print the verdict in one line."""
    print(grade(number, *answers))
