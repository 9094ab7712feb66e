"""Compile every Triton kernel for GPUs that need not be there, and record what it takes.

    python tools/kernel_resources.py --out figures/data/kernel_resources.json

The package's own functions are called on small CPU tensors, with a driver that claims to be a GPU of the wanted kind,
and launches are turned into compilations. So what is compiled is what would run: the same tiles, types and options.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported: kernels are compiled here

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # minivllm says that kernels cannot run here, which is true and not asked for
    import minivllm  # noqa: F401
from minivllm.kernels.launch import early_launch
from minivllm.kernels.paged_decode import DecodePlan, paged_decode
from minivllm.kernels.paged_prefill import paged_prefill
from minivllm.kernels.store_kv import store_kv

ARCHS = (75, 80, 90)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KV_HEADS, BLOCK = 8, 16
# (query heads per KV head, head_dim, kind of numbers)
SHAPES = [(2, 128, "half"), (2, 128, "float32"), (7, 80, "half"), (1, 256, "half"), (3, 8, "half")]


class PretendedGPU:
    """What Triton asks a driver while it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # a device of its own for each architecture: compiled kernels are kept by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def dtype_of(kind: str, arch: int) -> torch.dtype:
    """The half precision of an architecture (bf16 from Ampere on), or float32."""
    return torch.float32 if kind == "float32" else torch.bfloat16 if arch >= 80 else torch.float16


def call_kernels(group: int, head_dim: int, dtype: torch.dtype) -> None:
    """Launch every kernel: a decode step of one sequence, cut and merged; one of 128 sequences; a prompt."""
    caches = torch.zeros(2, 64, BLOCK, KV_HEADS, head_dim, dtype=dtype)
    tables, lens = torch.zeros(128, 64, dtype=torch.int32), torch.full((128,), 512, dtype=torch.int32)
    q = torch.zeros(512, KV_HEADS * group, head_dim, dtype=dtype)
    new = torch.zeros(1, KV_HEADS, head_dim, dtype=dtype)
    store_kv(new, new, *caches, torch.zeros(1, dtype=torch.int64))
    plan = DecodePlan(KV_HEADS * group, KV_HEADS, head_dim, torch.device("cpu"))
    plan.enough = 512
    for batch in (1, 128):
        plan.update(lens[:batch], 1024)
        paged_decode(q[:batch], *caches, tables[:batch], lens[:batch], 0.1, plan=plan)
    paged_prefill(q, *caches, tables[:1], lens[:1], torch.tensor([0, 512], dtype=torch.int32), 0.1, max_seqlen_q=512)


def compiled_kernels(arch: int, group: int, head_dim: int, kind: str) -> Iterator[tuple[str, Any]]:
    """(name, compiled kernel) of every launch of `call_kernels` on a GPU of that architecture."""
    driver.set_active(PretendedGPU(arch))
    early_launch.cache_clear()  # it remembers the device
    run, found = JITFunction.run, []

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    try:
        call_kernels(group, head_dim, dtype_of(kind, arch))
    finally:
        JITFunction.run = run
    yield from found


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes spilled per thread, and shared memory of a program, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "spill_bytes": int(stack), "shared_bytes": kernel.metadata.shared}


def wide_offsets(kernel: Any) -> int:
    """How many address computations of the kernel add 64-bit offsets."""
    return len(re.findall(r"tt\.addptr [^:]*: [^,]*ptr<[^,]*, (?:tensor<[0-9x]*x)?i64", kernel.asm["ttir"]))


def rows() -> Iterator[dict[str, Any]]:
    """What every kernel takes, for every architecture and shape."""
    for arch in ARCHS:
        for group, head_dim, kind in SHAPES:
            for name, kernel in compiled_kernels(arch, group, head_dim, kind):
                shape = {
                    "group": group,
                    "head_dim": head_dim,
                    "dtype": str(dtype_of(kind, arch)).removeprefix("torch."),
                }
                more = {"warps": kernel.metadata.num_warps, "wide_offsets": wide_offsets(kernel)}
                yield {"kernel": name, "arch": arch, **shape, **resources(kernel), **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    about = f"compiled with Triton {triton.__version__}, {KV_HEADS} KV heads, blocks of {BLOCK}, no GPU present"
    data = {"about": about, "triton": triton.__version__, "rows": list(rows())}
    text = json.dumps(data).replace('{"kernel"', '\n{"kernel"').replace("]}", "\n]}\n")
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
