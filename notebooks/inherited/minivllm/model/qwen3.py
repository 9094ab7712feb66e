"""A small Qwen3: embedding, decoder layers, head. One sequence, no cache."""

import torch
from torch import Tensor, nn

from minivllm.config import Config
from minivllm.layers.attention import Attn


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    # x: [num_tokens, num_heads, head_dim]; positions: [num_tokens]
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Qwen3Attn(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        # TODO: a triton kernel
        self.attn = Attn(self.num_heads, self.num_kv_heads, config.head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.config.head_dim))
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q = rotate(self.q_norm(q), positions, self.config.rope_theta)
        k = rotate(self.k_norm(k), positions, self.config.rope_theta)
        return self.o_proj(self.attn(q, k, v).flatten(1))


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Qwen3Attn(config)
        self.post_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x), positions)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Qwen3(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        # input_ids, positions: [num_tokens] -> [num_tokens, hidden_size]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)
