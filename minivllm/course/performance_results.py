"""Measured figures of the whole engine, as `tools/bench_throughput.py` wrote them, and quoted ones of others."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minivllm.course.stages import find_checkout

# Quoted, not measured by our script: one NVIDIA H200, November 2026, the same draw of requests.
OTHERS: dict[str, dict[str, int]] = {
    "vLLM 0.26.0": {
        "yardstick": 22_685,
        "decode, batch 1": 517,
        "decode, batch 256, context 144": 49_100,
        "decode, batch 256, context 1,152": 24_009,
    },
    "vLLM 0.26.0, eager": {"yardstick": 5_950, "decode, batch 1": 57},
    "nano-vllm bb823b3 with FlashAttention 3": {"yardstick": 19_778, "decode, batch 1": 464},
    "transformers 5.17, continuous batching, FA3": {"yardstick": 13_758, "decode, batch 1": 223},
}
LOADS = {
    "decode, batch 1": "batch 1, prompt 128, output 512, greedy",
    "decode, batch 256, context 144": "batch 256, context 144",
    "decode, batch 256, context 1,152": "batch 256, context 1152",
    "prefill, 256 × 1,024": "prefill 256 x 1024",
}
# What a kernel's name says about its part in a step; the first that matches.
KIND_OF = {
    "decode_kernel": "attention",
    "merge_kernel": "attention",
    "prefill_kernel": "attention",
    "plan_kernel": "attention",
    "best": "head and sampler",
    "nvjet": "matrix products",
    "gemv": "matrix products",
    "add_rms": "between the products",
    "rope": "between the products",
    "silu": "between the products",
    "embed": "between the products",
}


class Throughput:
    """One file of figures."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.best, self.more, self.equality = data["best"], data["more"], data["equality"]
        self.tiles: dict[str, dict[str, float]] = data["tiles"]
        self.startup: float = data["startup"]["total_s"]
        self.overhead: dict[str, dict[str, float]] = data["overhead"]
        self.other_machine: dict[str, Any] = data.get("other_machine", data)  # a file of your own has one run only
        self.sampling: dict[str, float] = data["sampling"]
        self.versions = list(data["waterfall"])
        self.loads = ["yardstick", *list(LOADS)[:3]]

    @property
    def about(self) -> str:
        """Card, versions and date."""
        about = self.data["about"]
        return f"{about['card']}, torch {about['torch']}, triton {about['triton']}, {about['date']}"

    def version(self, label: str, load: str) -> dict[str, float]:
        """{"ms", "tok_s", "mean_context"} of a version at "batch 1" or "batch 256"."""
        return self.data["waterfall"][label][load]

    def rate(self, load: str) -> float:
        """Output tokens per second."""
        return rate_of(self.data, load)

    def seconds(self, load: str) -> float:
        """Of one decode step, or of the whole prefill."""
        row = self.best[LOADS[load]]
        if load == "decode, batch 1":
            return row["seconds"] / row["output_tokens"]
        return row["seconds"] if "seconds" in row else row["ms"] / 1e3

    @cached_property
    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step by kind of kernel; what is missing to the measured step is "nothing runs"."""
        rows = {name: (row, row.get("ms")) for name, row in self.data["profile"].items()}
        prefill, _ = rows.pop("prefill 16 x 1024")
        steps = {name.replace("1122", "1,122"): row for name, row in rows.items()}
        steps["prefill, 16 × 1,024"] = prefill, 1e3 * self.seconds("prefill, 256 × 1,024") / 16
        return {name: by_kind(row, ms) for name, (row, ms) in steps.items()}

    @property
    def sampler_ms(self) -> float:
        """Milliseconds that the sampler takes in a step of 256 rows."""
        return self.data["profile"]["batch 256, context 150"]["us_and_launches"]["best_kernel"][0] / 1e3

    def ledger(self) -> list[tuple[str, ...]]:
        """(change, load, expected, before, after, verdict) of everything that was tried."""
        path = find_checkout() / "figures" / "data" / "throughput_ledger.json"
        return [tuple(map(self._figure, entry)) for entry in json.loads(path.read_text(encoding="utf-8"))]

    def _figure(self, text: str) -> str:
        """A cell of the ledger; one that begins with a slash is the way to milliseconds in the record."""
        if not text.startswith("/"):
            return text
        value = self.data
        for name in text[1:].split("/"):
            value = value[name]
        return f"{value:.2f} ms"


def rate_of(data: dict[str, Any], load: str) -> float:
    """Output tokens per second of a load, from the sections `yardstick` and `best` of a file."""
    return data["yardstick"]["tok_s"] if load == "yardstick" else data["best"][LOADS[load]]["tok_s"]


def measure_here(recorded: Throughput) -> str | None:
    """Rates of this machine's GPU beside the recorded ones, a line for each load; None without a GPU. Two minutes.

    Raises RuntimeError with the end of its output when the measurement fails.
    """
    if not torch.cuda.is_available():
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "here.json"
        command = [sys.executable, find_checkout() / "tools" / "bench_throughput.py", "--out", out]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}  # compiled, whatever the notebook does
        done = subprocess.run(
            [*command, "--only", "best", "yardstick"], env=environment, capture_output=True, text=True
        )
        data = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"failed": "no file"}
    if data["failed"]:
        raise RuntimeError(f"the measurement failed: {data['failed']} {done.stderr[-500:]}")
    lines = [f"{'output tokens per second':34}{data['about']['card']:>24}{recorded.data['about']['card']:>24}"]
    return "\n".join(
        lines + [f"{load:34}{rate_of(data, load):24,.0f}{recorded.rate(load):24,.0f}" for load in recorded.loads]
    )


def by_kind(rows: dict[str, Any], step_ms: float) -> dict[str, float]:
    """Milliseconds by kind; rows: {"us_and_launches": {kernel: [microseconds, launches]}}."""
    parts: dict[str, float] = {}
    for name, (microseconds, launches) in rows["us_and_launches"].items():
        kind = next((kind for part, kind in KIND_OF.items() if part in name), "everything else")
        if kind == "matrix products" and launches == 1:  # the layers' products run 28 times
            kind = "head and sampler"
        parts[kind] = parts.get(kind, 0.0) + microseconds / 1e3
    parts["nothing runs"] = max(0.0, step_ms - sum(parts.values()))
    return parts


def load_throughput(path: str | Path | None = None) -> Throughput:
    """Read a file of figures; without one, those of the H200 that come with the course."""
    path = path or find_checkout() / "figures" / "data" / "throughput_h200.json"
    return Throughput(json.loads(Path(path).read_text(encoding="utf-8")))
