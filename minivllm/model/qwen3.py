# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Qwen3 and its close relatives (Qwen2, Llama, Mistral): one decoder, switched by the config.

Tokens are a flat row [num_tokens], without a batch axis: who may look at whom is the attention's business alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.layers.attention import Attn
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary_embedding import RotaryEmbedding
from minivllm.utils.loader import load_weights


class Qwen3Attn(nn.Module):
    """Projections around the attention of one layer. `rotary` is shared by all layers."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * size, config.num_key_value_heads * size
        self.head_dim, self.rotary = size, rotary
        self.q_proj = nn.Linear(hidden, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.attn = Attn(config.num_attention_heads, size, config.num_key_value_heads)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """positions [num_tokens], hidden [num_tokens, hidden_size] → [num_tokens, hidden_size]."""
        heads = (len(hidden), -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden).view(heads))  # [num_tokens, num_heads, head_dim]
        k = self.k_norm(self.k_proj(hidden).view(heads))  # [num_tokens, num_kv_heads, head_dim]
        v = self.v_proj(hidden).view(heads)
        q, k = self.rotary(positions, q, k)
        return self.o_proj(self.attn(q, k, v, positions).flatten(1))


class Qwen3DecoderLayer(nn.Module):
    """Attention, then the feed-forward network; each normalises its input and adds to the hidden state."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attn(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """positions [num_tokens], hidden [num_tokens, hidden_size] → [num_tokens, hidden_size]."""
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Qwen3Model(nn.Module):
    """Token embedding, the layers, the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rotary = RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size] after the last norm."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return self.norm(hidden)


class Qwen3(nn.Module):
    """A decoder with its head: `model(input_ids, positions)` gives hidden states, `compute_logits` scores tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions [num_tokens] → hidden states [num_tokens, hidden_size] after the last norm.

        Raises IndexError for an id outside the vocabulary and for a position past the longest text (on the CPU).
        """
        return self.model(input_ids, positions)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → one score per word of the vocabulary, float32 [num_rows, vocab_size]."""
        return self.lm_head(hidden).float()

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> "Qwen3":
        """Build the model of a Hugging Face folder and load its weights, in the given dtype, on the given device.

        Raises FileNotFoundError, ConfigError or WeightsError, each naming the file, field or tensor.
        """
        with default_dtype(dtype), torch.device(device):
            model = cls(ModelConfig.from_folder(folder))
        load_weights(model, folder)
        return model.eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside the block get this dtype; tables that ask for float32 by name keep it."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(standard)
