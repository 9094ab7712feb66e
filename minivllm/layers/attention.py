# Generated from notebooks/01_qwen3_from_scratch.ipynb, 02_contiguous_kv_cache.ipynb, 05_context.ipynb,
# 06_triton_decode.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""The attention of one layer: whose keys and values its queries meet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minivllm.kernels.reference import causal_attention
from minivllm.utils.context import Context, get_context


class Attn(nn.Module):
    """The attention of one layer: no weights, only who looks at whom.

    num_heads query heads share num_kv_heads key/value heads of head_dim numbers.
    """

    kv_cache: nn.Module | None = None  # a core.kv_cache.KVCache, while use_kv_cache lasts
    layer_idx: int = 0

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; positions [num_tokens].

        Inside a `forward_context` the pages are written and read, else an attached contiguous cache, else nothing but
        the tokens themselves. Returns [num_tokens, num_heads, head_dim].
        """
        context = get_context()
        if context is not None:
            return self.forward_paged(q, k, v, context)
        if self.kv_cache is not None:
            return self.forward_contiguous(q, k, v, positions)
        return causal_attention(q, k, v, positions, positions, self.scale)

    def forward_contiguous(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """As `forward`, also over the tokens that earlier calls put into the cache at lower positions.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; positions [num_tokens].
        Raises IndexError for a position outside the cache; nothing is written then.
        """
        self.kv_cache.write(self.layer_idx, positions, k, v)
        end = int(positions.max()) + 1
        keys, values = self.kv_cache.read(self.layer_idx, end)
        k_positions = torch.arange(end, device=positions.device)
        return causal_attention(q, keys.to(q.device), values.to(q.device), positions, k_positions, self.scale)

    def forward_paged(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Store the new K and V by slot, then attend over the pages.

        q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]. Returns q's shape.
        """
        context.backend.store_kv(k, v, *context.kv_cache.layer_cache(self.layer_idx), context.slot_mapping)
        return self.attend_pages(q, context)

    def attend_pages(self, q: Tensor, context: Context) -> Tensor:
        """Attention over the pages, where the new K and V are already; sequences are told apart there.

        q [num_tokens, num_heads, head_dim] → the same shape.
        """
        backend, caches = context.backend, context.kv_cache.layer_cache(self.layer_idx)
        pages = (*caches, context.block_tables, context.context_lens)
        if context.max_seqlen_q > 1:
            return backend.paged_prefill(q, *pages, context.cu_seqlens_q, self.scale, max_seqlen_q=context.max_seqlen_q)
        return backend.paged_decode(q, *pages, self.scale, **context.plan_decode(q.shape[1]))


def number_layers(model: nn.Module) -> list[Attn]:
    """Tell each attention of a model which layer it is, in the order in which they run; returns them."""
    layers = [module for module in model.modules() if isinstance(module, Attn)]
    for layer_idx, attn in enumerate(layers):
        attn.layer_idx = layer_idx
    return layers


@contextmanager
def use_kv_cache(model: nn.Module, kv_cache: nn.Module) -> Iterator[None]:
    """Let the attention layers of a model keep keys and values in `kv_cache`, for as long as the `with` lasts.

    Not to be nested: when the inner `with` ends, the model has no cache. Raises ValueError when the cache has another
    number of layers, or heads of another number or size, than the model.
    """
    layers = number_layers(model)
    needed = {(len(layers), attn.num_kv_heads, attn.head_dim) for attn in layers}
    if needed != {found := (kv_cache.num_layers, kv_cache.num_kv_heads, kv_cache.head_dim)}:
        raise ValueError(f"the cache has (layers, heads, head_dim) = {found}, the model needs {sorted(needed)}")
    for attn in layers:
        # Past nn.Module's own bookkeeping: the cache is the caller's, no part of the model that .to() would convert.
        vars(attn).update(kv_cache=kv_cache)
    try:
        yield
    finally:
        for attn in layers:
            vars(attn).update(kv_cache=None)
