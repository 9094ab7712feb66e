"""Measuring in a notebook: how long a call takes, and how many tokens pass through a model."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


def median_ms(work: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of a call, after one call that is not counted (it fills caches and allocators)."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


class TokenCount:
    """How many tokens passed through the model so far."""

    tokens: int = 0


@contextmanager
def count_tokens(model: nn.Module) -> Iterator[TokenCount]:
    """Count the rows that go into `model.model` while the `with` lasts: `with count_tokens(model) as count`."""
    count = TokenCount()

    def add(module: nn.Module, arguments: tuple) -> None:
        count.tokens += len(arguments[0])

    hook = model.model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        hook.remove()
