"""The same attention in NumPy, one head at a time."""

import numpy as np


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    # q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    future = np.triu(np.ones((num_tokens, num_tokens), dtype=bool), 1)
    out = np.empty_like(q)
    for head in range(num_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(head_dim)
        scores[future] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out
