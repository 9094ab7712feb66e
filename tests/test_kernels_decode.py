"""paged_decode against attention in float64, on pages where everything that must not be read is NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, DTYPES, assert_close, dense_answer, make_batch
from long_runs import LONG

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.kernels import reference

paged = pytest.importorskip("minivllm.kernels.paged_decode", reason="triton has no wheels for this platform")


def decode(batch, q=None, **options):
    q = batch.q if q is None else q
    return paged.paged_decode(
        q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.scale, **options
    )


def check(contexts, dtype=torch.float32, **shape):
    batch = make_batch(contexts, dtype=dtype, device=DEVICE, **shape)
    want = dense_answer(batch)
    assert_close(decode(batch), want, dtype)
    plain = reference.paged_decode(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.scale
    )
    assert_close(plain, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 16, 32, 64, 80, 96, 128, 160, 256], ids=lambda d: f"vllm#25030-dim{d}")
def test_head_dims(head_dim, dtype):
    check([37, 5], dtype, head_dim=head_dim, num_kv_heads=1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 71], ids=lambda g: f"lmdeploy#3781-group{g}")
def test_group_sizes(group):
    check([37, 5], group=group)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 256], ids=lambda b: f"flash-attention#828-block{b}")
def test_contexts_around_block_borders(block_size):
    edges = sorted({1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1} - {0})
    check(edges, block_size=block_size, num_kv_heads=1)


def test_every_context_up_to_a_block_and_one():
    check(list(range(1, 18)), block_size=16, num_kv_heads=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_and_ragged(dtype):
    check([1000, 3, 257, 64, 1], dtype, block_size=16, num_kv_heads=1, group=4)


@pytest.mark.parametrize("pieces", [8, 16], ids=lambda n: f"pegainfer#21-{n}-pieces")
def test_more_pieces_than_keys(pieces, monkeypatch):
    """An empty piece would be merged as -inf - (-inf): no piece may be empty, however many are asked for."""
    monkeypatch.setattr(paged, "SHORTEST_PIECE", 1)
    monkeypatch.setattr(paged, "programs_wanted", lambda *shape: pieces)
    for contexts in ([1], [2, 1, 3], [7, 64, 15], [17, 0, 33, 1]):
        check(contexts, num_kv_heads=1)


@pytest.mark.parametrize("contexts", [[0, 20, 0, 5], [0], [0] * 9], ids=["rvllm#32", "vllm#57156-alone", "many"])
def test_padded_rows_give_zeros(contexts):
    """Rows that pad a batch have no context, and a table that must not be followed."""
    batch = make_batch(contexts, device=DEVICE)
    out = decode(batch)
    assert (out[batch.context_lens == 0] == 0).all()
    assert_close(out, dense_answer(batch), torch.float32)


def test_strided_queries():
    batch = make_batch([9, 30], device=DEVICE)
    fused = torch.full((2, 8, 16), float("nan"), device=DEVICE)
    fused[:, 1:5] = batch.q
    assert_close(decode(batch, fused[:, 1:5]), dense_answer(batch), torch.float32)


def test_scores_far_from_zero():
    """exp would overflow float32 at 89; the running maximum keeps every exponent at or below 0."""
    batch = make_batch([70, 3], device=DEVICE)
    batch.q.mul_(100)
    assert_close(decode(batch), dense_answer(batch), torch.float32)


def test_one_plan_serves_many_steps():
    """Made once, the plan follows the contexts from step to step, and batches smaller than it was made for."""
    plan = paged.DecodePlan(4, 2, 16, torch.device(DEVICE), max_num_seqs=4)
    for contexts in ([300, 2, 90, 1], [301, 3, 91, 2], [500], [0, 65, 64]):
        batch = make_batch(contexts, device=DEVICE)
        plan.update(batch.context_lens, max(contexts))
        assert_close(decode(batch, plan=plan), dense_answer(batch), torch.float32)


def test_a_batch_larger_than_the_plan_is_refused():
    plan = paged.DecodePlan(4, 2, 16, torch.device(DEVICE), max_num_seqs=2)
    with pytest.raises(ValueError, match="3 sequences, and this plan has room for 2"):
        plan.update(torch.tensor([1, 2, 3], dtype=torch.int32, device=DEVICE), 3)


@settings(max_examples=200 if LONG else 25, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([3000, 10_000]))
def test_a_plan_covers_every_key_once(contexts, num_kv_heads, longest):
    """Items tile each sequence without gaps, longest sequence first, none empty but those of empty sequences."""
    plan = paged.DecodePlan(num_kv_heads, num_kv_heads, 16, torch.device(DEVICE))
    plan.update(torch.tensor(contexts, dtype=torch.int32, device=DEVICE), longest)
    rows = plan.items[: plan.num_items].tolist()
    live = [row for row in rows if row[0] >= 0]
    assert rows == live + [row for row in rows if row[0] < 0]  # the padding comes last
    order = [contexts[row[0]] for row in live]
    assert order == sorted(order, reverse=True)
    for s, context in enumerate(contexts):
        mine = [row for row in live if row[0] == s]
        (rank,) = [r for r, row in enumerate(plan.ranks[: len(contexts)].tolist()) if row[0] == s]
        first_item, pieces = plan.ranks[rank, 1:].tolist()
        assert mine == rows[first_item : first_item + pieces]
        assert pieces == 1 or rank < plan.wanted  # merge_kernel looks no further
        assert pieces == 1 or first_item + pieces <= len(plan.part_out)  # there is room for the partial results
        assert [row[3] for row in mine] == [len(mine)] * len(mine)
        ends = [row[2] for row in mine]
        assert [row[1] for row in mine] == [0, *ends[:-1]]
        assert ends[-1] == context
        assert context == 0 or all(row[1] < row[2] for row in mine)


@settings(max_examples=150 if LONG else 6, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 150), min_size=1, max_size=4).filter(any),
    head_dim=st.sampled_from([16, 32, 64, 80, 96, 128, 160, 256] if LONG else [16, 48, 80]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 16 if LONG else 7),
    block_size=st.sampled_from([1, 8, 16, 32, 64, 256] if LONG else [1, 3, 16, 100]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch(contexts, dtype, **shape):
    check(contexts, dtype, **shape)
