"""The engine on Triton's kernels: the same logits, one plan for each step, clear words where there is no Triton."""

import subprocess
import sys
from array import array

import pytest
import torch
from kernel_cases import DEVICE

import minivllm
from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.kv_cache import PagedKVCache
from minivllm.core.sequence import Sequence
from minivllm.engine.model_runner import ModelRunner
from minivllm.kernels.backends import load_backend
from minivllm.model.qwen3 import Qwen3

# A machine without Triton, as macOS and Windows are: the import fails, and nothing finds the package.
NO_TRITON = "import sys; sys.modules['triton'] = None\n"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", NO_TRITON + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_without_triton_the_package_imports_and_the_torch_backend_runs():
    code = """
import minivllm, minivllm.kernels.backends as backends, minivllm.engine.model_runner
print(backends.load_backend("torch").name)
"""
    assert run_python(code).strip() == "torch"


def test_without_triton_asking_for_it_says_what_to_do():
    code = """
import minivllm.kernels.backends as backends
try:
    backends.load_backend("triton")
except backends.BackendError as error:
    print(error)
"""
    message = run_python(code)
    assert all(word in message for word in ("Linux only", "WSL2", "Colab", "'torch'"))


pytest.importorskip("triton", reason="triton has no wheels for this platform")


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return Qwen3.from_pretrained(minivllm.STORYTELLER, device=DEVICE, dtype=torch.float32)


def runner(model: Qwen3, backend: str) -> ModelRunner:
    cache = PagedKVCache.for_model(model.config, num_blocks=8, block_size=4, device=DEVICE)
    return ModelRunner(model, cache, backend=backend)


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """Logits of three steps: one prompt; a second prompt beside the first request's decoding; both decoding."""
    seqs = [Sequence(0, [0, 641, 585, 259]), Sequence(1, [0, 300, 17])]
    tables, logits = [array("i", [6, 1, 4]), array("i", [0, 7])], []
    for running in (seqs[:1], seqs, seqs):
        rows = [ScheduledSequence(s, s.num_tokens - s.num_computed_tokens, tables[s.seq_id]) for s in running]
        logits.append(runner.run(Batch(rows)))
        for seq in running:
            seq.num_computed_tokens = seq.num_tokens
            seq.append_token(100 + seq.num_tokens)  # the same tokens for every backend, whatever it answers
    return logits


def test_the_engine_answers_alike_with_both_backends(model):
    for ours, theirs in zip(steps(runner(model, "triton")), steps(runner(model, "torch")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_a_step_is_planned_once_for_all_layers(model, monkeypatch):
    from minivllm.kernels.paged_decode import DecodePlan

    calls, plans, update = [], set(), DecodePlan.update

    def counting(self, context_lens, max_context_len):
        calls.append(context_lens.tolist())
        plans.add(id(self))
        return update(self, context_lens, max_context_len)

    monkeypatch.setattr(DecodePlan, "update", counting)
    steps(runner(model, "triton"))
    assert calls == [[6, 4]]  # of the three steps only the last has nothing but decoding rows
    assert len(plans) == 1


def test_every_engine_has_a_plan_of_its_own():
    assert load_backend("triton").plan_decode is not load_backend("triton").plan_decode


def test_a_batch_that_outgrows_its_plan_gets_a_new_one():
    """The old plan stays as it is: steps that were recorded with it may still run."""
    plan_decode = load_backend("triton").plan_decode
    few, many = (torch.full((size,), 5, dtype=torch.int32, device=DEVICE) for size in (3, 1500))
    first = plan_decode(2, 1, 16, few, 8)
    second = plan_decode(2, 1, 16, many, 8)
    assert plan_decode(2, 1, 16, few, 8) is second is not first
    assert (first.max_num_seqs, second.max_num_seqs) == (1024, 1500)
    assert sorted(second.items[:3, 0].tolist()) == [0, 1, 2]
