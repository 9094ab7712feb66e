# Generated from notebooks/07_triton_prefill.ipynb by tools/export.py; edit there.
"""Triton kernel for prompts: all new tokens of a ragged batch attend to their pages, causally."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.launch import INTERPRETED, target_arch
from minivllm.kernels.paged_decode import LOG2_E, attend_tile, load_rows


@triton.jit
def find_tile(cu_seqlens_q, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence that owns query tile number `tile`, and the tile's first token in it, by binary search.

    Sequence s starts at tile cu_seqlens_q[s] // TOKENS + s: there is always room for its tiles before the next one's,
    and at most one tile to spare, whose first token lies past the sequence's end. cu_seqlens_q int32 [num_seqs + 1].
    The numbering is that of vLLM (`find_seq_idx` in vllm/v1/attention/ops/triton_attention_helpers.py).
    """
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        later = tl.load(cu_seqlens_q + middle) // TOKENS + middle > tile
        low, high = tl.where(later, low, middle), tl.where(later, middle - 1, high)
    return low, (tile - tl.load(cu_seqlens_q + low) // TOKENS - low) * TOKENS


@triton.jit
def attend_causally(
    q_rows, limits, fewest, end, k_head, v_head, block_table, scale_log2, block_stride, slot_stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The running softmax of rows that see the keys before limits [ROWS], from `fewest` to `end` of them.

    q_rows [ROWS, PADDED_DIM] → top [ROWS], total [ROWS], acc [ROWS, PADDED_DIM]. Rows that are not stored may have
    limits above `end`; no key from `end` on is read for them either.
    """
    diagonal = fewest // KEYS * KEYS  # every row sees all the keys before this one
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(0, diagonal, KEYS):
        top, total, acc = attend_tile(
            q_rows, limits, start, end, top, total, acc, k_head, v_head, block_table, scale_log2,
            block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, False, UPCAST,
        )  # fmt: skip
    for start in tl.range(diagonal, end, KEYS, num_stages=1):
        top, total, acc = attend_tile(
            q_rows, limits, start, end, top, total, acc, k_head, v_head, block_table, scale_log2,
            block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, True, UPCAST,
        )  # fmt: skip
    return top, total, acc


@triton.jit(do_not_specialize=["num_seqs"])
def prefill_kernel(
    q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, out, scale_log2, num_seqs,
    q_token_stride, q_head_stride, block_stride, slot_stride, head_stride, table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a tile of query tokens × the heads of one KV head, against all the keys they see.

    Shapes as in `paged_prefill`; out is contiguous. A row is a (token, head), counted token by token.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # tiles with the most keys first
    seq, first_token = find_tile(cu_seqlens_q, num_seqs, tile, TOKENS)
    first_row = tl.load(cu_seqlens_q + seq)
    num_new = tl.load(cu_seqlens_q + seq + 1) - first_row
    if first_token >= num_new:
        return
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    q_row = (first_row + tl.minimum(token, num_new - 1)).to(tl.int64)  # rows past the prompt repeat its last token
    q_rows = load_rows(q, q_row * q_token_stride + head * q_head_stride, HEAD_DIM, PADDED_DIM, UPCAST)
    cached = tl.load(context_lens + seq) - num_new
    _, total, acc = attend_causally(
        q_rows, cached + token + 1, cached + first_token + 1, cached + tl.minimum(first_token + TOKENS, num_new),
        k_cache + kv_head * head_stride, v_cache + kv_head * head_stride,
        block_tables + tl.cast(seq, tl.int64) * table_stride, scale_log2, block_stride, slot_stride,
        ROWS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, UPCAST,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # no keys, no weights: zeros
    target = out + (q_row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    stored = (row < TOKENS * GROUP) & (token < num_new)
    tl.store(target, result.to(out.dtype.element_ty), mask=stored[:, None] & (dim[None, :] < HEAD_DIM))


def prefill_tile(query_rows: int, row_bytes: int, arch: int) -> dict[str, int]:
    """Query rows and keys of a tile, warps, stages and registers of `prefill_kernel`.

    query_rows: the most new tokens of a sequence × query heads of a KV head; row_bytes: one key of one head; arch as
    `target_arch` gives it. 128 rows and 64 keys on 8 warps fit twice on a Hopper multiprocessor if each thread keeps to
    128 registers; then one program multiplies while the other computes its softmax. Measured on an H200; the tiles for
    other cards are compiled in the tests and were not measured.
    """
    rows = min(128, max(16, triton.next_power_of_2(query_rows)))
    if row_bytes > 256 or arch < 80:  # float32, wide heads; no bf16 tensor cores before Ampere
        return {"ROWS": min(rows, 32), "KEYS": 16, "num_warps": 8, "num_stages": 2}
    if rows < 128 or arch < 90:
        return {"ROWS": min(rows, 64), "KEYS": 64, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128}


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor,
    scale: float, *, max_seqlen_q: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of every sequence's new tokens over its pages, into which their own K and V are written already.

    q [num_tokens, num_heads, head_dim], its last stride 1; rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] are the newest
    tokens of sequence s; caches [num_blocks, block_size, num_kv_heads, head_dim], both with the same strides;
    block_tables int32 [num_seqs, max_blocks]; context_lens int32 [num_seqs], new tokens included; cu_seqlens_q int32
    [num_seqs + 1], its last entry num_tokens. max_seqlen_q: the most new tokens of a sequence, if known: few get a
    smaller tile. Returns [num_tokens, num_heads, head_dim], zeros where a sequence has no context (a padded row).
    Nothing is raised for a page outside the caches: it is read, wherever that is. Tiles and online softmax follow
    FlashAttention (https://arxiv.org/abs/2205.14135).
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_seqs, group = len(context_lens), num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))  # tl.dot takes no fewer than 16
    tile = prefill_tile((max_seqlen_q or num_tokens) * group, padded_dim * k_cache.element_size(), target_arch())
    tile["ROWS"] = max(tile["ROWS"], triton.next_power_of_2(group))  # one token at least
    tiles_at_most = num_tokens // (tile["ROWS"] // group) + num_seqs
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prefill_kernel[(num_kv_heads, tiles_at_most)](
        q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, out, scale * LOG2_E, num_seqs,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0),
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size,
        UPCAST=INTERPRETED, **tile,
    )  # fmt: skip
    return out
