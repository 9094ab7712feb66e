import torch
from torch import Tensor, nn


class KVCache(nn.Module):
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
        self.num_layers = num_layers
        self.max_seq_len = max_seq_len
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        shape = (num_layers, max_seq_len, num_kv_heads, head_dim)
        factory_kwargs = {"device": device, "dtype": dtype}
        self.register_buffer("k_cache", torch.empty(shape, **factory_kwargs), persistent=False)
        self.register_buffer("v_cache", torch.empty(shape, **factory_kwargs), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Fill the whole cache with zeros."""
        self.k_cache.zero_()
        self.v_cache.zero_()

    def write(
        self,
        layer_idx: int,
        positions: int | Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Put the keys and values of some tokens of one layer in their places.

        positions: one int, or [num_tokens]; k, v: [num_tokens, num_kv_heads, head_dim].
        k and v are converted to the cache's device and dtype.

        Raises IndexError for a layer or a position outside the cache,
        ValueError for a wrong shape.
        """
        self._check_layer_idx(layer_idx)
        where = self._normalize_positions(positions, k.device)
        self._check_kv(k, v, where.numel())
        if where.min() < 0 or where.max() >= self.max_seq_len:
            raise IndexError("positions out of KV cache range")
        # fancy indexing wants int64 on the device of what it indexes
        where = where.to(device=self.k_cache.device, dtype=torch.long)
        like_cache = {"device": self.k_cache.device, "dtype": self.k_cache.dtype}
        self.k_cache[layer_idx, where] = k.to(**like_cache)
        self.v_cache[layer_idx, where] = v.to(**like_cache)

    def read(self, layer_idx: int, end_pos: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [0, end_pos) of one layer, as views."""
        self._check_layer_idx(layer_idx)
        if end_pos < 0 or end_pos > self.max_seq_len:
            raise IndexError("end_pos out of KV cache range")
        return self.k_cache[layer_idx, :end_pos], self.v_cache[layer_idx, :end_pos]

    def layer_cache(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Both buffers of one layer, [max_seq_len, num_kv_heads, head_dim], as views."""
        self._check_layer_idx(layer_idx)
        return self.k_cache[layer_idx], self.v_cache[layer_idx]

    def _check_layer_idx(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.num_layers:
            raise IndexError(f"layer_idx={layer_idx} outside [0, {self.num_layers})")

    def _check_kv(self, k: Tensor, v: Tensor, num_tokens: int) -> None:
        shape = (num_tokens, self.num_kv_heads, self.head_dim)
        if tuple(k.shape) != shape or tuple(v.shape) != shape:
            raise ValueError(f"k is {tuple(k.shape)} and v is {tuple(v.shape)}, both must be {shape}")

    def _normalize_positions(self, positions: int | Tensor, device: torch.device) -> Tensor:
        if isinstance(positions, int):
            return torch.tensor([positions], device=device)
        if positions.dim() != 1:
            raise ValueError(f"positions has {positions.dim()} dimensions, must have 1")
        return positions
