"""Random lives of a BlockManager, held against a naive model of what each physical slot contains.

The model writes, for every token that a step computes, the whole prefix that ends there (which is what fixes its K
and V). Whatever was shared, copied, evicted or reused, each sequence must read back its own prefixes, nothing else.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from long_runs import LONG

from minivllm.core import block_manager
from minivllm.core.block_manager import (
    BlockManager,
    CachedBlock,
    NoFreeBlocksError,
    UnknownSequenceError,
    cdiv,
    slot_of,
)
from minivllm.core.sequence import Sequence

SETTINGS = settings(
    max_examples=20_000 if LONG else 2_000,
    stateful_step_count=50 if LONG else 30,
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
STREAMS = [
    [0] * 4096,
    [0, 1] * 2048,
    [0] * 7 + [2, 1, 0] * 1363,
]  # they share prefixes, and repeat blocks within one prompt
HASHES = {"full": block_manager.hash_block, "two bits": lambda p, t: hash((p, t)) & 3, "constant": lambda p, t: 0}
HASH_NAMES = ["full", "full", "full", "two bits", "constant"]
POOLS = st.integers(1, 8) | st.integers(1, 64)  # small pools run full more often, small blocks fill more often
BLOCK_SIZES = st.integers(1, 4) | st.integers(1, 32)
FEW = st.integers(0, 4)
NUMBERS = st.integers(0, 31)
CHUNKS = st.integers(1, 100)
NOW = st.sampled_from([True, True, False])  # False: the next call becomes part of the same step


def snapshot(manager: BlockManager) -> tuple:
    """All that a question could change, the order of the free blocks included."""
    tables = {seq_id: list(table) for seq_id, table in manager._tables.items()}
    return list(manager._free), tables, list(manager._ref_counts), dict(manager._cached), repr(manager.stats)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork, are preempted and leave; steps run in between, as an engine would run them."""

    make_manager = BlockManager

    @initialize(num_blocks=POOLS, block_size=BLOCK_SIZES, hash_name=st.sampled_from(HASH_NAMES))
    def start(self, num_blocks: int, block_size: int, hash_name: str) -> None:
        block_manager.hash_block = HASHES[hash_name]
        self.exact_hits = hash_name == "full"  # with colliding hashes, or one content in two blocks, hits may be lost
        self.manager = self.make_manager(num_blocks, block_size)
        self.memory: list[tuple | None] = [None] * (num_blocks * block_size)
        self.findable: dict[tuple, set[int]] = {}  # the naive prefix cache: all tokens of a prefix → its last block
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.pending: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # scheduled in this step: end, block copies
        self.next_id = 0

    def teardown(self) -> None:
        block_manager.hash_block = HASHES["full"]

    # --- what happens to sequences

    @rule(
        stream=st.integers(0, 2), blocks=st.integers(0, 4), extra=NUMBERS, tail=st.integers(0, 3), chunk=CHUNKS, now=NOW
    )
    def arrive(self, stream: int, blocks: int, extra: int, tail: int, chunk: int, now: bool) -> None:
        length = blocks * self.manager.block_size + 1 + extra % self.manager.block_size
        self.admit(self.new_sequence(STREAMS[stream][: length - 1] + [tail]), chunk)
        if now:
            self.step()

    @precondition(lambda self: self.waiting)
    @rule(pick=NUMBERS, chunk=CHUNKS)
    def come_again(self, pick: int, chunk: int) -> None:
        self.admit(self.waiting.pop(pick % len(self.waiting)), chunk)

    def admit(self, seq: Sequence, chunk: int) -> None:
        num_cached = self.asked(self.manager.get_num_cached_tokens, seq)
        self.check_hits(seq, num_cached)
        end = min(seq.num_tokens, num_cached + chunk)
        if not self.asked(self.manager.can_allocate, seq, end):
            self.refused(NoFreeBlocksError, self.manager.allocate, seq, end)
            self.waiting.append(seq)
            return
        assert self.manager.allocate(seq, end) == num_cached
        seq.num_computed_tokens = num_cached
        self.live[seq.seq_id] = seq
        self.schedule(seq, end, [])

    @precondition(lambda self: self.idle())
    @rule(pick=NUMBERS, count=CHUNKS, token=st.integers(0, 2), now=NOW)
    def advance(self, pick: int, count: int, token: int, now: bool) -> None:
        seq = self.idle()[pick % len(self.idle())]
        if seq.num_computed_tokens == seq.num_tokens:
            seq.append_token(token)
        end = min(seq.num_tokens, seq.num_computed_tokens + count)
        if not self.asked(self.manager.can_append, seq, end):
            self.refused(NoFreeBlocksError, self.manager.append, seq, end)
            return
        self.schedule(seq, end, self.manager.append(seq, end))
        if now:
            self.step()

    @precondition(lambda self: self.idle())
    @rule(pick=NUMBERS, token=st.integers(0, 3), step_back=st.booleans())
    def fork(self, pick: int, token: int, step_back: bool) -> None:
        parent = self.idle()[pick % len(self.idle())]
        child = self.new_sequence(parent.token_ids[: parent.num_computed_tokens] + [token])
        child.num_computed_tokens = parent.num_computed_tokens
        self.manager.fork(parent, child)
        self.live[child.seq_id] = child
        if step_back and child.num_computed_tokens:  # to sample a token of its own, it computes the last one again
            child.num_computed_tokens -= 1

    @precondition(lambda self: self.live)
    @rule(pick=NUMBERS)
    def leave(self, pick: int) -> None:
        """Finished, aborted in mid-step or preempted: the same to the pool. It may be admitted again."""
        seq = self.live.pop(list(self.live)[pick % len(self.live)])
        self.pending.pop(seq.seq_id, None)
        self.manager.free(seq)
        seq.num_computed_tokens = 0
        for misuse in (self.manager.free, self.manager.block_table, self.manager.register):
            self.refused(UnknownSequenceError, misuse, seq)
        self.waiting.append(seq)

    @precondition(lambda self: self.pending)
    @rule()
    def step(self) -> None:
        """Copies first, then all writes, then registration: the order that an engine keeps."""
        size = self.manager.block_size
        for _, copies in self.pending.values():
            for src, dst in copies:
                self.memory[dst * size : (dst + 1) * size] = self.memory[src * size : (src + 1) * size]
        for seq_id, (end, _) in self.pending.items():
            seq, table = self.live[seq_id], self.manager.block_table(self.live[seq_id])
            for position in range(seq.num_computed_tokens, end):
                self.memory[slot_of(position, table, size)] = tuple(seq.token_ids[: position + 1])
            seq.num_computed_tokens = end
        for seq_id in self.pending:
            self.register(self.live[seq_id])
        self.pending.clear()

    @rule()
    def flood(self) -> None:
        """A stranger takes every free block for a moment: all that was cached is evicted."""
        free = self.manager.num_free_blocks
        if free:
            stranger = Sequence(-1, [9] * (free * self.manager.block_size))
            self.manager.allocate(stranger, stranger.num_tokens)
            self.taken(self.manager.block_table(stranger))
            self.manager.free(stranger)

    def new_sequence(self, token_ids: list[int]) -> Sequence:
        self.next_id += 1
        return Sequence(self.next_id, token_ids)

    def idle(self) -> list[Sequence]:
        """Sequences that hold blocks and are not part of the step that is being put together."""
        return [seq for seq in self.live.values() if seq.seq_id not in self.pending]

    # --- the naive model

    def schedule(self, seq: Sequence, end: int, copies: list[tuple[int, int]]) -> None:
        table = self.manager.block_table(seq)
        first = seq.num_computed_tokens // self.manager.block_size
        holders = [b for other in self.live.values() for b in self.manager.block_table(other)]
        assert len(table) == cdiv(end, self.manager.block_size), "blocks come neither early nor late"
        assert all(holders.count(block) == 1 for block in table[first:]), "a block that will be written is shared"
        self.taken(table[first:])
        self.pending[seq.seq_id] = (end, copies)

    def taken(self, blocks: list[int]) -> None:
        """Blocks with a new owner: what they held before is not findable any more."""
        left = {key: held.difference(blocks) for key, held in self.findable.items()}
        self.findable = {key: held for key, held in left.items() if held}

    def register(self, seq: Sequence) -> None:
        size, table = self.manager.block_size, self.manager.block_table(seq)
        self.manager.register(seq)
        for i in range(seq.num_computed_tokens // size):
            holders = self.findable.setdefault(tuple(seq.token_ids[: (i + 1) * size]), set())
            holders.add(table[i])
            self.exact_hits &= len(holders) == 1

    def check_hits(self, seq: Sequence, num_cached: int) -> None:
        size, expected = self.manager.block_size, 0
        while expected + size < seq.num_tokens and tuple(seq.token_ids[: expected + size]) in self.findable:
            expected += size
        assert num_cached == expected if self.exact_hits else num_cached <= expected

    def asked(self, question, *args) -> int:
        before = snapshot(self.manager)
        answer = question(*args)
        assert snapshot(self.manager) == before, f"{question.__name__} changed something"
        return answer

    def refused(self, error: type[Exception], call, *args) -> None:
        before = snapshot(self.manager)
        with pytest.raises(error):
            call(*args)
        assert snapshot(self.manager) == before, f"{call.__name__} failed and changed something"

    @invariant()
    def nothing_is_off(self) -> None:
        if hasattr(self, "live"):
            self.manager.check_integrity()
            held = {block for seq in self.live.values() for block in self.manager.block_table(seq)}
            assert self.manager.num_free_blocks == self.manager.num_blocks - len(held)

    @invariant()
    def everyone_reads_its_own_prefix(self) -> None:
        for seq in getattr(self, "live", {}).values():
            if seq.seq_id in self.pending:  # its block copies are still to come
                continue
            table = self.manager.block_table(seq)
            for position in range(seq.num_computed_tokens):
                content = self.memory[slot_of(position, table, self.manager.block_size)]
                assert content == tuple(seq.token_ids[: position + 1]), f"sequence {seq.seq_id}, position {position}"


def test_random_lives() -> None:
    run_state_machine_as_test(BlockManagerMachine, settings=SETTINGS)


# --- the machine would notice


class RegistersAtAdmission(BlockManager):
    def allocate(self, seq: Sequence, num_tokens: int) -> int:
        num_cached = super().allocate(seq, num_tokens)
        claims = Sequence(seq.seq_id, seq.token_ids)
        claims.num_computed_tokens = num_tokens
        self.register(claims)
        return num_cached


class WritesSharedBlocks(BlockManager):
    def _shared_ahead(self, seq: Sequence, table: list[int]) -> list[int]:
        return []


class SharesWithoutCounting(BlockManager):
    def _hold(self, block_id: int) -> None:
        self._free.pop(block_id, None)
        self._ref_counts[block_id] = 1


class KeepsStaleEntries(BlockManager):
    def _forget(self, block_id: int) -> None:
        pass


class TrustsTheHash(BlockManager):
    def _lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        return self._cached.get(block_manager.hash_block(parent.hash if parent else 0, token_ids))


class ComparesOnlyThisBlock(BlockManager):
    def _lookup(self, parent: CachedBlock | None, token_ids: tuple[int, ...]) -> CachedBlock | None:
        entry = TrustsTheHash._lookup(self, parent, token_ids)
        return entry if entry and entry.token_ids == token_ids else None


class LeavesNothingToCompute(BlockManager):
    def _find_prefix(self, seq: Sequence, num_tokens: int) -> list[CachedBlock]:
        longer = Sequence(seq.seq_id, [*seq.token_ids, 0])
        return super()._find_prefix(longer, num_tokens + 1)


class TakesCachedBlocksForFree(BlockManager):
    def _num_blocks_to_take(self, found: list[CachedBlock], num_tokens: int) -> int:
        return cdiv(num_tokens, self.block_size) - len(found)


class EvictsToAnswer(BlockManager):
    def can_allocate(self, seq: Sequence, num_tokens: int) -> bool:
        if self._free:
            self._forget(next(iter(self._free)))
        return super().can_allocate(seq, num_tokens)


class AllocatesOneEarly(BlockManager):
    def append(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        return super().append(seq, num_tokens + 1)


FAULTS = [
    RegistersAtAdmission,
    WritesSharedBlocks,
    SharesWithoutCounting,
    KeepsStaleEntries,
    TrustsTheHash,
    ComparesOnlyThisBlock,
    LeavesNothingToCompute,
    TakesCachedBlocksForFree,
    EvictsToAnswer,
    AllocatesOneEarly,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_faulty_manager_does_not_survive(fault: type[BlockManager]) -> None:
    class FaultyMachine(BlockManagerMachine):
        make_manager = fault

    search = settings(SETTINGS, phases=[Phase.generate], max_examples=2_000, report_multiple_bugs=False)
    with pytest.raises(Exception):  # noqa: B017 – an assertion of the model, an integrity error or a KeyError: all count
        run_state_machine_as_test(FaultyMachine, settings=search)
