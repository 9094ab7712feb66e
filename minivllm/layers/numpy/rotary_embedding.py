# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Rotary position embedding in NumPy float64 (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from typing import TypeVar

import numpy as np

from minivllm.config import RopeConfig

Array = TypeVar("Array")  # a NumPy array or a torch tensor


def scale_frequencies(frequencies: Array, rope: RopeConfig) -> Array:
    """Slow the clocks down so that longer texts stay within the angles seen in training. [head_dim / 2] in and out.

    "linear" slows all of them by `factor`; "llama3" only those that turn less than low_freq_factor times in the
    original context, and keeps those that turn more than high_freq_factor times.
    """
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    turns = frequencies * (rope.original_max_position_embeddings / (2 * np.pi))
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0, 1)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def rotary_angles(positions: np.ndarray, head_dim: int, rope: RopeConfig) -> np.ndarray:
    """The angle of every clock at every position: positions [num_tokens] → [num_tokens, head_dim / 2], in radians."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return positions[:, None] * scale_frequencies(frequencies, rope)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turn the pairs (x[i], x[i + head_dim / 2]) of each head.

    x [num_tokens, num_heads, head_dim], angles [num_tokens, head_dim / 2]; returns the shape of x.
    """
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
