# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""The gated feed-forward network in NumPy float64 (SwiGLU, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    """x · sigmoid(x), for x of any shape: near 0 for negative numbers, near x for positive ones."""
    return x / (1 + np.exp(-x))


def gated_mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """x [num_tokens, hidden_size]; gate, up [intermediate_size, hidden_size]; down [hidden_size, intermediate_size].

    Weights are (outputs, inputs), as PyTorch stores them. Returns [num_tokens, hidden_size].
    """
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
