"""Run a random model for eight tokens, and hold Attn against its NumPy twin."""

import numpy as np
import torch

from minivllm.config import Config
from minivllm.layers.attention import Attn
from minivllm.layers.numpy.attention import attention
from minivllm.model.qwen3 import Qwen3


def attention_error(num_tokens: int = 6, config: Config | None = None) -> float:
    """Largest absolute difference between the torch and the NumPy attention."""
    config = config or Config()
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (torch.randn(num_tokens, n, dim, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    expected = attention(q.numpy(), k.numpy(), v.numpy())
    return float(np.abs(Attn(heads, kv_heads, dim)(q, k, v).numpy() - expected).max())


@torch.inference_mode()
def decode(mini_model: Qwen3, prompt: list[int], device: str = "cpu") -> list[int]:
    """The prompt and eight greedy tokens after it."""
    generated = list(prompt)
    input_ids = torch.tensor(generated, device=device)
    positions = torch.arange(len(generated), device=device)
    for _ in range(8):
        hidden = mini_model(input_ids, positions)
        last_logits = mini_model.compute_logits(hidden[-1:])
        next_token = last_logits.argmax(dim=-1).item()
        generated.append(next_token)
        input_ids = torch.tensor(generated, device=device)
        positions = torch.arange(len(generated), device=device)
    return generated


if __name__ == "__main__":
    torch.manual_seed(0)
    print("attention agrees with NumPy:", attention_error() < 1e-12)
    print("tokens:", decode(Qwen3(Config()), [3, 1, 4, 1, 5]))
