# Generated from notebooks/06_triton_decode.ipynb by tools/export.py; edit there.
"""What the launch of a kernel has to know about the machine."""

from functools import cache

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # kernels run in Python, on the CPU


def target_arch() -> int:
    """Compute capability, times 10, that kernels are compiled for (90 = Hopper, whose tiles the interpreter takes)."""
    return 90 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch


@triton.jit
def start_early(EARLY: tl.constexpr):
    """Let the next kernel start, then wait for the one in front: from here on, what it wrote may be read.

    Programmatic dependent launch:
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#programmatic-dependent-launch-and-synchronization
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def early_launch() -> dict[str, bool]:
    """Launch options: from Hopper on, a kernel may be started while the one in front of it still runs."""
    early = not INTERPRETED and target_arch() >= 90
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
