"""The load that the throughput is measured on, and the record that chapter 10 draws."""

import itertools
import json
import random
import subprocess
from pathlib import Path

import pytest
import torch
from chapters import ROOT

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.course import performance_results
from minivllm.course.performance_results import LOADS, OTHERS, Throughput, by_kind

pytest.importorskip("triton", reason="triton has no wheels for this platform")
import bench_throughput as bench

DATA = ROOT / "figures" / "data"


@pytest.fixture(scope="module")
def results() -> Throughput:
    return Throughput(json.loads((DATA / "throughput_h200.json").read_text(encoding="utf-8")))


def test_the_yardstick_is_the_draw_that_others_were_measured_on():
    """[nano-vllm] its benchmark draws 142,827 prompt tokens and 133,966 output tokens from seed 0."""
    state = random.getstate()
    prompts, params = bench.yardstick_load()
    random.setstate(state)
    assert (len(prompts), sum(map(len, prompts)), sum(one.max_tokens for one in params)) == (256, 142_827, 133_966)
    assert all(0 <= token <= 10_000 for prompt in prompts for token in prompt)


def test_no_run_finds_its_prompts_in_the_prefix_cache():
    prompts = bench.prompts_of([40, 50])
    blocks = [{tuple(p[i : i + 16]) for p in bench.fresh(prompts, run) for i in range(0, 48, 16)} for run in range(4)]
    assert not any(blocks[a] & blocks[b] for a in range(4) for b in range(a))


def test_each_version_is_the_one_before_and_one_change():
    switches = [set(one) - {""} for one in bench.VERSIONS.values()]
    assert switches[0] == set() and switches[-1] == set(bench.BEST) - {""}
    assert all(later > earlier and len(later - earlier) == 1 for earlier, later in itertools.pairwise(switches))


def test_equality_counts_up_to_the_first_difference():
    assert bench.share_equal([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert bench.share_equal([[1], [2, 3]], [[1], [2, 3]]) == 1.0


def test_the_record_has_what_the_chapter_reads(results):
    assert results.versions == list(bench.VERSIONS)
    assert set(LOADS) | {"yardstick"} >= set(OTHERS["vLLM 0.26.0"])
    for load in ("yardstick", *LOADS):
        assert results.rate(load) > 0
    for model, versions in results.equality.items():
        exact = all(share == 1.0 for shares in versions.values() for share in shares)
        assert exact or "float32" not in model, f"{model}: a version changed an answer"


def test_rates_follow_from_tokens_and_seconds(results):
    for row in [results.data["yardstick"], *results.more.values()]:
        assert row["tok_s"] == pytest.approx(row["output_tokens"] / row["seconds"], rel=1e-3)
        assert len(row["all_seconds"]) >= 3, "a median of runs after one that is not counted"


def test_a_profile_is_split_by_kind_and_fills_its_step():
    rows = {"us_and_launches": {"decode_kernel": [300, 28], "nvjet_a": [100, 28], "nvjet_b": [50, 1], "odd": [10, 1]}}
    parts = by_kind(rows, 0.5)
    assert parts == pytest.approx(
        {
            "attention": 0.3,
            "matrix products": 0.1,
            "head and sampler": 0.05,
            "everything else": 0.01,
            "nothing runs": 0.04,
        }
    )


def test_without_a_gpu_nothing_is_measured_here(results, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert performance_results.measure_here(results) is None


@pytest.mark.parametrize("failed", [{}, {"yardstick": "OutOfMemoryError"}], ids=["works", "fails"])
def test_a_measurement_here_is_set_beside_the_record(results, monkeypatch, failed):
    """The benchmark itself is replaced, its command and its file are real."""

    def run(command, **options):
        sections = command[command.index("--only") + 1 :]
        assert Path(command[1]).exists() and set(sections) <= set(dir(bench.Bench))
        assert options["env"]["TRITON_INTERPRET"] == "0"
        found = {"about": {"card": "Some card"}, "failed": failed} | {name: results.data[name] for name in sections}
        Path(command[command.index("--out") + 1]).write_text(json.dumps(found), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(performance_results.subprocess, "run", run)
    if failed:
        with pytest.raises(RuntimeError, match="OutOfMemoryError"):
            performance_results.measure_here(results)
    else:
        head, *lines = performance_results.measure_here(results).splitlines()
        assert "Some card" in head and len(lines) == len(results.loads)
        assert all(line.split()[-1] == line.split()[-2] for line in lines)
