# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""RMSNorm. The readable twin is layers/numpy/layernorm.py."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale the last axis to a mean square of 1, then by a learned weight.

    size: length of the last axis; eps: added to the mean square. Input and output [..., size] in the model's dtype;
    the arithmetic is float32.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
