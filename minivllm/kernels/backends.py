# Generated from notebooks/05_context.ipynb by tools/export.py; edit there.
"""Which functions write and read the pages: a choice of the engine, which no answer depends on."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minivllm.kernels import reference


class BackendError(ValueError):
    """An attention backend that does not exist, or cannot run on this machine."""


@dataclass(frozen=True)
class AttentionBackend:
    """Three functions with the signatures of `kernels/reference.py`."""

    name: str
    store_kv: Callable[..., None]
    paged_prefill: Callable[..., Tensor]
    paged_decode: Callable[..., Tensor]


def torch_backend() -> AttentionBackend:
    """Plain PyTorch: runs anywhere."""
    return AttentionBackend("torch", reference.store_kv, reference.paged_prefill, reference.paged_decode)


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": torch_backend}


def load_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises BackendError for an unknown one, naming those that exist."""
    if name not in BACKENDS:
        raise BackendError(f"attention backend {name!r} does not exist; there are {', '.join(map(repr, BACKENDS))}")
    return BACKENDS[name]()
