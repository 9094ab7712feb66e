"""Shapes of the model, and the sizes that a cache in blocks was meant to have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    vocab_size: int = 97
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_model_len: int = 128
    # Two fields for later: they are checked below, and read nowhere.
    block_size: int = 16
    num_kvcache_blocks: int = -1

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError("block_size must be at least 1")
        if self.num_kvcache_blocks < -1 or self.num_kvcache_blocks == 0:
            raise ValueError(f"num_kvcache_blocks={self.num_kvcache_blocks}: give a positive number, or -1")

    @property
    def has_kvcache_blocks(self) -> bool:
        """True when the number is fixed, False when it waits for the free memory to be measured."""
        return self.num_kvcache_blocks > 0
