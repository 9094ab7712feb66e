"""Measured figures of the kernels, as `tools/bench_kernels.py` and `tools/kernel_resources.py` wrote them."""

import json
import os
import subprocess
import sys
from typing import Any

import torch

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

    def beside(self, kind: str, peers: "Results") -> str:
        """A table of what the package exports beside other kernels, without those that have no figure in it."""
        units = {"gb_s": ("GB/s", ",.0f"), "us": ("µs", ".1f"), "tflop_s": ("TFLOP/s", ".0f")}
        cases = {ours["case"] for ours in self.data[kind]}
        rows = [row for row in peers.data["rows"] if row["case"] in cases]
        columns = [i for i in range(len(peers.data["names"])) if any(row["figures"][i] != "–" for row in rows)]
        lines = [f"{'':16}{'':9}{'ours':>10}" + "".join(f"{peers.data['names'][i]:>22}" for i in columns)]
        for row in rows:
            unit, form = units[row["unit"]]
            ours = self._row(kind, row["case"], "stage 4" if kind == "decode" else "exported")[row["unit"]]
            figures = "".join(f"{row['figures'][i]:>22}" for i in columns)
            lines.append(f"{row['case']:16}{unit:9}{ours:>10{form}}{figures}")
        return "\n".join(lines)

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


def measure_here() -> str | None:
    """Time the decode kernel on this machine's GPU, compiled, in a process of its own; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    command, environment = [sys.executable, "-m", __name__], {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or f"the measurement failed: {done.stderr.strip()[-300:]}"


def time_decode(calls: int = 20) -> str:
    """64 sequences of 1,024 tokens on Qwen3-0.6B's heads in bf16: GB/s and microseconds, replayed from a CUDA graph.

    The pages are 268 MB, several times the cache of a card, so that they come from its memory in every call.
    """
    from triton.testing import do_bench

    from minivllm.kernels import paged_decode as kernels

    kernels.early_launch = lambda: {"EARLY": False}  # timed alone, as what is recorded
    seqs, blocks, dtype = 64, 64, torch.bfloat16
    k_cache, v_cache = torch.randn(2, seqs * blocks, 16, 8, 128, device="cuda", dtype=dtype)
    tables = torch.randperm(seqs * blocks, device="cuda").view(seqs, blocks).int()
    lens = torch.full((seqs,), 1024, dtype=torch.int32, device="cuda")
    plan = kernels.DecodePlan(16, 8, 128, lens.device).update(lens, 1024)
    q = torch.randn(seqs, 16, 128, device="cuda", dtype=dtype)

    def call() -> None:
        kernels.paged_decode(q, k_cache, v_cache, tables, lens, 0.1, plan=plan)

    call()  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    ms = do_bench(graph.replay, return_mode="median") / calls
    return f"{torch.cuda.get_device_name()}: {2 * k_cache.nbytes / ms / 1e6:,.0f} GB/s, {ms * 1e3:.0f} µs"


if __name__ == "__main__":
    print(time_decode())
