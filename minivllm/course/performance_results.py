"""Measured figures of the whole engine, as `tools/bench_throughput.py` wrote them, and quoted ones of others."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

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
        self.first_run: dict[str, Any] = data.get("first_run", data)  # a file of your own has one run only
        self.first_startup: float = self.first_run["startup"]["total_s"]
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
        return self.data["yardstick"]["tok_s"] if load == "yardstick" else self.best[LOADS[load]]["tok_s"]

    def seconds(self, load: str) -> float:
        """Of one decode step, or of the whole prefill."""
        row = self.best[LOADS[load]]
        if load == "decode, batch 1":
            return row["seconds"] / row["output_tokens"]
        return row["seconds"] if "seconds" in row else row["ms"] / 1e3

    @cached_property
    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a step by kind of kernel; what is missing to the measured step is "nothing runs".

        Batch 1 is from the first run, in which no kernel started before its predecessor had ended: with early starts
        the profiler's times overlap.
        """
        first, now = self.first_run, self.data["profile"]
        single = first["best"][LOADS["decode, batch 1"]]
        prefill_steps = 16
        return {
            "batch 1, context 140 (first run)": by_kind(
                first["profile"]["batch 1, context 140"], 1e3 * single["seconds"] / single["output_tokens"]
            ),
            "batch 256, context 140": by_kind(now["batch 256, context 140"], self.best["batch 256, context 144"]["ms"]),
            "batch 256, context 1,112": by_kind(
                now["batch 256, context 1112"], self.best["batch 256, context 1152"]["ms"]
            ),
            "prefill, 16 × 1,024": by_kind(
                now["prefill 16 x 1024"], 1e3 * self.seconds("prefill, 256 × 1,024") / prefill_steps
            ),
        }

    def single_step_gaps(self) -> tuple[float, float]:
        """Milliseconds of a step at batch 1 in the first run, and of its kernels together."""
        parts = self.profile["batch 1, context 140 (first run)"]
        return sum(parts.values()), sum(parts.values()) - parts["nothing runs"]

    @property
    def sampler_ms(self) -> float:
        """Milliseconds that the sampler takes in a step of 256 rows."""
        return self.data["profile"]["batch 256, context 140"]["us_and_launches"]["best_kernel"][0] / 1e3

    def ledger(self) -> list[tuple[str, ...]]:
        """(change, load, expected, before, after, verdict) of everything that was tried."""
        path = find_checkout() / "figures" / "data" / "throughput_ledger.json"
        return [tuple(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


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
