# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""The gated feed-forward network. The readable twin is layers/numpy/mlp.py."""

from torch import Tensor, nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    """hidden_size → intermediate_size (twice, one gating the other) → hidden_size, for each token alone."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, hidden_size] → [num_tokens, hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
