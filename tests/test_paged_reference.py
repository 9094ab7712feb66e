"""The paged references follow the tables and nothing else, against float64 attention of each request alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.kv_cache import PagedKVCache
from minivllm.kernels.backends import BackendError, load_backend
from minivllm.kernels.reference import gather_pages, paged_decode, paged_prefill, store_kv
from minivllm.layers.numpy.attention import causal_attention as exact_attention

HUGE = 10**9  # a block id that would crash if it were read


class Pool:
    """Requests of random K and V on shuffled blocks; NaN in every other slot, HUGE in every other table cell."""

    def __init__(self, lens: list[int], block_size: int, heads: int = 2, size: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-n // block_size) for n in lens]
        order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        shape = (sum(needed) + 3, block_size, heads, size)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan")) for _ in range(2))
        self.kv = [tuple(torch.randn(n, heads, size, generator=generator) for _ in range(2)) for n in lens]
        for table, (k, v) in zip(self.tables, self.kv, strict=True):
            slots = [table[p // block_size] * block_size + p % block_size for p in range(len(k))]
            store_kv(k, v, self.k_cache, self.v_cache, torch.tensor(slots, dtype=torch.int64))
        width = max(needed) + 1
        self.block_tables = torch.tensor([t + [HUGE] * (width - len(t)) for t in self.tables], dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)

    def exact(self, request: int, q: Tensor, scale: float) -> np.ndarray:
        """float64 attention of the last len(q) tokens of a request."""
        k, v = (t.double().numpy() for t in self.kv[request])
        positions = np.arange(len(k))
        return exact_attention(q.double().numpy(), k, v, positions[len(k) - len(q) :], positions, scale)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5), st.sampled_from([1, 3, 4, 16])
)
def test_prefill_equals_each_request_alone(requests: list[tuple[int, int]], block_size: int) -> None:
    lens, new = zip(*[(n, min(n, m)) for n, m in requests], strict=True)
    pool = Pool(list(lens), block_size)
    q = torch.randn(sum(new), 4, 8)
    bounds = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    out = paged_prefill(q, pool.k_cache, pool.v_cache, pool.block_tables, pool.lens, bounds, 0.3)
    for s in range(len(lens)):
        rows = slice(int(bounds[s]), int(bounds[s + 1]))
        assert np.abs(out[rows].numpy() - pool.exact(s, q[rows], 0.3)).max() <= 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 3, 4, 16]))
def test_decode_equals_each_request_alone(lens: list[int], block_size: int) -> None:
    pool = Pool(lens, block_size)
    q = torch.randn(len(lens), 4, 8)
    out = paged_decode(q, pool.k_cache, pool.v_cache, pool.block_tables, pool.lens, 0.3)
    for s in range(len(lens)):
        assert np.abs(out[s : s + 1].numpy() - pool.exact(s, q[s : s + 1], 0.3)).max() <= 1e-5


@pytest.mark.parametrize("source", ["vLLM#43810", "vLLM#57156"])
def test_a_padded_row_gives_zeros_and_reads_nothing(source: str) -> None:
    pool = Pool([5, 3], block_size=4)
    tables = torch.cat([pool.block_tables, torch.full((2, pool.block_tables.shape[1]), HUGE, dtype=torch.int32)])
    lens = torch.tensor([5, 3, 0, 0], dtype=torch.int32)
    out = paged_decode(torch.randn(4, 4, 8), pool.k_cache, pool.v_cache, tables, lens, 0.3)
    assert (out[2:] == 0).all() and out.isfinite().all()


@pytest.mark.parametrize(
    "slots", [[-1, -1], [5, -1], [-1, 0]], ids=["vLLM#43810-all-padded", "rvllm#32-mixed", "gLLM#174-slot-0"]
)
def test_slot_minus_one_writes_nowhere(slots: list[int]) -> None:
    canary = torch.full((3, 4, 2, 8), 7.0)
    k_cache, v_cache = canary.clone(), canary.clone()
    store_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k_cache, v_cache, torch.tensor(slots))
    for cache in (k_cache, v_cache):
        changed = (cache.view(12, -1) != 7.0).any(-1).nonzero().flatten().tolist()
        assert changed == sorted(slot for slot in slots if slot >= 0)


def test_a_gather_follows_the_table() -> None:
    slots = torch.arange(32).view(8, 4, 1, 1)
    order = gather_pages(slots, torch.tensor([7, 2, 5, 0]), 13).flatten().tolist()
    assert order == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23, 0]


def test_copy_blocks_reads_every_source_first() -> None:
    cache = PagedKVCache(2, 4, 2, 1, 1)
    cache.k_cache += torch.arange(4.0).view(1, 4, 1, 1, 1)
    cache.copy_blocks([(0, 1), (1, 2)])
    assert cache.k_cache[1, :, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]


def test_a_cache_of_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagedKVCache(2, 0, 16, 4, 64)


def test_bytes_per_block_are_those_of_the_tensors() -> None:
    cache = PagedKVCache(6, 10, 16, 4, 64, dtype=torch.bfloat16)
    assert cache.bytes_per_block * 10 == cache.k_cache.nbytes + cache.v_cache.nbytes


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match="'flash' does not exist; there are 'torch'"):
        load_backend("flash")
