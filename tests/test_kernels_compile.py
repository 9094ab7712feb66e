"""Every kernel compiles for Turing, Ampere and Hopper with no GPU present, fits there, and takes what is recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheels for this platform")
ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "figures" / "data" / "kernel_resources.json"
SHARED_LIMIT = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024}  # bytes that one program can have
KERNELS = {"store_kv_kernel", "plan_kernel", "decode_kernel", "merge_kernel", "prefill_kernel"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The record, made now, in a process of its own: this one interprets kernels."""
    out = tmp_path_factory.mktemp("resources") / "resources.json"
    command = [sys.executable, ROOT / "tools" / "kernel_resources.py", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def skip_other_versions(compiled):
    """Registers differ between versions of Triton; with the recorded one they are the recorded ones."""
    recorded = json.loads(RECORD.read_text())["triton"]
    if recorded != compiled["triton"]:
        pytest.skip(f"recorded with Triton {recorded}, this is {compiled['triton']}")


def test_every_kernel_compiles_for_every_architecture(compiled):
    found = {(row["kernel"], row["arch"]) for row in compiled["rows"]}
    assert found == {(kernel, arch) for kernel in KERNELS for arch in (75, 80, 90)}


def test_shared_memory_fits(compiled):
    for row in compiled["rows"]:
        assert row["shared_bytes"] <= SHARED_LIMIT[row["arch"]], row


def test_half_precision_kernels_keep_to_their_registers(compiled):
    """A few spilled bytes per thread are the price of 128 registers in prefill on Hopper; nothing else spills there."""
    skip_other_versions(compiled)
    for row in compiled["rows"]:
        if row["dtype"] != "float32" and row["arch"] >= 80:
            assert row["spill_bytes"] <= (128 if row["kernel"] == "prefill_kernel" and row["arch"] == 90 else 0), row


def test_offsets_into_caches_have_64_bits(compiled):
    """[vllm#47671] 2^31 numbers of K are 4.3 GB: block number × stride must not be computed in 32 bits."""
    for row in compiled["rows"]:
        if row["kernel"] in {"store_kv_kernel", "decode_kernel", "prefill_kernel"}:
            assert row["wide_offsets"] >= 2, row  # into K and into V


def test_the_record_is_up_to_date(compiled):
    skip_other_versions(compiled)
    record = json.loads(RECORD.read_text())
    assert compiled == record, "run: python tools/kernel_resources.py --out figures/data/kernel_resources.json"
