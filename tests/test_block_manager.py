"""Sequences and blocks with nothing shared: who holds which block, and what is refused."""

import ast
from array import array
from pathlib import Path

import pytest

from minivllm.core import block_manager
from minivllm.core.block_manager import (
    AlreadyAllocatedError,
    BlockManager,
    BlockManagerError,
    NoFreeBlocksError,
    UnknownSequenceError,
    cdiv,
    slot_of,
)
from minivllm.core.sequence import Sequence


def unlike_any_other(seq_id: int, num_tokens: int) -> Sequence:
    """A prompt that shares no block with another sequence's."""
    return Sequence(seq_id, [1000 * seq_id + i for i in range(num_tokens)])


# --- sequences


def test_a_sequence_counts_prompt_and_completion_apart() -> None:
    seq = Sequence(3, [7, 8, 9])
    seq.append_token(10)
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_completion_tokens) == (4, 3, 1)
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([7, 8, 9], [10])
    assert seq.num_computed_tokens == seq.num_cached_tokens == seq.num_preemptions == 0


def test_a_sequence_does_not_share_the_callers_list() -> None:
    prompt = [7, 8, 9]
    Sequence(0, prompt).append_token(10)
    assert prompt == [7, 8, 9]


@pytest.mark.parametrize("prompt", [[]], ids=["vllm#7283"])
def test_an_empty_prompt_is_refused(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="sequence 5 has an empty prompt"):
        Sequence(5, prompt)


# --- where a token lives


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_cdiv_is_the_number_of_blocks_that_hold_n_tokens(block_size: int) -> None:
    for n in range(5 * block_size + 1):
        assert cdiv(n, block_size) == len(range(0, n, block_size))


@pytest.mark.parametrize("position, slot", [(0, 28), (3, 31), (4, 8), (11, 23)])
def test_slot_of_the_worked_example(position: int, slot: int) -> None:
    assert slot_of(position, [7, 2, 5], 4) == slot
    assert slot_of(position, array("i", [7, 2, 5]), 4) == slot


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_no_two_positions_share_a_slot(block_size: int) -> None:
    manager = BlockManager(40, block_size)
    sequences = [unlike_any_other(i, n) for i, n in enumerate([block_size, 3 * block_size + 1, 2])]
    for seq in sequences:
        manager.allocate(seq, seq.num_tokens)
    slots = [slot_of(p, manager.block_table(seq), block_size) for seq in sequences for p in range(seq.num_tokens)]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < 40 * block_size for slot in slots)


# --- blocks come when they are needed


def test_a_fresh_pool_hands_out_its_blocks_in_order() -> None:
    manager = BlockManager(6, 4)
    for seq_id, prompt_length in enumerate([12, 5, 3]):
        manager.allocate(unlike_any_other(seq_id, prompt_length), prompt_length)
    assert [list(manager._tables[i]) for i in range(3)] == [[0, 1, 2], [3, 4], [5]]
    assert manager.num_free_blocks == 0


def test_block_tables_are_int32_arrays() -> None:
    manager = BlockManager(4, 4)
    seq = unlike_any_other(0, 6)
    manager.allocate(seq, 6)
    assert isinstance(manager.block_table(seq), array)
    assert (manager.block_table(seq).typecode, manager.block_table(seq).itemsize) == ("i", 4)


# The kind of bug: `len % block_size == 1` in one place and `== 0` in the other decide when a block is due.
@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [2, 4, 16], ids=["nano-vllm#30", "nano-vllm#91", "nano-vllm#240"])
def test_blocks_held_are_cdiv_at_every_step(block_size: int, blocks: int, delta: int) -> None:
    length = blocks * block_size + delta
    manager, seq = BlockManager(16, block_size), unlike_any_other(0, length)
    manager.allocate(seq, length)
    for _ in range(2 * block_size + 1):
        assert len(manager.block_table(seq)) == cdiv(seq.num_tokens, block_size)
        seq.num_computed_tokens = seq.num_tokens
        manager.register(seq)
        seq.append_token(0)
        assert manager.append(seq, seq.num_tokens) == []
        manager.check_integrity()


@pytest.mark.parametrize("block_size", [4], ids=["nano-vllm#66"])
def test_a_prompt_of_exactly_one_block_decodes(block_size: int) -> None:
    manager, seq = BlockManager(2, block_size), unlike_any_other(0, block_size)
    manager.allocate(seq, block_size)
    held = []
    for _ in range(3):
        seq.num_computed_tokens = seq.num_tokens
        seq.append_token(0)
        manager.append(seq, seq.num_tokens)
        held.append(len(manager.block_table(seq)))
    assert held == [2, 2, 2]


def test_appending_less_than_the_table_covers_changes_nothing() -> None:
    manager, seq = BlockManager(4, 4), unlike_any_other(0, 9)
    manager.allocate(seq, 9)
    assert manager.append(seq, 5) == []
    assert len(manager.block_table(seq)) == 3


# --- what is refused


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (-1, 4), (4, 0), (4, -16)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks}, block_size={block_size}"):
        BlockManager(num_blocks, block_size)


def test_a_double_free_is_refused() -> None:
    manager, seq = BlockManager(4, 4), unlike_any_other(8, 5)
    manager.allocate(seq, 5)
    manager.free(seq)
    with pytest.raises(UnknownSequenceError, match="sequence 8 holds no blocks"):
        manager.free(seq)
    manager.check_integrity()
    assert manager.num_free_blocks == 4


@pytest.mark.parametrize("call", ["free", "block_table", "register", "can_append", "append", "fork"])
def test_an_unknown_sequence_is_refused(call: str) -> None:
    manager, seq = BlockManager(4, 4), unlike_any_other(8, 5)
    others = {"can_append": (6,), "append": (6,), "fork": (unlike_any_other(9, 5),)}
    with pytest.raises(UnknownSequenceError, match="sequence 8 holds no blocks"):
        getattr(manager, call)(seq, *others.get(call, ()))


def test_a_second_table_for_the_same_sequence_is_refused() -> None:
    manager, seq = BlockManager(4, 4), unlike_any_other(8, 5)
    manager.allocate(seq, 5)
    with pytest.raises(AlreadyAllocatedError, match="sequence 8 has a table already"):
        manager.allocate(seq, 5)
    with pytest.raises(AlreadyAllocatedError, match="sequence 8 has a table already"):
        manager.fork(seq, seq)


def test_a_table_for_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 8: cannot allocate for 0 tokens"):
        BlockManager(4, 4).allocate(unlike_any_other(8, 5), 0)


def test_a_full_pool_says_what_is_missing_and_changes_nothing() -> None:
    manager, first, second = BlockManager(4, 4), unlike_any_other(0, 9), unlike_any_other(1, 5)
    manager.allocate(first, 9)
    assert not manager.can_allocate(second, 5) and manager.can_allocate(second, 4)
    with pytest.raises(NoFreeBlocksError, match=r"sequence 1 needs 2 block\(s\), 1 of 4 are free"):
        manager.allocate(second, 5)
    assert not manager.can_append(first, 17) and manager.can_append(first, 16)
    with pytest.raises(NoFreeBlocksError, match=r"sequence 0 needs 2 block\(s\), 1 of 4 are free"):
        manager.append(first, 17)
    assert manager.num_free_blocks == 1 and len(manager.block_table(first)) == 3
    manager.check_integrity()


def test_every_error_of_the_module_is_a_block_manager_error() -> None:
    assert all(
        issubclass(e, BlockManagerError) for e in (NoFreeBlocksError, UnknownSequenceError, AlreadyAllocatedError)
    )
    assert issubclass(BlockManagerError, RuntimeError)


# --- the check of everything


def damaged(fault: str) -> BlockManager:
    """A manager with one planted contradiction."""
    manager = BlockManager(8, 4)
    first, second = unlike_any_other(0, 9), unlike_any_other(1, 5)
    for seq in (first, second):
        manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.register(seq)
    table = manager.block_table(first)
    match fault:
        case "leaked":
            del manager._tables[second.seq_id]
        case "free and held":
            manager._free[table[0]] = None
        case "lost":
            manager._free.popitem()
        case "twice in a table":
            table[1] = table[0]
            manager._ref_counts[table[0]] = 2
            manager._free[1] = None
            manager._ref_counts[1] = 0
        case "miscounted":
            manager._ref_counts[table[0]] = 2
        case "stale entry":
            manager._cached[12345] = next(iter(manager._cached.values()))
        case "unfindable entry":
            manager._cached.popitem()
    return manager


@pytest.mark.parametrize(
    "fault", ["leaked", "free and held", "lost", "twice in a table", "miscounted", "stale entry", "unfindable entry"]
)
def test_check_integrity_finds(fault: str) -> None:
    with pytest.raises(BlockManagerError):
        damaged(fault).check_integrity()


def test_check_integrity_finds_nothing_in_a_sound_manager() -> None:
    damaged("nothing").check_integrity()


# --- form


def test_one_modulo_is_enough() -> None:
    """The place in a block needs `%`, once; the number of blocks never does."""
    tree = ast.parse(Path(block_manager.__file__).read_text(encoding="utf-8"))
    with_modulo = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    ]
    assert with_modulo == ["slot_of"]
