# Generated from notebooks/03_block_manager.ipynb, 04_prefix_caching.ipynb, 08_scheduler.ipynb, 10_gpu_performance.ipynb
# by tools/export.py; edit there.
"""One request, as the bookkeeping sees it: token ids, and how far the engine has come with them."""

from enum import Enum
from typing import Literal


class Sequence:
    """A prompt that grows token by token: `token_ids` holds the prompt's ids, at least one, and then the completion's.

    `num_tokens` counts the tokens that exist, `num_computed_tokens` those whose K and V are in the cache. The newest
    token is one ahead: it has been sampled, and its K and V come with the next step.

    Raises ValueError for an empty prompt: there would be no position to predict from.
    """

    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    num_preemptions: int = 0  # how often its blocks were taken away before it was done
    num_pending_tokens: int = 0  # sampled, but so far only the device knows their values
    pending_place: int = 0  # of the newest of them: its number among the tokens that its step sampled

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        *,
        max_tokens: int = 16,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"sequence {seq_id} has an empty prompt: give it at least one token")
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.stop_token_ids = stop_token_ids  # they count from min_tokens generated tokens on
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None  # until it is FINISHED

    def append_token(self, token_id: int) -> None:
        """Add one sampled token. Its K and V are not in the cache yet."""
        self.token_ids.append(token_id)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist: prompt and completion, those whose values are not here yet included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens that came with the request."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def input_ids(self, start: int, end: int) -> list[int]:
        """The tokens [start, end) as the model takes them; a pending one is −1 − its place."""
        known = self.token_ids[start:end]
        return known if end <= len(self.token_ids) else [*known, -1 - self.pending_place]


class SequenceStatus(Enum):
    """Where a sequence is in its life, and so whether it holds blocks."""

    WAITING = "waiting"
    RUNNING = "running"  # the only state that holds blocks
    FINISHED = "finished"


FinishReason = Literal["stop", "length", "abort"]
