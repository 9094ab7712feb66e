"""Ragged batches on poisoned pages, and the answer in float64, for the kernel tests.

Every slot that no sequence owns, every slot past a sequence's end and every table cell past its last block holds
something that shows in the answer when it is read: NaN, or the number of a block full of NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Largest absolute error against float64, for inputs of unit variance. The half precisions pay for rounding the answer
# (and, compiled, the weights) to 11 and 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class PagedBatch:
    """Sequences with `contexts[s]` tokens in the cache, the last `new[s]` of which have queries."""

    contexts: list[int]
    new: list[int]
    q: Tensor  # [num_tokens, num_heads, head_dim]
    keys: list[Tensor]  # per sequence [context, num_kv_heads, head_dim], as stored
    values: list[Tensor]
    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor
    block_tables: Tensor  # int32 [num_seqs, max_blocks]

    @property
    def context_lens(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    @property
    def cu_seqlens_q(self) -> Tensor:
        ends = torch.tensor([0, *self.new]).cumsum(0)
        return ends.to(torch.int32).to(self.q.device)

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_batch(
    contexts: list[int],
    new: list[int] | None = None,
    *,
    head_dim: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """A batch whose sequences lie on shuffled blocks. `new` defaults to one token per sequence (decoding)."""
    new = [1] * len(contexts) if new is None else new
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    blocks_of = [-(-c // block_size) for c in contexts]
    num_blocks = sum(blocks_of) + 2
    order = (torch.randperm(num_blocks - 1, generator=generator)).tolist()
    poisoned_block = num_blocks - 1
    block_tables = torch.full((len(contexts), max(blocks_of) + 3), poisoned_block, dtype=torch.int32)
    caches = [torch.full((num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype) for _ in "kv"]
    keys, values = [], []
    for s, context in enumerate(contexts):
        table = [order.pop() for _ in range(blocks_of[s])]
        block_tables[s, : len(table)] = torch.tensor(table, dtype=torch.int32)
        for cache, kept in zip(caches, (keys, values), strict=True):
            kept.append(random(context, num_kv_heads, head_dim))
            for position in range(context):
                cache[table[position // block_size], position % block_size] = kept[-1][position]
    q = random(sum(new), num_kv_heads * group, head_dim)
    on_device = [t.to(device) for t in (q, *caches, block_tables)]
    return PagedBatch(contexts, new, on_device[0], keys, values, *on_device[1:])


def dense_answer(batch: PagedBatch) -> Tensor:
    """Causal attention in float64, one sequence, one query, one head at a time: float64 [num_tokens, heads, dim]."""
    q = batch.q.double().cpu()
    out = torch.zeros_like(q)
    row = 0
    for context, new, k, v in zip(batch.contexts, batch.new, batch.keys, batch.values, strict=True):
        group = q.shape[1] // k.shape[1]
        for i in range(new):
            seen = context - new + i + 1
            for head in range(q.shape[1]):
                if seen > 0:
                    scores = k[:seen, head // group].double() @ q[row, head] * batch.scale
                    out[row, head] = scores.softmax(0) @ v[:seen, head // group].double()
            row += 1
    return out


def assert_close(out: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """`out` has no NaN and is nowhere further from `want` than the tolerance of `dtype`."""
    error = (out.double().cpu() - want).abs()
    assert not error.isnan().any(), f"NaN in {int(error.isnan().any(-1).any(-1).sum())} of {len(error)} rows"
    worst = int(error.amax((1, 2)).argmax())
    assert error.max() <= TOLERANCE[dtype], f"row {worst} is off by {error.max():.2e}, more than {TOLERANCE[dtype]:.0e}"
