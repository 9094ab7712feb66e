# Generated from notebooks/05_context.ipynb, 06_triton_decode.ipynb, 07_triton_prefill.ipynb, 09_engine.ipynb by
# tools/export.py; edit there.
"""Which functions write and read the pages: a choice of the engine, which no answer depends on."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minivllm.kernels import reference, sparse


class BackendError(ValueError):
    """An attention backend that does not exist, or cannot run on this machine."""


@dataclass(frozen=True)
class AttentionBackend:
    """Three functions with the signatures of `kernels/reference.py`, and perhaps one that is called once per step.

    plan_decode(num_heads, num_kv_heads, head_dim, context_lens, max_context_len) returns what paged_decode takes as
    `plan`.
    """

    name: str
    store_kv: Callable[..., None]
    paged_prefill: Callable[..., Tensor]
    paged_decode: Callable[..., Tensor]

    plan_decode: Callable[..., object] | None = None


def torch_backend() -> AttentionBackend:
    """Plain PyTorch: runs anywhere. On a CPU the pages are read in place (kernels/sparse.py), else gathered."""

    def choose(name: str) -> Callable[..., Tensor]:
        fast, plain = getattr(sparse, name), getattr(reference, name)
        return lambda q, *args, **options: (fast if sparse.can_run(q) else plain)(q, *args, **options)

    return AttentionBackend("torch", reference.store_kv, choose("paged_prefill"), choose("paged_decode"))


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": torch_backend, "triton": lambda: triton_backend()}


def load_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises BackendError for an unknown one, naming those that exist."""
    if name not in BACKENDS:
        raise BackendError(f"attention backend {name!r} does not exist; there are {', '.join(map(repr, BACKENDS))}")
    return BACKENDS[name]()


def require_triton() -> None:
    """Raises BackendError, saying what to do, where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "attention backend 'triton' needs Triton, which has wheels for Linux only: use WSL2, a Linux container or "
            "Colab, or choose the backend 'torch', which runs anywhere"
        )


def decode_planner() -> Callable[..., object]:
    """The plan_decode of the Triton backend: one plan, made at the first step and brought up to date at every other.

    A batch that is larger than its plan gets a new one. The old one stays alive: recorded steps may still use it.
    """
    from minivllm.kernels.paged_decode import DecodePlan

    plans: list[DecodePlan] = []

    def plan_decode(num_heads: int, num_kv_heads: int, head_dim: int, context_lens: Tensor, longest: int) -> object:
        if not plans or len(context_lens) > plans[-1].max_num_seqs:
            room = max(1024, len(context_lens))
            plans.append(DecodePlan(num_heads, num_kv_heads, head_dim, context_lens.device, room))
        return plans[-1].update(context_lens, longest)

    return plan_decode


def triton_backend() -> AttentionBackend:
    """Triton kernels: on a GPU, or interpreted on the CPU, far too slowly for more than tests.

    Raises BackendError where Triton is missing.
    """
    require_triton()
    from minivllm.kernels import paged_decode, paged_prefill, store_kv  # not before it is asked for: see require_triton

    functions = store_kv.store_kv, paged_prefill.paged_prefill, paged_decode.paged_decode
    return AttentionBackend("triton", *functions, decode_planner())
