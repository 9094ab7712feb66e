"""Measured figures of the kernels, as `tools/bench_kernels.py` and `tools/kernel_resources.py` wrote them."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.course.stages import find_checkout

Row = dict[str, Any]


class Results:
    """The rows of one file in figures/data/."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.ceilings: dict[str, float] = data.get("ceilings", {})

    @property
    def about(self) -> str:
        """Where, when and with what the figures were taken."""
        return self.data["about"]

    @property
    def decode_cases(self) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.data["decode"]))

    @property
    def prefill_cases(self) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.data["prefill"]))

    def variants(self, case: str) -> list[str]:
        """What was measured on a case."""
        return [row["variant"] for kind in ("decode", "prefill") for row in self.data[kind] if row["case"] == case]

    def decode(self, case: str, variant: str) -> Row:
        return self._row("decode", case, variant)

    def prefill(self, case: str, variant: str) -> Row:
        return self._row("prefill", case, variant)

    def _row(self, kind: str, case: str, variant: str) -> Row:
        """Raises KeyError for a variant that was not measured on the case."""
        for row in self.data[kind]:
            if (row["case"], row["variant"]) == (case, variant):
                return row
        raise KeyError(f"{variant!r} was not measured on {case!r}; there are {', '.join(self.variants(case))}")

    def share(self, row: Row) -> float:
        """The part of the read bandwidth, measured in the same run, that a decode row reaches."""
        return row["gb_s"] / self.ceilings["read_gb_s"]

    def spread(self, case: str) -> str:
        """Fastest and slowest run of what the package exports; each run on a card as it was found."""
        times = [run["us"][case] for run in self.data["runs"] if case in run["us"]]
        return f"{len(times)} runs: {min(times):.1f} to {max(times):.1f} µs"

    def ledger(self, kind: str) -> str:
        """Each change that was tried: case, hypothesis, what was measured before and after, what became of it."""
        lines = []
        for entry in self.data["ledger"][kind]:
            before, after = (self._row(kind, entry["case"], entry[side]) for side in ("before", "after"))
            lines.append(f"{entry['case']}: {entry['hypothesis']}")
            lines.append(f"    {entry['before']} {before['us']:.1f} µs → {entry['after']} {after['us']:.1f} µs")
            lines.append(f"    {before['us'] / after['us']:.2f}× as fast: {entry['verdict']}")
        return "\n".join(lines)

    def table(self, *kernels: str, group: int = 2, head_dim: int = 128) -> str:
        """Registers, spilled bytes and shared memory of compiled kernels, a line for each kernel and its warps."""
        shape = {"group": group, "head_dim": head_dim}
        rows = [r for r in self.data["rows"] if r["kernel"] in kernels and shape.items() <= r.items()]
        rows = [row for row in rows if row["dtype"] != "float32"]
        archs = sorted({row["arch"] for row in rows})
        lines = ["".join([f"{'':30}", *(f"{'sm_' + str(arch):>26}" for arch in archs)])]
        lines.append("".join([f"{'':30}", *(f"{'registers spill shared':>26}" for _ in archs)]))
        for kernel, warps in sorted({(row["kernel"], row["warps"]) for row in rows}):
            cells = {row["arch"]: row for row in rows if (row["kernel"], row["warps"]) == (kernel, warps)}
            lines.append(f"{kernel:16} {warps:2} warps     " + "".join(_cell(cells.get(arch)) for arch in archs))
        return "\n".join(lines)


def _cell(row: Row | None) -> str:
    return f"{'–':>26}" if row is None else f"{row['registers']:>12} {row['spill_bytes']:>5} {row['shared_bytes']:>7}"


def load_results(name: str) -> Results:
    """Read figures/data/<name> of the checkout."""
    path = find_checkout() / "figures" / "data" / name
    return Results(json.loads(path.read_text(encoding="utf-8")))


def quick_decode(paged_decode: Callable[..., Tensor]) -> str:
    """Time the decode kernel on this machine's GPU: 64 sequences of 1,024 tokens, Qwen3-0.6B's heads, bf16."""
    from triton.testing import do_bench

    seqs, blocks, dtype = 64, 64, torch.bfloat16
    k_cache, v_cache = torch.randn(2, seqs * blocks, 16, 8, 128, device="cuda", dtype=dtype)
    tables = torch.randperm(seqs * blocks, device="cuda").view(seqs, blocks).int()
    lens = torch.full((seqs,), 1024, dtype=torch.int32, device="cuda")
    q = torch.randn(seqs, 16, 128, device="cuda", dtype=dtype)
    ms = do_bench(lambda: paged_decode(q, k_cache, v_cache, tables, lens, 128**-0.5), return_mode="median")
    rate = 2 * k_cache.nbytes / ms / 1e6
    return f"{torch.cuda.get_device_name()}: {rate:,.0f} GB/s, {ms * 1e3:.0f} µs, plan and launches included"
