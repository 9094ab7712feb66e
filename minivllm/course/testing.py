"""`raises`, so that a chapter can show a refusal without importing a test framework."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raises(error: type[BaseException], *, match: str = "") -> Iterator[None]:
    """The block must raise `error`, with a message in which the pattern `match` is found; the message is printed.

    Raises AssertionError when the block raises nothing, or another message.
    """
    try:
        yield
    except error as caught:
        message = str(caught)
        assert re.search(match, message), f"the message does not match {match!r}: {message}"
        print(f"{type(caught).__name__}: {message}")
    else:
        raise AssertionError(f"nothing was raised; {error.__name__} was expected")
