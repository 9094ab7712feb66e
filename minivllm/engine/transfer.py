# Generated from notebooks/10_gpu_performance.ipynb by tools/export.py; edit there.
"""Between host and device, once each way per step: packed inputs there, sampled tokens back."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.core.batch import Batch
from minivllm.engine.request import Sample

TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}

ALIGNMENT = 16  # bytes: kernels read 16 at a time


class StepBuffers:
    """Room for the inputs of a step, allocated once: two pinned pieces on the host, one on the device.

    Two, because the host fills in the inputs of the next step while those of this one may still be on their way.
    Before it fills in the step after that, it has waited for this one's tokens, so this one's piece is free again.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays to the device in one go. Raises ValueError when they are larger than the room."""
        self.hosts.reverse()
        room, end = self.hosts[0].numpy(), 0
        for values in arrays.values():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + values.nbytes
            if end > len(room):
                raise ValueError(f"the inputs of this step need more than the {len(room):,} bytes that are set aside")
            room[start:end] = values.reshape(-1).view(np.uint8)
        self.device[:end].copy_(self.hosts[0][:end], non_blocking=True)

    def views(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Where arrays of these shapes lie on the device when they are sent: the same place for the same shapes."""
        found, end = {}, 0
        for name, values in arrays.items():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + values.nbytes
            found[name] = self.device[start:end].view(TORCH_DTYPES[values.dtype.name]).view(values.shape)
        return found


@dataclass
class PendingTokens:
    """Tokens of a launched step: on the device at once, on the host when `wait` returns."""

    values: Tensor  # int64 [num_rows], on the host
    ready: torch.cuda.Event | None = None
    logits: Tensor | None = None  # of a step whose log probabilities were asked for

    @classmethod
    def fetch(cls, tokens: Tensor) -> "PendingTokens":
        """Start copying tokens, int64 [num_rows]; the host does not wait."""
        if not tokens.is_cuda:
            return cls(tokens.clone())
        values = tokens.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.Event()
        ready.record()
        return cls(values, ready)

    def wait(self) -> list[int]:
        """The tokens, as soon as the step has computed them."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()


@dataclass
class Launched:
    """A step under way: its batch, whose tokens they will be, and where they will arrive."""

    batch: Batch
    samples: list[Sample]
    tokens: PendingTokens
