# Generated from notebooks/01_qwen3_from_scratch.ipynb, 05_context.ipynb, 10_gpu_performance.ipynb by tools/export.py;
# edit there.
"""Attention in plain PyTorch: what every kernel must equal. The readable twin is layers/numpy/attention.py."""

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor, scale: float) -> Tensor:
    """Each query mixes the values of the keys at positions up to its own; 16-bit inputs are computed in float32.

    q [num_queries, num_heads, head_dim]; k, v [num_keys, num_kv_heads, head_dim]; positions [num_queries], [num_keys].
    scale: factor of the dot products, head_dim**-0.5 in a model.
    Returns [num_queries, num_heads, head_dim] in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).view(len(q), k.shape[1], -1, q.shape[2])  # [num_queries, num_kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.to(wide)) * scale
    too_late = k_positions[None, :] > q_positions[:, None]  # [num_queries, num_keys]
    weights = scores.masked_fill(too_late, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.to(wide)).reshape(q.shape).to(q.dtype)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V into its slot of the caches, in place. A negative slot means: write nowhere.

    k, v [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim];
    slot_mapping int64 [num_tokens], slot = block * block_size + place in the block. Raises IndexError (on a CPU) for a
    slot behind the last.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new[keep].to(cache.dtype)


def gather_pages(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` tokens of one sequence, in order: [num_tokens, num_kv_heads, head_dim], a copy.

    cache [num_blocks, block_size, num_kv_heads, head_dim]; block_table [at least ⌈num_tokens / block_size⌉].
    """
    block_size = cache.shape[1]
    positions = torch.arange(num_tokens, device=cache.device)
    return cache[block_table[positions // block_size].long(), positions % block_size]


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    *,
    max_seqlen_q: int | None = None,
) -> Tensor:
    """Causal attention of every sequence's new tokens over its pages, into which their own K and V are written already.

    q [num_tokens, num_heads, head_dim]: sequence s owns rows cu_seqlens_q[s] to cu_seqlens_q[s + 1], which are the last
    of its context_lens[s] tokens. k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim]; block_tables
    int32 [num_seqs, max_blocks]; context_lens int32 [num_seqs]; cu_seqlens_q int32 [num_seqs + 1].
    Returns [num_tokens, num_heads, head_dim]. max_seqlen_q is for kernels, whose launch needs it; this loop does not.
    """
    out = torch.zeros_like(q)
    bounds = cu_seqlens_q.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        if rows.start == rows.stop:  # nothing new of this sequence: it has no rows to fill
            continue
        k = gather_pages(k_cache, block_tables[s], context_len)
        v = gather_pages(v_cache, block_tables[s], context_len)
        positions = torch.arange(context_len, device=q.device)
        own = positions[context_len - (rows.stop - rows.start) :]
        out[rows] = causal_attention(q[rows], k, v, own, positions, scale)
    return out


def gather_padded(cache: Tensor, block_tables: Tensor, positions: Tensor, context_lens: Tensor) -> Tensor:
    """The tokens at `positions` [num_seqs, width] of each sequence: [num_seqs, width, num_kv_heads, head_dim], a copy.

    cache, block_tables and context_lens as in `paged_prefill`. Rows with a context of 0 have no table: they read
    block 0, whatever their cells say.
    """
    block_size = cache.shape[1]
    blocks = block_tables.gather(1, positions // block_size).long() * (context_lens[:, None] > 0)
    return cache[blocks, positions % block_size]


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Attention of one query token per sequence, its newest, over its pages; all sequences at once.

    q [num_seqs, num_heads, head_dim]; caches, block_tables and context_lens as in `paged_prefill`.
    Returns [num_seqs, num_heads, head_dim]; a context of 0 (a padded row) gives zeros.
    """
    num_kv_heads, wide = k_cache.shape[2], torch.promote_types(q.dtype, torch.float32)
    positions = torch.arange(max(1, int(context_lens.max())), device=q.device)
    beyond = positions >= context_lens[:, None]  # [num_seqs, max_context]
    inside = positions.minimum(context_lens[:, None].long() - 1).clamp(min=0)  # past the end: the last one again
    k = gather_padded(k_cache, block_tables, inside, context_lens).to(wide)
    v = gather_padded(v_cache, block_tables, inside, context_lens).to(wide)
    grouped = q.to(wide).view(len(q), num_kv_heads, -1, q.shape[2])  # [num_seqs, num_kv_heads, group, head_dim]
    scores = torch.einsum("shgd,skhd->shgk", grouped, k) * scale
    weights = scores.masked_fill(beyond[:, None, None], float("-inf")).softmax(dim=-1)
    attended = torch.einsum("shgk,skhd->shgd", weights, v).reshape(q.shape).to(q.dtype)
    return attended.masked_fill((context_lens == 0)[:, None, None], 0.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The last axis of x [..., size] at a mean square of 1, times weight [size]; the arithmetic is float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x + residual, [num_tokens, hidden_size]; `residual` becomes the sum, in place. None: of x alone."""
    total = x if residual is None else residual.add_(x)
    return rms_norm(total, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim] turned by the angle whose cos and sin are [num_tokens, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rope_and_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Norm and rotation of queries and keys, and K and V into the cache; returns the queries, [num_tokens, heads, dim].

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values; the rest as in kernels/fused.py.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    angles = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    store_kv(rotate(k, *angles), v, k_cache, v_cache, slot_mapping)
    return rotate(q, *angles)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [num_tokens, inner]. gate_up [num_tokens, 2 * inner]: gate, then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def embed(token_ids: Tensor, sampled: Tensor, weight: Tensor) -> Tensor:
    """Rows of the embedding table, [num_tokens, hidden_size]; a negative id −1 − i stands for sampled[i]."""
    return weight[torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0)], token_ids)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [num_rows, num_in] @ weight.T [num_in, num_out] + bias [num_out]."""
    return torch.nn.functional.linear(x, weight, bias)
