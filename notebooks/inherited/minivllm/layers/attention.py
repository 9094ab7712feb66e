"""Causal attention over the tokens it is given, and over nothing else."""

import torch
from torch import Tensor, nn


class Attn(nn.Module):
    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]
        k = k.repeat_interleave(self.group, dim=1)
        v = v.repeat_interleave(self.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)
