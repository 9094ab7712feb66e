"""Batches on shuffled pages give every sequence what it would get alone."""

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import STORYTELLER
from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.block_manager import BlockManager, slot_of
from minivllm.core.kv_cache import KVCache, PagedKVCache
from minivllm.core.sequence import Sequence
from minivllm.engine.model_runner import ModelRunner, pad_tables
from minivllm.kernels import reference
from minivllm.kernels.backends import AttentionBackend
from minivllm.layers.attention import use_kv_cache
from minivllm.model.qwen3 import Qwen3
from minivllm.utils.context import forward_context, get_context


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return Qwen3.from_pretrained(STORYTELLER)


class Engine:
    """A runner and a block manager whose free blocks come in random order."""

    def __init__(self, model: Qwen3, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> None:
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching=False)
        owners = [Sequence(-1 - number, [0]) for number in range(num_blocks)]
        for owner in owners:
            self.manager.allocate(owner, 1)
        random.Random(seed).shuffle(owners)
        for owner in owners:
            self.manager.free(owner)
        self.runner = ModelRunner(model, PagedKVCache.for_model(model.config, num_blocks, block_size))

    def batch(self, work: list[tuple[Sequence, int]]) -> Batch:
        rows, copies = [], []
        for seq, num_new in work:
            end = seq.num_computed_tokens + num_new
            if seq.num_computed_tokens == 0:
                self.manager.allocate(seq, end)
            else:
                copies += self.manager.append(seq, end)
            rows.append(ScheduledSequence(seq, num_new, self.manager.block_table(seq)))
        return Batch(rows, copies)

    def step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        batch = self.batch(work)
        logits = self.runner.run(batch)
        for row in batch.rows:
            row.seq.num_computed_tokens = row.end
        return logits

    def generate(self, seqs: list[Sequence], num_new: int) -> None:
        for _ in range(num_new):
            logits = self.step([(seq, seq.num_tokens - seq.num_computed_tokens) for seq in seqs])
            for seq, token in zip(seqs, logits.argmax(-1).tolist(), strict=True):
                seq.append_token(token)


PROMPTS = [[0, 641, 585, 259, 448], [0, 300, 17], [0] * 9, [0, *range(100, 119)], [5]]


def test_one_sequence_is_bit_equal_to_the_contiguous_cache(model: Qwen3) -> None:
    engine, seq, config = Engine(model), Sequence(0, list(PROMPTS[0])), model.config
    # Gathered pages: the same numbers in the same order. (On a CPU the backend "torch" reads pages in place, and
    # adds up in another order; tests/test_sparse_attention.py and the ragged test below hold it to its tolerance.)
    plain = (reference.store_kv, reference.paged_prefill, reference.paged_decode)
    engine.runner.backend = AttentionBackend("reference", *plain)
    cache = KVCache(config.num_hidden_layers, 64, config.num_key_value_heads, config.head_dim)
    for _ in range(25):
        first = seq.num_computed_tokens
        logits = engine.step([(seq, seq.num_tokens - first)])
        with use_kv_cache(model, cache):
            hidden = model(torch.tensor(seq.token_ids[first:]), torch.arange(first, seq.num_tokens))
        assert torch.equal(logits, model.compute_logits(hidden[-1:]))
        seq.append_token(logits.argmax().item())


def test_a_ragged_batch_gives_the_tokens_of_one_by_one_runs(model: Qwen3) -> None:
    together = [Sequence(number, list(prompt)) for number, prompt in enumerate(PROMPTS)]
    Engine(model, seed=1).generate(together, 10)
    for number, prompt in enumerate(PROMPTS):
        alone = Sequence(number, list(prompt))
        Engine(model, seed=2 + number).generate([alone], 10)
        assert alone.token_ids == together[number].token_ids


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(0, 5))
@pytest.mark.parametrize("source", ["nano-vllm#213"])
def test_any_split_of_a_prompt_equals_one_shot(model: Qwen3, source: str, pieces: list[int], seed: int) -> None:
    prompt = PROMPTS[3]
    whole = Engine(model).step([(Sequence(0, list(prompt)), len(prompt))])[0]
    engine, seq = Engine(model, seed=seed), Sequence(0, list(prompt))
    logits = None
    for piece in [*pieces, len(prompt)]:
        num_new = min(piece, seq.num_tokens - seq.num_computed_tokens)
        if num_new:
            logits = engine.step([(seq, num_new)])
            assert len(logits) == (seq.num_computed_tokens == len(prompt)), "logits only for the newest token"
    assert (logits[0] - whole).abs().max() <= 1e-4 and logits[0].argmax() == whole.argmax()


def test_prompt_and_decode_rows_share_a_step(model: Qwen3) -> None:
    engine, old, new = Engine(model), Sequence(0, list(PROMPTS[0])), Sequence(1, list(PROMPTS[3]))
    engine.generate([old], 3)
    mixed = engine.step([(old, 1), (new, len(PROMPTS[3]))])
    fresh = Sequence(2, list(PROMPTS[3]))
    assert torch.allclose(mixed[1], Engine(model, seed=3).step([(fresh, len(PROMPTS[3]))])[0], atol=1e-4)


def test_logits_rows_are_last_tokens_in_the_batch_s_order(model: Qwen3) -> None:
    """mini-sglang#98: three prompts of different lengths; only rows that reach their newest token are scored."""
    seqs = [Sequence(number, list(PROMPTS[number])) for number in range(3)]
    logits = Engine(model).step([(seqs[0], 5), (seqs[1], 2), (seqs[2], 9)])
    assert len(logits) == 2
    for row, number in enumerate((0, 2)):
        alone = Sequence(9, list(PROMPTS[number]))
        assert torch.allclose(logits[row], Engine(model, seed=4).step([(alone, alone.num_tokens)])[0], atol=1e-4)


def test_block_copies_are_done_before_the_step(model: Qwen3) -> None:
    engine, parent = Engine(model), Sequence(0, list(PROMPTS[0]))
    engine.generate([parent], 1)
    child = Sequence(1, list(parent.token_ids))
    child.num_computed_tokens = parent.num_computed_tokens
    engine.manager.fork(parent, child)
    logits = engine.step([(parent, 1), (child, 1)])
    assert torch.equal(logits[0], logits[1])
    assert engine.manager.block_table(parent)[-1] != engine.manager.block_table(child)[-1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8), st.sampled_from([1, 4, 16]))
def test_prepare_agrees_with_the_formula_token_by_token(shapes: list[tuple[int, int]], block_size: int) -> None:
    rng, rows = random.Random(0), []
    for number, (start, new) in enumerate(shapes):
        seq = Sequence(number, [rng.randrange(1000) for _ in range(start + new)])
        seq.num_computed_tokens = start
        table = array("i", rng.sample(range(500), -(-(start + new) // block_size)))
        rows.append(ScheduledSequence(seq, new, table))
    runner = ModelRunner(torch.nn.Identity(), PagedKVCache(1, 1, block_size, 1, 2))
    ids, positions, context = runner.prepare(Batch(rows))
    flat = [(row, p) for row in rows for p in range(row.start, row.end)]
    assert ids.tolist() == [row.seq.token_ids[p] for row, p in flat]
    assert positions.tolist() == [p for _, p in flat]
    assert context.slot_mapping.tolist() == [slot_of(p, row.block_table, block_size) for row, p in flat]
    assert context.context_lens.tolist() == [row.end for row in rows]
    assert context.cu_seqlens_q.tolist() == [0, *np.cumsum([row.num_new_tokens for row in rows])]
    assert (context.max_seqlen_q, context.max_context_len) == (max(n for _, n in shapes), max(r.end for r in rows))
    assert {context.block_tables.dtype, context.context_lens.dtype, context.cu_seqlens_q.dtype} == {torch.int32}


def test_padded_tables_keep_every_block() -> None:
    assert pad_tables([array("i", [7, 2, 5]), array("i"), array("i", [1])]).tolist() == [
        [7, 2, 5],
        [0, 0, 0],
        [1, 0, 0],
    ]


def test_an_empty_batch_is_refused(model: Qwen3) -> None:
    with pytest.raises(ValueError, match="no rows"):
        Engine(model).runner.prepare(Batch([]))


@pytest.mark.parametrize("source", ["vLLM#43810", "xLLM#1939"])
def test_padded_rows_write_nowhere_in_any_layer(model: Qwen3, source: str) -> None:
    engine, seq = Engine(model, num_blocks=8), Sequence(0, list(PROMPTS[0]))
    engine.generate([seq], 1)
    ids, positions, context = engine.runner.prepare(engine.batch([(seq, 1)]))
    padded = replace(
        context,
        slot_mapping=torch.cat([context.slot_mapping, torch.tensor([-1, -1])]),
        block_tables=torch.cat([context.block_tables, torch.full((2, context.block_tables.shape[1]), 10**9)]).int(),
        context_lens=torch.cat([context.context_lens, torch.zeros(2)]).int(),
    )
    before = engine.runner.kv_cache.k_cache.clone()
    with forward_context(padded):
        hidden = model(torch.cat([ids, ids.new_zeros(2)]), torch.cat([positions, positions.new_zeros(2)]))
    changed = (engine.runner.kv_cache.k_cache != before).flatten(3).any(-1).flatten(1).nonzero().tolist()
    slot = context.slot_mapping.item()
    assert changed == [[layer, slot] for layer in range(model.config.num_hidden_layers)]
    assert hidden.isfinite().all()


def test_a_failing_step_leaves_no_context_and_the_next_one_works(model: Qwen3) -> None:
    engine, seq = Engine(model), Sequence(0, list(PROMPTS[0]))
    broken = Sequence(1, [10**6])  # an id that the embedding does not have
    with pytest.raises(IndexError):
        engine.step([(broken, 1)])
    assert get_context() is None
    engine.generate([seq], 3)
    alone = Sequence(2, list(PROMPTS[0]))
    Engine(model, seed=5).generate([alone], 3)
    assert seq.token_ids == alone.token_ids


def test_two_runners_over_one_model_do_not_meet(model: Qwen3) -> None:
    first, second = Engine(model, seed=6), Engine(model, block_size=8, seed=7)
    a, b = Sequence(0, list(PROMPTS[0])), Sequence(0, list(PROMPTS[3]))
    for _ in range(4):
        first.generate([a], 1)
        second.generate([b], 1)
    for seq, prompt in ((a, PROMPTS[0]), (b, PROMPTS[3])):
        alone = Sequence(0, list(prompt))
        Engine(model).generate([alone], 4)
        assert seq.token_ids == alone.token_ids
