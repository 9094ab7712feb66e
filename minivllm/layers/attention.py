# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""The attention of one layer: whose keys and values its queries meet."""

from torch import Tensor, nn

from minivllm.kernels.reference import causal_attention


class Attn(nn.Module):
    """The attention of one layer: no weights, only who looks at whom.

    num_heads query heads share num_kv_heads key/value heads of head_dim numbers.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; positions [num_tokens].

        Returns [num_tokens, num_heads, head_dim].
        """
        return causal_attention(q, k, v, positions, positions, self.scale)
