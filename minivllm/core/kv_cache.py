# Generated from notebooks/02_contiguous_kv_cache.ipynb, 05_context.ipynb by tools/export.py; edit there.
"""Where keys and values are kept from step to step, so that no token is computed twice."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig


class KVCache(nn.Module):
    """Keys and values of one sequence, in one piece: the token at position p is row p of its layer.

    k_cache, v_cache [num_layers, max_seq_len, num_kv_heads, head_dim], zeros at first. Raises ValueError for a size
    below 1.
    """

    def __init__(
        self,
        num_layers: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (num_layers, max_seq_len, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(f"a cache of (layers, positions, heads, head_dim) = {shape} is empty: all must be ≥ 1")
        self.num_layers, self.max_seq_len, self.num_kv_heads, self.head_dim = shape
        self.register_buffer("k_cache", torch.zeros(shape, device=device, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def layer_cache(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Views of a layer's K and V, [max_seq_len, num_kv_heads, head_dim]. Raises IndexError for no such layer."""
        if not 0 <= layer_idx < self.num_layers:
            raise IndexError(f"layer {layer_idx} is outside this cache: it has layers 0 to {self.num_layers - 1}")
        return self.k_cache[layer_idx], self.v_cache[layer_idx]

    def _rows(self, positions: int | Tensor) -> Tensor:
        """The rows of these positions, int64 [num_tokens] on the cache's device; each is checked."""
        rows = torch.as_tensor(positions, device=self.k_cache.device)
        if rows.dtype is torch.bool or rows.is_floating_point():
            raise TypeError(f"positions are {rows.dtype}: they must be integers")
        if rows.dim() > 1:
            raise ValueError(f"positions have shape {list(rows.shape)}: pass one int, or [num_tokens]")
        rows = rows.reshape(-1).long()
        if len(outside := rows[(rows < 0) | (rows >= self.max_seq_len)]):
            raise IndexError(f"position {outside[0]} is outside this cache: it has rows 0 to {self.max_seq_len - 1}")
        return rows

    @torch.no_grad()
    def write(self, layer_idx: int, positions: int | Tensor, k: Tensor, v: Tensor) -> None:
        """Put keys and values of some tokens of one layer into their rows, converted to the cache's dtype and device.

        positions: one int, or integers [num_tokens]; k, v [num_tokens, num_kv_heads, head_dim].
        Raises IndexError for a layer or position outside the cache, ValueError for a wrong shape, TypeError for
        positions that are not integers; nothing is written then.
        """
        k_cache, v_cache = self.layer_cache(layer_idx)
        rows = self._rows(positions)
        expected = (len(rows), self.num_kv_heads, self.head_dim)
        for name, given in (("k", k), ("v", v)):
            if given.shape != expected:
                message = f"{name} has shape {list(given.shape)} for {len(rows)} position(s), expected {list(expected)}"
                raise ValueError(message)
        k_cache[rows], v_cache[rows] = k.to(k_cache), v.to(v_cache)

    def read(self, layer_idx: int, end_pos: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [0, end_pos) of one layer, [end_pos, num_kv_heads, head_dim], as views.

        Raises IndexError for a layer outside the cache, or an end_pos outside [0, max_seq_len].
        """
        k_cache, v_cache = self.layer_cache(layer_idx)
        if not 0 <= end_pos <= self.max_seq_len:
            raise IndexError(f"end_pos {end_pos} is outside this cache: it must be from 0 to {self.max_seq_len}")
        return k_cache[:end_pos], v_cache[:end_pos]

    def reset(self) -> None:
        """Forget everything: zeros in both buffers."""
        self.k_cache.zero_()
        self.v_cache.zero_()


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What one token's keys and values take in the cache, all layers together, in bytes."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class PagedKVCache:
    """K and V of all layers, cut into blocks that any sequence may own.

    k_cache, v_cache: [num_layers, num_blocks, block_size, num_kv_heads, head_dim], zeroed: memory that was never
    written may hold NaN, and 0 × NaN is NaN. Raises ValueError for a size below one.

    The blocks are those of Kwon et al. 2023, section 4.1 (https://arxiv.org/abs/2309.06180).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(f"a paged cache needs every size to be at least 1, got {shape}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.k_cache = torch.zeros(shape, device=device, dtype=dtype)
        self.v_cache = torch.zeros(shape, device=device, dtype=dtype)

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "PagedKVCache":
        """A cache with the layers, heads and head size of a model. Raises ValueError for a size below one."""
        heads, size = config.num_key_value_heads, config.head_dim
        return cls(config.num_hidden_layers, num_blocks, block_size, heads, size, device=device, dtype=dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes, K and V, over all layers."""
        return 2 * self.k_cache[:, 0].numel() * self.k_cache.element_size()

    def layer_cache(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, as views [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self.k_cache[layer_idx], self.v_cache[layer_idx]

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each, in all layers; every source is read before any is written."""
        if pairs := list(copies):
            sources, destinations = torch.tensor(pairs, device=self.k_cache.device).T
            for cache in (self.k_cache, self.v_cache):
                cache[:, destinations] = cache[:, sources]
