# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Attention in plain PyTorch: what every kernel must equal. The readable twin is layers/numpy/attention.py."""

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor, scale: float) -> Tensor:
    """Each query mixes the values of the keys at positions up to its own; 16-bit inputs are computed in float32.

    q [num_queries, num_heads, head_dim]; k, v [num_keys, num_kv_heads, head_dim]; positions [num_queries], [num_keys].
    Returns [num_queries, num_heads, head_dim] in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).view(len(q), k.shape[1], -1, q.shape[2])  # [num_queries, num_kv_heads, group, head_dim]
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.to(wide)) * scale
    hidden = k_positions[None, :] > q_positions[:, None]  # [num_queries, num_keys]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.to(wide)).reshape(q.shape).to(q.dtype)
