# Generated from notebooks/05_context.ipynb by tools/export.py; edit there.
"""What one step of the engine computes: which sequences, how many tokens of each, and what to copy first."""

from array import array
from dataclasses import dataclass, field

from minivllm.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One row of a batch: `num_new_tokens` tokens of `seq`, from the first one whose K and V are not cached yet.

    `start` and `needs_logits` are written down when the row is made, so they still describe this step after the
    sequence has moved on. `block_table` covers at least the positions [0, end).
    """

    seq: Sequence
    num_new_tokens: int
    block_table: array  # of int ("i"): physical block of each logical block
    start: int = field(init=False)  # position of the first new token
    needs_logits: bool = field(init=False)  # the row reaches the newest token: it gets a next one

    def __post_init__(self) -> None:
        # A frozen dataclass sets its own fields through object.__setattr__ too.
        object.__setattr__(self, "start", self.seq.num_computed_tokens)
        object.__setattr__(self, "needs_logits", self.end == self.seq.num_tokens)

    @property
    def end(self) -> int:
        """Position after the last new token: how many tokens of the sequence the cache holds after this step."""
        return self.start + self.num_new_tokens


@dataclass(frozen=True)
class Batch:
    """The rows of one step, and the (source, destination) block copies to make before it."""

    rows: list[ScheduledSequence]
    block_copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes, over all rows."""
        return sum(row.num_new_tokens for row in self.rows)
