"""What one step would tell all attention layers, if anybody set it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Context:
    slot_mapping: Tensor | None = None
    block_tables: Tensor | None = None
    context_lens: Tensor | None = None


_CONTEXT = Context()


def get_context() -> Context:
    return _CONTEXT


def set_context(
    slot_mapping: Tensor | None = None,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> None:
    global _CONTEXT
    _CONTEXT = Context(slot_mapping, block_tables, context_lens)


def reset_context() -> None:
    global _CONTEXT
    _CONTEXT = Context()
