# Generated from notebooks/10_gpu_performance.ipynb by tools/export.py; edit there.
"""The same decoder in fewer and larger steps: packed weights, and one kernel for all that lies between two products."""

from types import ModuleType

import torch
from torch import Tensor, nn

from minivllm.kernels import reference
from minivllm.model.qwen3 import Qwen3, Qwen3DecoderLayer
from minivllm.utils.context import get_context


def pack(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weights of several projections of the same input as one, [sum of outputs, num_in], and their biases.

    The projections keep their names and become views of the packed weight, so nothing is held twice.
    """
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    sizes = [part.out_features for part in parts]
    for index, part in enumerate(parts):
        part.weight.data = weight.split(sizes)[index]
        if bias is not None:
            part.bias.data = bias.split(sizes)[index]
    return weight, bias


class FusedLayer:
    """One decoder layer, on the weights of a `Qwen3DecoderLayer`. ops: kernels.fused or kernels.reference."""

    def __init__(self, layer: Qwen3DecoderLayer, next_norm: nn.Module, ops: ModuleType) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.ops, self.attn, self.rotary = ops, attention.attn, attention.rotary
        self.qkv = pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o, self.down = attention.o_proj, mlp.down_proj
        self.gate_up, _ = pack(mlp.gate_proj, mlp.up_proj)
        self.norms = (getattr(attention.q_norm, "weight", None), getattr(attention.k_norm, "weight", None))
        self.post_norm, self.next_norm = layer.post_attention_layernorm.weight, next_norm.weight
        self.eps = next_norm.eps

    def forward(self, positions: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
        """normed [num_tokens, hidden_size], the layer's input after its norm; residual, changed in place: before it.

        Returns the next layer's input after *its* norm.
        """
        ops, context = self.ops, get_context()
        qkv = ops.linear(normed, *self.qkv)
        caches = context.kv_cache.layer_cache(self.attn.layer_idx)
        q = ops.rope_and_store(
            qkv, positions, self.rotary.cos, self.rotary.sin, *self.norms, self.eps, *caches, context.slot_mapping
        )
        mixed = ops.linear(self.attn.attend_pages(q, context).flatten(1), self.o.weight, self.o.bias)
        normed = ops.add_rms_norm(mixed, residual, self.post_norm, self.eps)
        fed = ops.linear(ops.silu_mul(ops.linear(normed, self.gate_up)), self.down.weight)
        return ops.add_rms_norm(fed, residual, self.next_norm, self.eps)


class FusedQwen3:
    """A `Qwen3` for the paged engine, with the same weights and the same answers.

    `fused(input_ids, positions, sampled)` gives hidden states inside a `forward_context`; an id −1 − i stands for
    sampled[i]. ops: kernels.fused (Triton) or kernels.reference.
    """

    def __init__(self, model: Qwen3, ops: ModuleType = reference) -> None:
        self.config, self.ops, self.lm_head = model.config, ops, model.lm_head
        self.embedding = model.model.embed_tokens.weight
        layers = list(model.model.layers)
        self.first_norm = layers[0].input_layernorm
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [model.model.norm]
        self.layers = [FusedLayer(layer, norm, ops) for layer, norm in zip(layers, next_norms, strict=True)]

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, positions: Tensor, sampled: Tensor) -> Tensor:
        """input_ids, positions int64 [num_tokens] → [num_tokens, hidden_size] after the last norm."""
        residual = self.ops.embed(input_ids, sampled, self.embedding)
        normed = self.ops.add_rms_norm(residual, None, self.first_norm.weight, self.first_norm.eps)
        for layer in self.layers:
            normed = layer.forward(positions, normed, residual)
        return normed

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size] in the model's dtype: the sampler widens it."""
        return self.ops.linear(hidden, self.lm_head.weight)
