"""A model without tensors: what it writes into the cache and what it answers depend on every token before.

A slot's content stands for the K and V of one token. It is a fingerprint of the tokens up to that one, so a block
that was shared too early, lost, or overwritten shows at once, and the next token after a prefix is the same in every
schedule.
"""

from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.block_manager import slot_of

VOCAB_SIZE = 7


def fingerprints(token_ids: list[int]) -> list[int]:
    """What the cache must hold for each token of a sequence."""
    state, result = 1, []
    for token_id in token_ids:
        state = (state * 1_000_003 ^ (token_id + 1)) % (1 << 61)
        result.append(state)
    return result


def next_token(token_ids: list[int], salt: int) -> int:
    """The model's choice after these tokens; `salt` stands for a request's own seed."""
    return (fingerprints(token_ids)[-1] // 97 + salt) % VOCAB_SIZE


def answer_alone(prompt: list[int], num_tokens: int, salt: int) -> list[int]:
    """What a request generates when it has the machine for itself."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, salt))
    return token_ids[len(prompt) :]


class MadeUpModel:
    """Runs batches against a pool of slots. AssertionError where a row reads what was not written for it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)

    def run(self, batch: Batch) -> list[int]:
        """Copy blocks, write the new tokens' slots, and sample one token for each row that needs logits."""
        size = self.block_size
        for source, target in batch.block_copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        written: dict[int, int] = {}
        for row in batch.rows:
            self._run_row(row, written)
        for slot, content in written.items():
            self.slots[slot] = content
        return [next_token(row.seq.token_ids, row.seq.seq_id) for row in batch.rows if row.needs_logits]

    def _run_row(self, row: ScheduledSequence, written: dict[int, int]) -> None:
        expected = fingerprints(row.seq.token_ids[: row.end])
        slots = [slot_of(position, row.block_table, self.block_size) for position in range(row.end)]
        # Only what earlier steps wrote may be read: another row of this step is no source.
        found = [self.slots[slot] for slot in slots[: row.start]]
        assert found == expected[: row.start], f"sequence {row.seq.seq_id} reads a cache that is not its own"
        for slot, content in zip(slots[row.start :], expected[row.start :], strict=True):
            assert slot not in written, f"two rows write to slot {slot} in one step"
            written[slot] = content
