"""Tiny models with random weights, made and saved by transformers, for the tests of model and loader."""

from functools import cache
from pathlib import Path

import torch
import transformers

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # 6 × 16 is not 40
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DIVIDED = {"hidden_size": 48, "head_dim": None}  # no head_dim of its own: 48 / 6 = 8
LLAMA = {"hidden_size": 48, "head_dim": 16}  # transformers wants a multiple of 6 here
# id: (architecture, what differs from SHAPE)
VARIANTS: dict[str, tuple[str, dict]] = {
    "qwen3-TensorRT-LLM#5912": ("Qwen3", {}),
    "qwen3-tied-vLLM#33036": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-attention-bias": ("Qwen3", {"attention_bias": True}),
    "qwen3-linear-rope": ("Qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}}),
    "qwen2-qkv-bias-nano-vllm#203": ("Qwen2", DIVIDED),
    "qwen2-tied": ("Qwen2", {**DIVIDED, "tie_word_embeddings": True}),
    "llama-llama3-rope": ("Llama", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama-bias-everywhere": ("Llama", {**LLAMA, "attention_bias": True}),
    "llama-no-groups": ("Llama", {**DIVIDED, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


@cache
def build(variant: str) -> transformers.PreTrainedModel:
    """The model of transformers, float32; every parameter is random, norms and biases too. Not to be changed."""
    architecture, changes = VARIANTS[variant]
    sizes = SHAPE | changes
    if sizes["head_dim"] is None:
        del sizes["head_dim"]
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    torch.manual_seed(len(variant))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def save(variant: str, folder: Path, **options: object) -> Path:
    """Save a variant as Hugging Face folders are saved; options go to `save_pretrained`."""
    build(variant).save_pretrained(folder, **options)
    return folder
