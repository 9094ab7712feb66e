"""Attention over pages on a CPU without a copy: equal to the reference, and no slot is read that is not in a table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.block_manager import cdiv
from minivllm.kernels import reference, sparse
from minivllm.kernels.backends import load_backend

NUM_BLOCKS = 64


def make_pages(
    lens: list[int], block_size: int, kv_heads: int, head_dim: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches, tables and lengths: shuffled blocks, NaN in every slot that no table reaches, garbage behind a table."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, block_size, kv_heads, head_dim)
    caches = torch.full((2, *shape), float("nan"), dtype=dtype)
    free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = torch.full((len(lens), max(1, *(cdiv(n, block_size) for n in lens))), 10**9, dtype=torch.int32)
    for s, length in enumerate(lens):
        for position in range(length):
            if position % block_size == 0:
                tables[s, position // block_size] = free.pop()
            block = tables[s, position // block_size]
            caches[:, block, position % block_size] = torch.randn(2, kv_heads, head_dim, generator=generator).to(dtype)
    return caches[0], caches[1], tables, torch.tensor(lens, dtype=torch.int32)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 5, 7]))
    return {
        "block_size": draw(st.sampled_from([1, 3, 4, 16])),
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([2, 16, 64, 80])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None)
@given(shapes(), st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any))
def test_decode_is_the_reference(shape: dict[str, int], lens: list[int]) -> None:
    pages = make_pages(lens, shape["block_size"], shape["kv_heads"], shape["head_dim"], shape["seed"])
    q = torch.randn(len(lens), shape["heads"], shape["head_dim"], generator=torch.Generator().manual_seed(1))
    ours = sparse.paged_decode(q, *pages, 0.3)
    for s, length in enumerate(lens):  # one by one: the reference reads block 0 for a row without keys
        if length == 0:
            assert (ours[s] == 0).all()
            continue
        k, v = (reference.gather_pages(cache, pages[2][s], length) for cache in pages[:2])
        alone = reference.causal_attention(q[s : s + 1], k, v, torch.tensor([length]), torch.arange(length), 0.3)
        assert torch.allclose(ours[s], alone[0], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    shapes(),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=2, max_size=5),
)
def test_prefill_is_the_reference(shape: dict[str, int], rows: list[tuple[int, int]]) -> None:
    lens, new = [cached + count for cached, count in rows], [count for _, count in rows]
    pages = make_pages(lens, shape["block_size"], shape["kv_heads"], shape["head_dim"], shape["seed"])
    q = torch.randn(sum(new), shape["heads"], shape["head_dim"], generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    expected = reference.paged_prefill(q, *pages, bounds, 0.3)
    assert torch.allclose(sparse.paged_prefill(q, *pages, bounds, 0.3), expected, atol=1e-5)


def test_a_shifted_mask_would_be_noticed() -> None:
    """The tolerance above is tight enough: one key too few in a chunk is a difference of another order."""
    pages = make_pages([40, 40], 4, 2, 64, seed=0)
    q = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1))
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    right = sparse.paged_prefill(q, *pages, bounds, 0.125)
    wrong = sparse.paged_prefill(q, *pages[:3], pages[3] - 1, bounds, 0.125)
    assert (right - wrong).abs().max() > 1e-2


def test_one_step_makes_one_matrix_for_all_layers() -> None:
    sparse.page_matrix.cache_clear()
    pages = make_pages([9, 5], 4, 2, 16, seed=0)
    q = torch.randn(2, 4, 16)
    for _ in range(6):
        sparse.paged_decode(q, *pages, 0.25)
    assert sparse.page_matrix.cache_info().misses == 1
    longer = make_pages([10, 6], 4, 2, 16, seed=0)
    assert not torch.equal(sparse.paged_decode(q, *longer, 0.25), sparse.paged_decode(q, *pages, 0.25))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_backend_runs_what_the_sparse_products_cannot(dtype: torch.dtype) -> None:
    pages = make_pages([9, 5], 4, 2, 16, seed=0, dtype=dtype)
    q = torch.randn(2, 4, 16).to(dtype)
    assert sparse.can_run(q) == (dtype is torch.float64)
    ours = load_backend("torch").paged_decode(q, *pages, 0.25)
    assert torch.allclose(ours, reference.paged_decode(q, *pages, 0.25), atol=1e-2)
