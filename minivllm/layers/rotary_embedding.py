# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Rotary position embedding from a table. The readable twin is layers/numpy/rotary_embedding.py."""

import torch
from torch import Tensor, nn

from minivllm.config import RopeConfig
from minivllm.layers.numpy.rotary_embedding import scale_frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim] turned by the angles whose cos and sin are [num_tokens, 1, head_dim / 2].

    Returns x's shape and dtype; the arithmetic is float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their position.

    head_dim: numbers per head; max_positions: rows of the table, for positions from 0 to max_positions - 1.
    The table is float32 whatever the model's dtype: bf16 has steps of 4 between 512 and 1024, so
    an angle there would be off by up to 2 radians, a third of a turn.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = scale_frequencies(1.0 / rope.theta**exponents, rope)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_positions, head_dim / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """positions [num_tokens]; q [num_tokens, num_heads, head_dim]; k the same with its number of heads.

        Returns q and k, turned. Raises IndexError for a position past the table (on the CPU).
        """
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return rotate(q, cos, sin), rotate(k, cos, sin)
