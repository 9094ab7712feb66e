# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""RMSNorm in NumPy float64, as the formula reads (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., size] scaled to a mean square of 1 along the last axis, times weight [size]."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight
