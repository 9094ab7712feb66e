# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Causal grouped-query attention in NumPy float64 (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """Weights that sum to 1 along the last axis of scores [..., num_keys].

    The maximum is taken out first, so that exp cannot overflow.
    """
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def causal_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray, scale: float
) -> np.ndarray:
    """Each query mixes the values of the keys at positions up to its own.

    q [num_queries, num_heads, head_dim]; k, v [num_keys, num_kv_heads, head_dim]; positions [num_queries], [num_keys].
    scale: factor of the dot products, head_dim**-0.5 in a model.
    Returns [num_queries, num_heads, head_dim].
    """
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    visible = k_positions[None, :] <= q_positions[:, None]  # [num_queries, num_keys]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, head // group]
    return out
