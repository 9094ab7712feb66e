"""Sharing: who may find a block, who may write it, and which one goes first. Ids name the report a case comes from."""

import ast
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from minivllm.core import block_manager
from minivllm.core.block_manager import BlockManager, BlockManagerError, NoFreeBlocksError
from minivllm.core.sequence import Sequence

B = 4
A, C, X, Y = [1, 1, 2, 2], [3, 3, 4, 4], [5, 6, 7, 8], [8, 7, 6, 5]  # contents of one block each


class Story:
    """A pool and the sequences in it; steps are run as an engine would, with no model."""

    def __init__(self, num_blocks: int = 16, **options: bool) -> None:
        self.manager = BlockManager(num_blocks, B, **options)
        self.next_id = 0

    def sequence(self, token_ids: Iterable[int]) -> Sequence:
        self.next_id += 1
        return Sequence(self.next_id, list(token_ids))

    def admit(self, token_ids: Iterable[int], num_tokens: int | None = None) -> Sequence:
        """Blocks are given, nothing is computed yet."""
        seq = self.sequence(token_ids)
        seq.num_computed_tokens = self.manager.allocate(seq, num_tokens or seq.num_tokens)
        return seq

    def compute(self, seq: Sequence, end: int | None = None) -> Sequence:
        """The step runs up to `end`; what it wrote becomes findable."""
        seq.num_computed_tokens = end or seq.num_tokens
        self.manager.register(seq)
        self.manager.check_integrity()
        return seq

    def run(self, token_ids: Iterable[int]) -> Sequence:
        return self.compute(self.admit(token_ids))

    def finish(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.manager.free(seq)
            self.manager.check_integrity()

    def hits(self, token_ids: Iterable[int]) -> int:
        return self.manager.get_num_cached_tokens(self.sequence(token_ids))

    def table(self, seq: Sequence) -> list[int]:
        return list(self.manager.block_table(seq))


# --- what is found


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3], ids=["nano-vllm#144", "nano-vllm#114", "nano-vllm PR#117"])
def test_one_token_is_always_left_to_compute(blocks: int, delta: int) -> None:
    story, prompt = Story(), list(range(blocks * B + delta))
    first = story.run(prompt)
    second = story.admit(prompt)
    assert second.num_computed_tokens == (len(prompt) - 1) // B * B < len(prompt)
    assert story.table(second)[-1] not in story.table(first), "the block that is computed again is private"


@pytest.mark.parametrize("blocks", [1, 2, 3], ids=lambda k: f"vllm PR#11186, {k} blocks")
def test_a_full_hit_does_not_break_the_chain(blocks: int) -> None:
    story, prompt = Story(), list(range(blocks * B))
    story.run(prompt)
    story.run(prompt)
    assert story.hits([*prompt, *X]) == blocks * B


@pytest.mark.parametrize("keep", [True, False], ids=["nano-vllm#163", "vllm PR#4761"])
def test_a_block_that_was_reused_is_not_found(keep: bool) -> None:
    story = Story(num_blocks=4)
    first = story.run([*A, *C, *X, 0])
    story.finish(first)
    assert story.hits([*A, *C, *X, 0]) == 3 * B
    other = story.run(range(100, 115))  # fills the pool: every block is used again
    if not keep:
        story.finish(other)
    assert story.hits([*A, *C, *X, 0]) == 0
    assert story.hits(range(100, 115)) == 3 * B


@pytest.mark.parametrize("chunk", [B, 2 * B, 2 * B + 1], ids=lambda chunk: f"nano-vllm#208, {chunk} tokens a step")
def test_what_is_not_written_yet_is_not_found(chunk: int) -> None:
    story, prefix = Story(), [*A, *C]
    first = story.admit([*prefix, 1], chunk)
    same_step = story.admit([*prefix, 2], chunk)
    assert same_step.num_computed_tokens == 0
    assert not set(story.table(first)) & set(story.table(same_step))
    story.compute(first, chunk)
    assert story.hits([*prefix, 2]) == chunk // B * B


@pytest.mark.parametrize("copies", [8], ids=["nano-vllm#219, mini-sglang PR#142"])
def test_identical_prompts_in_one_step_leak_nothing(copies: int) -> None:
    story, prompt = Story(num_blocks=32), [*A, *C, 9]
    together = [story.admit(prompt) for _ in range(copies)]
    for seq in together:
        story.compute(seq)
    assert story.manager.num_free_blocks == 32 - 3 * copies
    assert story.hits(prompt) == 2 * B
    story.finish(*together)
    assert story.manager.num_free_blocks == 32
    assert set(story.manager._ref_counts) == {0}


CONSTANT_HASH, FOUR_BIT_HASH = lambda parent, tokens: 0, lambda parent, tokens: hash((parent, tokens)) & 15


@pytest.mark.parametrize("hash_block", [CONSTANT_HASH, FOUR_BIT_HASH], ids=["vllm PR#12621", "vllm#15297"])
def test_a_colliding_hash_costs_hits_and_nothing_else(hash_block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "hash_block", hash_block)
    story = Story(num_blocks=64)
    prompts = [[*a, *b, *c, 0] for a in (A, C, X) for b in (A, C, X) for c in (A, C, X)]
    holder: dict[int, tuple[int, ...]] = {}  # block → the prefix its K and V were computed after
    for prompt in random.Random(0).choices(prompts, k=300):
        seq = story.admit(prompt)
        for i, block in enumerate(story.table(seq)):
            prefix = tuple(prompt[: (i + 1) * B])
            assert i >= seq.num_computed_tokens // B or holder[block] == prefix
            holder[block] = prefix
        story.compute(seq)
        story.finish(seq)


def test_a_block_repeated_within_a_prompt_is_not_its_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """With colliding hashes the tokens of the block alone do not prove what came before it."""
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, tokens: 0)
    story = Story()
    story.run([*A, 0])
    assert story.hits([*A, 0]) == B
    assert story.hits([*A, *A, 0]) == B


@pytest.mark.parametrize("other", [C], ids=["mini-vllm 0.1.1"])
def test_the_same_block_after_another_prefix_is_another_block(other: list[int]) -> None:
    story = Story()
    story.run([*A, *X, 0])
    assert story.hits([*other, *X, 0]) == 0
    second = story.run([*other, *X, 0])
    assert story.hits([*A, *X, 0]) == story.hits([*other, *X, 0]) == 2 * B
    assert story.admit([*other, *X, 1]).num_computed_tokens == 2 * B
    assert not set(story.table(second)[:2]) & {0, 1}


def test_generated_tokens_are_found_too() -> None:
    """A chat's next turn begins with the answer of the turn before."""
    story = Story()
    seq = story.run([*A, 5])
    for token in (6, 7, 8, 9):
        seq.append_token(token)
        story.manager.append(seq, seq.num_tokens)
        story.compute(seq)
    story.finish(seq)
    assert story.hits([*A, *X, 9, 9]) == 2 * B


def test_a_partly_filled_block_is_never_found() -> None:
    story = Story()
    story.run([*A, 5, 6, 7])
    assert story.hits([*A, 5, 6, 7, 8]) == B


def test_with_caching_off_nothing_is_found_and_nothing_is_counted() -> None:
    story = Story(enable_prefix_caching=False)
    story.run([*A, *C, 0])
    assert story.hits([*A, *C, 0]) == 0
    assert story.manager.stats.queried_tokens == 0


def test_registering_more_than_the_table_covers_is_refused() -> None:
    story = Story()
    seq = story.admit([*A, *C, 0], B)
    seq.num_computed_tokens = 2 * B
    with pytest.raises(BlockManagerError, match="claims 8 computed tokens, but has 9 tokens and room for 4"):
        story.manager.register(seq)


# --- questions


def test_a_hit_on_a_free_block_uses_up_a_free_block() -> None:
    story = Story(num_blocks=4)
    story.finish(story.run([*A, *C, 0]))
    story.admit(range(100, 108))  # takes the two blocks that were never of use
    assert story.manager.num_free_blocks == 2
    assert not story.manager.can_allocate(story.sequence([*A, *C, 0]), 9), "two hits and one new block, two are free"
    assert story.manager.can_allocate(story.sequence([*A, *C, 0]), 8)


def test_a_hit_on_a_held_block_uses_up_none() -> None:
    story = Story(num_blocks=4)
    story.run([*A, *C, 0])
    assert story.manager.num_free_blocks == 1
    assert story.manager.can_allocate(story.sequence([*A, *C, 1]), 9)
    assert story.admit([*A, *C, 1]).num_computed_tokens == 2 * B


def test_hits_end_where_the_chunk_does() -> None:
    story = Story()
    story.run([*A, *C, *X, 0])
    seq = story.sequence([*A, *C, *X, 0])
    assert story.manager.allocate(seq, 2 * B) == B


# --- eviction


def test_blocks_without_content_go_before_cached_ones() -> None:
    story = Story(num_blocks=8)
    story.finish(story.run([*A, *C, 0]))
    seq = story.admit(range(100, 124))
    assert len(story.table(seq)) == 6
    assert story.hits([*A, *C, 0]) == 2 * B


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    story = Story(num_blocks=4)
    story.finish(story.run([*A, *C, *X, *Y]))
    prefix_lengths = []
    for i in range(4):
        story.admit([100 + i])
        prefix_lengths.append(story.hits([*A, *C, *X, *Y, 0]))
    assert prefix_lengths == [3 * B, 2 * B, B, 0]


def test_the_least_recently_used_chain_goes_first() -> None:
    story = Story(num_blocks=4)
    story.finish(story.run([*A, 0]))
    story.finish(story.run([*C, 0]))
    story.finish(story.run([*A, 1]))  # A is used again: C is now the older one
    for i in range(3):
        story.admit([100 + i])
    assert (story.hits([*A, 0]), story.hits([*C, 0])) == (B, 0)


@pytest.mark.parametrize("pool", [6], ids=["mini-sglang PR#52, PR#44, PR#46"])
def test_a_block_that_somebody_holds_is_never_evicted(pool: int) -> None:
    story = Story(num_blocks=pool)
    story.finish(story.run([*A, *C, 0]))
    reader = story.admit([*A, *C, 1])
    held = story.table(reader)
    story.compute(reader)
    strangers = [story.admit([100 + i]) for i in range(story.manager.num_free_blocks)]
    assert not set(held) & {block for seq in strangers for block in story.table(seq)}
    with pytest.raises(NoFreeBlocksError):
        story.admit([999])
    assert story.hits([*A, *C, 2]) == 2 * B


def test_hits_are_held_before_new_blocks_are_taken() -> None:
    """Else the first new block could be the hit itself, evicted."""
    story = Story(num_blocks=3)
    story.finish(story.run([*A, *C, *X]))
    seq = story.admit([*A, *C, *Y])
    assert seq.num_computed_tokens == 2 * B
    assert len(set(story.table(seq))) == 3


def test_a_free_block_is_pulled_out_of_a_large_pool_as_fast_as_out_of_a_small_one() -> None:
    """Not a timing: the same number of steps of the interpreter, whatever the pool's size."""

    def lines_run(num_blocks: int) -> int:
        story = Story(num_blocks=num_blocks)
        story.finish(story.run([*A, 0]))
        story.finish(story.run(range(100, 100 + num_blocks // 2 * B)))
        count = 0

        def tracer(frame, event, arg):
            nonlocal count
            count += event == "line"
            return tracer

        sys.settrace(tracer)
        try:
            story.manager.allocate(story.sequence([*A, 1]), 5)
        finally:
            sys.settrace(None)
        return count

    assert lines_run(1_000) == lines_run(10)


# --- copy-on-write


def fork(story: Story, parent: Sequence, token: int) -> Sequence:
    child = story.sequence(parent.token_ids[: parent.num_computed_tokens])
    child.num_computed_tokens = parent.num_computed_tokens
    story.manager.fork(parent, child)
    child.append_token(token)
    return child


def test_n_samples_of_one_prompt_copy_only_the_last_block() -> None:
    story = Story()
    parent = story.run([*A, 5, 6])
    children = [fork(story, parent, token) for token in (7, 8, 9)]
    assert [story.table(child) for child in children] == [[0, 1]] * 3
    parent.append_token(6)
    copies = [story.manager.append(seq, seq.num_tokens) for seq in (*children, parent)]
    assert copies == [[(1, 2)], [(1, 3)], [(1, 4)], []], "the last of the four keeps the original"
    assert [story.table(seq) for seq in (*children, parent)] == [[0, 2], [0, 3], [0, 4], [0, 1]]
    story.manager.check_integrity()


def test_at_a_block_border_nothing_is_copied() -> None:
    story = Story()
    parent = story.run([*A, *C])
    child = fork(story, parent, 9)
    assert story.manager.append(child, 9) == []
    assert story.table(child) == [0, 1, 2]


def test_a_findable_block_is_never_written_to() -> None:
    """A fork computes the prompt's last token again, when everybody else who held that block has left."""
    story = Story()
    parent = story.run([*A, *C])
    child = fork(story, parent, 9)
    child.num_computed_tokens -= 1
    story.finish(parent)
    assert story.manager.append(child, 9) == [(1, 2)]
    assert story.table(child) == [0, 2, 3]
    story.compute(child)
    assert story.hits([*A, *C, 0]) == 2 * B


def test_what_a_fork_writes_again_it_registers_again() -> None:
    story = Story(num_blocks=3)
    parent = story.run([*A, *C])
    child = fork(story, parent, 9)
    child.num_computed_tokens -= 1
    story.manager.append(child, 8)  # a copy of the block with C, for the child alone
    story.finish(parent)
    story.finish(story.admit([99]))  # takes the parent's, so that C is lost there
    assert story.hits([*A, *C, 0]) == B
    story.compute(child, 8)
    assert story.hits([*A, *C, 0]) == 2 * B


def test_a_fork_of_a_fork_that_stepped_back_registers_its_own_blocks() -> None:
    story = Story(num_blocks=3)
    parent = story.run(A)
    child = fork(story, parent, 9)
    child.num_computed_tokens -= 1
    grandchild = fork(story, child, A[-1])
    story.finish(parent, child)
    assert story.manager.append(grandchild, 4) == [(0, 1)]
    story.admit(range(100, 108))  # takes the two other blocks, the one with A among them
    assert story.hits([*A, 0]) == 0
    story.compute(grandchild, 4)
    assert story.hits([*A, 0]) == B


def test_the_copy_needs_a_free_block_of_its_own() -> None:
    story = Story(num_blocks=2)
    child = fork(story, story.run([*A, 5, 6]), 7)
    assert not story.manager.can_append(child, 7)
    with pytest.raises(NoFreeBlocksError, match=r"needs 1 block\(s\), 0 of 2 are free"):
        story.manager.append(child, 7)
    assert story.table(child) == [0, 1]
    story.manager.check_integrity()


def test_a_fork_shares_what_is_computed_and_not_what_is_reserved() -> None:
    story = Story()
    parent = story.admit([*A, *C, *X, 0])
    story.compute(parent, 6)
    assert story.table(fork(story, parent, C[2])) == [0, 1]


def test_a_fork_with_other_tokens_is_refused() -> None:
    story = Story()
    parent = story.run([*A, 5, 6])
    other = story.sequence([*C, 5, 6])
    other.num_computed_tokens = 6
    with pytest.raises(ValueError, match="cannot share the 6 computed tokens of sequence 1"):
        story.manager.fork(parent, other)
    behind = story.sequence([*A, 5, 6])
    with pytest.raises(ValueError, match="cannot share the 6 computed tokens of sequence 1"):
        story.manager.fork(parent, behind)


def test_forks_leave_in_any_order() -> None:
    story = Story()
    parent = story.run([*A, 5, 6])
    first, second = fork(story, parent, 7), fork(story, parent, 8)
    story.manager.append(first, 7)
    story.finish(parent, second, first)
    assert story.manager.num_free_blocks == 16
    assert story.hits([*A, 0]) == B


def test_children_continue_the_chain_of_their_parent() -> None:
    story = Story()
    child = fork(story, story.run([*A, 5, 6]), 7)
    child.append_token(8)
    story.manager.append(child, 8)
    story.compute(child)
    assert story.hits([*A, *X, 0]) == 2 * B


# --- statistics


def test_hit_rate_of_a_few_admissions() -> None:
    story = Story()
    assert story.manager.stats.hit_rate == 0.0
    story.run([*A, *C, 0])
    story.run([*A, *C, 1])
    assert (story.manager.stats.queried_tokens, story.manager.stats.hit_tokens) == (18, 8)
    assert story.manager.stats.hit_rate == 8 / 18


@pytest.mark.parametrize("preemptions", [1, 2], ids=lambda n: f"vllm#25780, {n} times")
def test_recompute_after_preemption_is_no_hit(preemptions: int) -> None:
    story = Story()
    seq = story.run([*A, *C, 0])
    for _ in range(preemptions):
        story.finish(seq)
        seq.num_computed_tokens, seq.num_preemptions = 0, seq.num_preemptions + 1
        assert story.manager.allocate(seq, 9) == 2 * B, "it does find its own blocks"
    assert (story.manager.stats.queried_tokens, story.manager.stats.hit_tokens) == (9, 0)


def test_a_question_is_not_a_query() -> None:
    story = Story()
    story.run([*A, 0])
    before = repr(story.manager.stats)
    story.hits([*A, 1])
    story.manager.can_allocate(story.sequence([*A, 1]), 5)
    assert repr(story.manager.stats) == before


# --- the engine's part of the cases


@pytest.mark.parametrize("length", [B + 1, 2 * B, 2 * B + 3], ids=lambda n: f"MinivLLM PR#98, {n} tokens")
def test_computation_goes_on_at_the_position_after_the_hit(length: int) -> None:
    """The tokens to compute and their positions: what RoPE and the cache's slots are built from."""
    story, prompt = Story(), list(range(length))
    first = story.run(prompt)
    second = story.admit(prompt)
    cached = second.num_computed_tokens
    assert cached == (length - 1) // B * B
    assert story.table(second)[: cached // B] == story.table(first)[: cached // B]


@pytest.mark.parametrize("shared", [3 * B, 3 * B + 2], ids=lambda n: f"tenstorrent/vllm#415, {n} shared")
def test_hit_or_miss_each_sequence_reads_its_own_tokens(shared: int) -> None:
    """50 prompts behind one system prompt, in a pool that keeps evicting: each block holds the prefix it is read as."""
    story, rng, written = Story(num_blocks=20), random.Random(1), {}
    system = [rng.randrange(50) for _ in range(shared)]
    for i in range(50):
        seq = story.admit([*system, *(rng.randrange(3) for _ in range(1 + i % 9))])
        for j, block in enumerate(story.table(seq)):
            prefix = tuple(seq.token_ids[: (j + 1) * B])
            assert j >= seq.num_computed_tokens // B or written[block] == prefix
            written[block] = prefix
        story.finish(story.compute(seq))
    assert story.manager.stats.hit_tokens >= 49 * (shared // B * B)


@pytest.mark.parametrize("source", ["minivllm"], ids=["vllm kv_cache_manager.py: prompt_logprobs skip the cache"])
def test_there_are_no_prompt_logprobs_that_a_hit_could_cut_short(source: str) -> None:
    """A hit computes no logits for the tokens that it skips, so an engine with prompt logprobs has to skip the cache.

    Nobody can ask for them here: no module has a parameter or a field of that name.
    """
    package = Path(block_manager.__file__).parents[1]
    modules = [path for path in package.rglob("*.py") if path.parent.name not in ("course", "checks")]
    assert package.name == source and len(modules) > 3
    for path in modules:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names |= {
            node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
        }
        assert "prompt_logprobs" not in names, path
