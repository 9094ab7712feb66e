"""The recorded figures hang together, and show what the chapters say of them."""

import json
import tomllib

import pytest
from chapters import ROOT

RESULTS = json.loads((ROOT / "figures" / "data" / "kernels_h200.json").read_text(encoding="utf-8"))
ROWS = {(row["case"], row["variant"]): row for row in RESULTS["decode"] + RESULTS["prefill"]}


def test_every_row_was_checked_before_it_was_timed():
    assert all(row["relative_error"] < 5e-3 for row in ROWS.values())


def test_no_row_reads_faster_than_memory():
    fastest = max(RESULTS["ceilings"]["read_gb_s"], RESULTS["ceilings_after"]["read_gb_s"])
    assert all(row.get("gb_s", 0) <= fastest for row in ROWS.values())
    assert all(row.get("tflop_s", 0) <= RESULTS["ceilings"]["matmul_tflop_s"] for row in ROWS.values())


def test_the_ledger_is_the_one_in_tools_and_was_measured():
    ledger = tomllib.loads((ROOT / "tools" / "kernel_ledger.toml").read_text(encoding="utf-8"))
    assert RESULTS["ledger"] == ledger
    for entry in [*ledger["decode"], *ledger["prefill"]]:
        before, after = (ROWS[entry["case"], entry[side]]["us"] for side in ("before", "after"))
        assert entry["verdict"] != "kept" or after < 1.01 * before, entry


@pytest.mark.parametrize("case", ["B64 c1024", "B256 c1024"], ids=lambda case: f"mlx-lm#1679-{case}")
def test_keys_shared_by_a_group_are_read_once(case):
    """GB/s counts K and V once: a kernel that reads them per query head cannot come near the ceiling."""
    assert ROWS[case, "stage 2"]["gb_s"] >= 1.5 * ROWS[case, "stage 1"]["gb_s"]


def test_one_long_sequence_is_cut():
    """[MinivLLM#93, sglang#2271] a batch of one leaves most multiprocessors idle unless its keys are cut."""
    assert ROWS["B1 c32768", "stage 2"]["us"] >= 5 * ROWS["B1 c32768", "stage 4"]["us"]
