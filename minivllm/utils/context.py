# Generated from notebooks/05_context.ipynb, 06_triton_decode.ipynb by tools/export.py; edit there.
"""What a step's attention must know, set by the engine around a forward pass and read by every layer inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from minivllm.core.kv_cache import PagedKVCache
    from minivllm.kernels.backends import AttentionBackend


@dataclass(frozen=True)
class Context:
    """The tokens of one step, the pages they live in, and the functions that read these pages.

    slot_mapping: int64 [num_tokens], where each new K and V is written; −1 = nowhere (a padded row).
    block_tables: int32 [num_seqs, max_blocks]; cells behind a table's end are never read.
    context_lens: int32 [num_seqs], keys of each sequence after this step: cached + new; 0 = a padded row.
    cu_seqlens_q: int32 [num_seqs + 1], sequence s owns the step's rows cu_seqlens_q[s] to cu_seqlens_q[s + 1].
    max_seqlen_q, max_context_len: the most new tokens of a sequence, the most keys; a kernel's launch needs them on
    the host, as plain integers.
    kv_cache, backend: the pages, and the functions that write and read them.

    The cumulative lengths are those of FlashAttention's flash_attn_varlen_func
    (https://github.com/Dao-AILab/flash-attention).
    """

    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_context_len: int
    kv_cache: "PagedKVCache"
    backend: "AttentionBackend"

    def plan_decode(self, num_heads: int) -> dict[str, object]:
        """{"plan": …} for the backend's paged_decode, made by the first layer that asks; {} if it needs no plan."""
        if self.backend.plan_decode is None:
            return {}
        if "plan" not in self.__dict__:
            cache = self.kv_cache.k_cache  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
            plan = self.backend.plan_decode(num_heads, *cache.shape[3:], self.context_lens, self.max_context_len)
            self.__dict__["plan"] = plan  # the fields are frozen; what follows from them may be kept
        return {"plan": self.__dict__["plan"]}


_current: ContextVar[Context | None] = ContextVar("minivllm_context", default=None)


def get_context() -> Context | None:
    """The Context of the forward pass that is running, or None outside of one."""
    return _current.get()


def set_context(context: Context | None) -> Token:
    """Make `context` the current one; `reset_context` with the returned token brings back the one before."""
    return _current.set(context)


def reset_context(token: Token | None = None) -> None:
    """Undo one `set_context`, or, without a token, leave no Context at all.

    Raises RuntimeError for a token that has been used, and ValueError for one of another thread.
    """
    if token is None:
        _current.set(None)
    else:
        _current.reset(token)


@contextmanager
def forward_context(context: Context) -> Iterator[Context]:
    """Set the Context for the block below, and take it away at its end, also when the block raises."""
    token = set_context(context)
    try:
        yield context
    finally:
        reset_context(token)
