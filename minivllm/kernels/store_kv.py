# Generated from notebooks/06_triton_decode.ipynb by tools/export.py; edit there.
"""Triton kernel that writes new K and V into their pages."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, slot_mapping,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, block_stride, slot_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_ROW: tl.constexpr,
):  # fmt: skip
    """One program per token copies its whole row, all KV heads, of K and of V; shapes as in store_kv."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)  # 64 bits: a cache may have more than 2^31 numbers
    if slot < 0:
        return
    element = tl.arange(0, PADDED_ROW)
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    inside = element < NUM_KV_HEADS * HEAD_DIM
    target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * head_stride + dim
    k_row = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    v_row = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    tl.store(k_cache + target, k_row, mask=inside)
    tl.store(v_cache + target, v_row, mask=inside)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V into its slot of the caches, in place. A negative slot means: write nowhere.

    k, v [num_tokens, num_kv_heads, head_dim], of any strides but the last, which is 1; caches [num_blocks, block_size,
    num_kv_heads, head_dim], both with the same strides; slot_mapping int64 [num_tokens], slot = block * block_size +
    place in the block. Nothing is raised for a slot past the cache: it is written, wherever that is.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    store_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PADDED_ROW=triton.next_power_of_2(num_kv_heads * head_dim),
    )  # fmt: skip
