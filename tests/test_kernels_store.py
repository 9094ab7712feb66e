"""store_kv writes exactly the slots that it is given."""

import pytest
import torch
from kernel_cases import DEVICE, DTYPES

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.kernels import reference

triton_store = pytest.importorskip("minivllm.kernels.store_kv", reason="triton has no wheels for this platform")
STORES = {"torch": reference.store_kv, "triton": triton_store.store_kv}


@pytest.fixture(params=STORES)
def store(request):
    return STORES[request.param]


def canary_caches(num_blocks=5, block_size=4, num_kv_heads=2, head_dim=16, dtype=torch.float32):
    """K and V caches full of 7 and -7."""
    shape = num_blocks, block_size, num_kv_heads, head_dim
    return torch.full(shape, 7.0, dtype=dtype, device=DEVICE), torch.full(shape, -7.0, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "num_kv_heads"), [(16, 2), (80, 3), (96, 1), (160, 5), (256, 2)])
def test_tokens_land_in_their_slots_and_nowhere_else(store, head_dim, num_kv_heads, dtype):
    k_cache, v_cache = canary_caches(head_dim=head_dim, num_kv_heads=num_kv_heads, dtype=dtype)
    k, v = (torch.randn(6, num_kv_heads, head_dim, device=DEVICE).to(dtype) for _ in "kv")
    slots = torch.tensor([13, 0, 7, 8, 19, 2], device=DEVICE)
    store(k, v, k_cache, v_cache, slots)
    others = [s for s in range(20) if s not in slots.tolist()]
    for cache, new, canary in ((k_cache, k, 7.0), (v_cache, v, -7.0)):
        flat = cache.view(20, num_kv_heads, head_dim)
        assert torch.equal(flat[slots], new)
        assert (flat[others] == canary).all()


@pytest.mark.parametrize("block_size", [1, 8, 16, 256], ids=lambda b: f"flash-attention#828-block{b}")
def test_any_block_size(store, block_size):
    k_cache, v_cache = canary_caches(block_size=block_size)
    k, v = torch.randn(2, 3, 2, 16, device=DEVICE)
    slots = torch.tensor([4 * block_size, block_size - 1, 2 * block_size], device=DEVICE)
    store(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(-1, 2, 16)[slots], k)
    assert torch.equal(v_cache.view(-1, 2, 16)[slots], v)


@pytest.mark.parametrize("slots", [[-1, -1, -1], [-1, 6, -1]], ids=["vllm#43810-all-padded", "rvllm#32-some-padded"])
def test_slot_minus_one_writes_nowhere(store, slots):
    """-1 // B and -1 % B point to the last slot of the cache, and a padded 0 to a live one."""
    k_cache, v_cache = canary_caches()
    k = torch.full((3, 2, 16), float("nan"), device=DEVICE)
    real = [row for row, slot in enumerate(slots) if slot >= 0]
    k[real] = 1.0
    store(k, k, k_cache, v_cache, torch.tensor(slots, device=DEVICE))
    for cache, canary in ((k_cache.view(20, -1), 7.0), (v_cache.view(20, -1), -7.0)):
        assert (cache[[slots[row] for row in real]] == 1.0).all()
        assert int((cache == canary).sum()) == (20 - len(real)) * 32


def test_strided_inputs(store):
    """K and V as they come out of one fused projection: views whose rows are further apart than they are long."""
    fused = torch.full((5, 10, 16), float("nan"), device=DEVICE)
    fused[:, 4:8] = torch.randn(5, 4, 16, device=DEVICE)
    k, v = fused[:, 4:6], fused[:, 6:8]
    k_cache, v_cache = canary_caches()
    slots = torch.tensor([3, 9, 1, 18, 10], device=DEVICE)
    store(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(-1, 2, 16)[slots], k)
    assert torch.equal(v_cache.view(-1, 2, 16)[slots], v)


def test_no_tokens(store):
    k_cache, v_cache = canary_caches()
    none = torch.empty(0, 2, 16, device=DEVICE)
    store(none, none, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert (k_cache == 7.0).all()
