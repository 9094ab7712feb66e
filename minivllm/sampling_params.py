# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""What one request asks for: how to choose its tokens, and when to stop."""

import math
from dataclasses import dataclass
from types import UnionType


class SamplingParamsError(ValueError):
    """A sampling parameter outside its range. The message names the parameter, the value and the range."""


GREEDY_BELOW = 1e-5  # a temperature under this is 0: dividing logits by it would leave nothing but rounding


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop. Names and defaults are vLLM's.

    n: answers per prompt. temperature: 0 takes the most likely token. top_k: only the k most likely tokens (0 or −1:
    all). top_p: only the most likely tokens that together reach this probability. min_p: only tokens at least this
    fraction as likely as the most likely one. repetition_penalty: divides positive logits (multiplies negative ones)
    of tokens in prompt or answer; presence_penalty, frequency_penalty: subtracted once, or once per occurrence, from
    the logits of tokens in the answer. seed: makes the answer a function of prompt, parameters and seed.

    max_tokens: of the answer (None: as many as there is room for). min_tokens: before these, nothing ends it.
    stop: strings that end the answer, and are not part of it. stop_token_ids: tokens that end it, besides the
    model's own, which ignore_eos switches off. logprobs: also return the log probabilities of so many most likely
    tokens, before temperature and penalties. skip_special_tokens: leave marks such as <|endoftext|> out of the text.

    Raises SamplingParamsError for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, and no random number is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def __post_init__(self) -> None:
        finite = 1e30
        require_range("n", self.n, 1, 2**20, WHOLE)
        require_range("temperature", self.temperature, 0, finite)
        require_range("top_k", self.top_k, -1, 2**62, WHOLE)
        require_range("top_p", self.top_p, 0, 1, above=True)
        require_range("min_p", self.min_p, 0, 1)
        require_range("repetition_penalty", self.repetition_penalty, 0, finite, above=True)
        require_range("presence_penalty", self.presence_penalty, -finite, finite)
        require_range("frequency_penalty", self.frequency_penalty, -finite, finite)
        require_range("seed", self.seed, -(2**63), 2**63 - 1, WHOLE_OR_NONE)
        require_range("max_tokens", self.max_tokens, 1, math.inf, WHOLE_OR_NONE)
        require_range("min_tokens", self.min_tokens, 0, math.inf, WHOLE)
        require_range("logprobs", self.logprobs, 0, math.inf, WHOLE_OR_NONE)
        self._check_stops()

    def _check_stops(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise SamplingParamsError(f"stop must be strings of at least one character, not {stop!r}")


WHOLE = int
WHOLE_OR_NONE = int | None
REAL = int | float


def require_range(
    name: str, value: float | None, low: float, high: float, kind: type | UnionType = REAL, *, above: bool = False
) -> None:
    """Raises SamplingParamsError unless value is of that kind and in [low, high], or in (low, high] if `above`."""
    known = isinstance(value, kind)
    inside = known and (value is None or (low <= value <= high and not (above and value == low)))  # NaN is in nothing
    if not inside:
        what, digits = ("a number", "g") if kind == REAL else ("an integer", "d")
        limit = f" and at most {high:{digits}}" if high < math.inf else ""
        raise SamplingParamsError(
            f"{name} must be {what} {'above' if above else 'at least'} {low:{digits}}{limit}, not {value!r}"
        )
