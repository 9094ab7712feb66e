"""The second half of the audit: what a running engine really calls.

`python -m minivllm.audit --trace` generates a few tokens with the model that ships and reports how often the Context
was set, which of its fields each layer read, which kernels ran, and how many blocks were taken and given back. Reading
the source says what could happen; this says what did.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

from minivllm.core.block_manager import BlockManager
from minivllm.kernels.backends import AttentionBackend
from minivllm.layers.attention import Attn
from minivllm.utils import context as context_module
from minivllm.utils.context import Context

KERNELS = ("store_kv", "paged_prefill", "paged_decode")
_layer: ContextVar[int | None] = ContextVar("layer", default=None)


@dataclass
class Trace:
    """What was seen during a run."""

    set_context_calls: int = 0
    fields_read: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by layer
    kernel_launches: Counter = field(default_factory=Counter)
    blocks_taken: int = 0
    blocks_given_back: int = 0

    def report(self) -> dict[str, Any]:
        """The trace in the form of the audit's JSON report."""
        return {
            "set_context_call_count": self.set_context_calls,
            "context_fields_read_by_layer": {layer: sorted(names) for layer, names in sorted(self.fields_read.items())},
            "kernel_launches": dict(self.kernel_launches),
            "blocks_taken": self.blocks_taken,
            "blocks_given_back": self.blocks_given_back,
        }


def watched(context: Context, trace: Trace) -> Context:
    """The same Context, but it writes down which layer reads which field, and counts the kernels of its backend."""

    class WatchedContext(Context):
        def __getattribute__(self, name: str) -> object:
            layer = _layer.get()
            if layer is not None and name in NAMES:
                trace.fields_read[layer].add(name)
            return super().__getattribute__(name)

    values = {name: getattr(context, name) for name in NAMES}
    return WatchedContext(**{**values, "backend": counted(context.backend, trace)})


NAMES = {each.name for each in fields(Context)}


def counted(backend: AttentionBackend, trace: Trace) -> AttentionBackend:
    """The same backend, counting each call under the function's module and name."""

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            trace.kernel_launches[f"{backend.name}.{name}"] += 1
            return function(*args, **kwargs)

        return call

    return replace(backend, **{name: counting(name) for name in KERNELS})


@contextmanager
def watch() -> Iterator[Trace]:
    """Watch every engine of this process for as long as the `with` lasts."""
    trace = Trace()
    set_context, forward_paged = context_module.set_context, Attn.forward_paged
    take, hold, release = BlockManager._take, BlockManager._hold, BlockManager._release

    def counting_set_context(context: Context | None) -> object:
        trace.set_context_calls += context is not None
        return set_context(context and watched(context, trace))

    def in_layer(self: Attn, *args: Any) -> Any:
        token = _layer.set(self.layer_idx)
        try:
            return forward_paged(self, *args)
        finally:
            _layer.reset(token)

    def counting_take(self: BlockManager) -> int:
        trace.blocks_taken += 1
        return take(self)

    def counting_hold(self: BlockManager, block_id: int) -> None:
        before = self.num_free_blocks
        hold(self, block_id)
        trace.blocks_taken += before - self.num_free_blocks

    def counting_release(self: BlockManager, block_id: int) -> None:
        before = self.num_free_blocks
        release(self, block_id)
        trace.blocks_given_back += self.num_free_blocks - before

    replacements = [
        (context_module, "set_context", counting_set_context),
        (Attn, "forward_paged", in_layer),
        (BlockManager, "_take", counting_take),
        (BlockManager, "_hold", counting_hold),
        (BlockManager, "_release", counting_release),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        yield trace


def trace_generation(prompt: str = "Once upon a time", max_tokens: int = 16) -> dict[str, Any]:
    """Generate with the model that ships, and report what was called.

    Without recorded steps and fused layers: a replayed graph calls nothing, and fused layers do not say which they are.
    """
    from minivllm.llm import LLM
    from minivllm.sampling_params import SamplingParams

    llm = LLM(num_kvcache_blocks=64, enforce_eager=True, fused_kernels=False)
    with watch() as trace:
        llm.generate([prompt, prompt], SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return trace.report()
