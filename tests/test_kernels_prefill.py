"""paged_prefill against attention in float64, on pages where everything that must not be read is NaN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, DTYPES, assert_close, dense_answer, make_batch
from long_runs import LONG

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.kernels import reference

paged = pytest.importorskip("minivllm.kernels.paged_prefill", reason="triton has no wheels for this platform")


def prefill(batch, q=None, **options):
    q = batch.q if q is None else q
    args = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.cu_seqlens_q, batch.scale
    return paged.paged_prefill(q, *args, **options)


def check(contexts, new, dtype=torch.float32, **shape):
    batch = make_batch(contexts, new, dtype=dtype, device=DEVICE, **shape)
    want = dense_answer(batch)
    assert_close(prefill(batch), want, dtype)
    assert_close(prefill(batch, max_seqlen_q=max(new)), want, dtype)
    args = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.cu_seqlens_q, batch.scale
    assert_close(reference.paged_prefill(batch.q, *args), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 16, 32, 64, 80, 96, 128, 160, 256], ids=lambda d: f"vllm#25030-dim{d}")
def test_head_dims(head_dim, dtype):
    check([37, 5], [20, 5], dtype, head_dim=head_dim, num_kv_heads=1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 71], ids=lambda g: f"lmdeploy#3781-group{g}")
def test_group_sizes(group):
    check([40, 5], [33, 5], group=group, num_kv_heads=1)


def test_a_group_wider_than_the_tile():
    """In float32 a tile of wide heads has 32 rows: it grows until one token's queries fit."""
    check([20, 3], [7, 3], group=40, head_dim=128, num_kv_heads=1)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 256], ids=lambda b: f"flash-attention#828-block{b}")
def test_prompts_around_block_borders(block_size):
    edges = sorted({1, block_size - 1, block_size, block_size + 1} - {0})
    check(edges, edges, block_size=block_size, num_kv_heads=1)


def test_every_prompt_up_to_a_block_and_one():
    lengths = list(range(1, 18))
    check(lengths, lengths, block_size=16, num_kv_heads=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_with_and_without_a_mask(dtype):
    """Long enough for several unmasked tiles, and for queries whose first tile starts off a tile border."""
    check([300, 200], [290, 37], dtype, block_size=16, num_kv_heads=1)


@pytest.mark.parametrize("context", [63, 64, 65, 127, 128, 129])
def test_the_first_position_near_a_tile_border(context):
    check([context, context + 1], [2, 1], num_kv_heads=1)


def test_one_launch_for_prompts_chunks_and_decoding_rows():
    """A new prompt, a chunk in the middle of one, a prefix hit with one token left, decoding rows, an empty row."""
    check([70, 90, 65, 130, 1, 9], [70, 40, 1, 1, 1, 0])


@pytest.mark.parametrize("last", [5, 1], ids=lambda n: f"rvllm#32-before-{n}")
def test_padded_rows_give_zeros(last):
    """A padded decoding row has one query and no context."""
    batch = make_batch([20, 0, 5], [1, 1, last], device=DEVICE)
    out = prefill(batch, max_seqlen_q=last)
    assert (out[1] == 0).all()
    assert_close(out, dense_answer(batch), torch.float32)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64], ids=lambda c: f"nano-vllm#213-chunk{c}")
def test_chunk_by_chunk_equals_at_once(chunk):
    """The same prompt in chunks: each chunk sees the cache up to its own end, and its answers are the same."""
    batch = make_batch([75], [75], device=DEVICE)
    whole = prefill(batch)
    starts = range(0, 75, chunk) if chunk > 1 else [0, 1, 40, 74]
    for start in starts:
        end = min(start + chunk, 75)
        part = paged.paged_prefill(
            batch.q[start:end], batch.k_cache, batch.v_cache, batch.block_tables,
            torch.tensor([end], dtype=torch.int32, device=DEVICE),
            torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE), batch.scale,
        )  # fmt: skip
        torch.testing.assert_close(part, whole[start:end], rtol=0, atol=1e-5)


def test_strided_queries():
    batch = make_batch([9, 30], [9, 4], device=DEVICE)
    fused = torch.full((13, 8, 16), float("nan"), device=DEVICE)
    fused[:, 1:5] = batch.q
    assert_close(prefill(batch, fused[:, 1:5]), dense_answer(batch), torch.float32)


def test_decoding_rows_agree_with_paged_decode():
    decode = pytest.importorskip("minivllm.kernels.paged_decode").paged_decode
    batch = make_batch([100, 3, 64], device=DEVICE)
    args = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens
    torch.testing.assert_close(prefill(batch), decode(batch.q, *args, batch.scale), rtol=0, atol=1e-5)


@st.composite
def ragged(draw):
    contexts = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    return contexts, [draw(st.integers(0, c)) for c in contexts]


@settings(max_examples=150 if LONG else 6, deadline=None)
@given(
    lengths=ragged().filter(lambda lengths: any(lengths[1])),
    head_dim=st.sampled_from([16, 32, 64, 80, 96, 128, 160, 256] if LONG else [16, 48, 80]),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 16 if LONG else 7),
    block_size=st.sampled_from([1, 8, 16, 32, 64, 256] if LONG else [1, 3, 16, 100]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_batch(lengths, dtype, **shape):
    check(*lengths, dtype, **shape)
