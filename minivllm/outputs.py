# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""What comes back from a request."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One token's natural log probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer. `text` has neither the token nor the string that ended it; `token_ids` ends with what was sampled.

    finish_reason: "stop" (a stop token or string), "length" (max_tokens, or no room left), "abort", None (not yet).
    stop_reason: the string or the additional stop token that ended it. logprobs: one dict per token, by token id.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock, and what was saved.

    num_cached_tokens: of the prompt, found in the prefix cache. num_preemptions: how often it was thrown out.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed a token of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival until the first token was sampled."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single token."""
        if self.finished_time is None or self.num_generated_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generated_tokens - 1)


@dataclass
class RequestOutput:
    """The state of a request: its prompt, and its n answers as far as they have come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)
