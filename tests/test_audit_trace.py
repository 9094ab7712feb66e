"""The traced half of the audit sees what really runs, and only that."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest

from minivllm import LLM, SamplingParams
from minivllm.audit_trace import watch
from minivllm.kernels.reference import causal_attention
from minivllm.layers.attention import Attn
from minivllm.utils import context

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """On the CPU on every machine: recorded steps call nothing, and fused layers do not say which they are."""
    return LLM(block_size=4, num_kvcache_blocks=32, enable_prefix_caching=False, device="cpu")


def prompts() -> list[dict]:
    return [{"prompt_token_ids": list(range(100, 100 + n))} for n in (12, 5, 3)]


def test_counts_are_those_of_a_run_by_hand(llm: LLM) -> None:
    with watch() as trace:
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert trace.set_context_calls == 5
    assert trace.kernel_launches == {"torch.store_kv": 30, "torch.paged_prefill": 6, "torch.paged_decode": 24}
    assert trace.blocks_taken == trace.blocks_given_back == 4 + 3 + 2


def test_every_layer_reads_the_tables(llm: LLM) -> None:
    with watch() as trace:
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert sorted(trace.fields_read) == list(range(6))
    for names in trace.fields_read.values():
        assert {"slot_mapping", "block_tables", "context_lens", "kv_cache", "backend"} <= names


def test_an_attention_that_ignores_the_context_is_seen(llm: LLM) -> None:
    def forgetful(self: Attn, q: object, k: object, v: object, positions: object) -> object:
        return causal_attention(q, k, v, positions, positions, self.scale)

    with watch() as trace, patch.object(Attn, "forward", forgetful):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert trace.set_context_calls == 5 and not trace.fields_read and not trace.kernel_launches


def test_watching_changes_no_answer_and_leaves_nothing_behind(llm: LLM) -> None:
    before = (context.set_context, Attn.forward_paged)
    plain = [out.outputs[0].token_ids for out in llm.generate(prompts(), GREEDY, use_tqdm=False)]
    with watch():
        watched = [out.outputs[0].token_ids for out in llm.generate(prompts(), GREEDY, use_tqdm=False)]
    assert watched == plain and (context.set_context, Attn.forward_paged) == before


def test_the_command_reports_both_halves() -> None:
    done = subprocess.run([sys.executable, "-m", "minivllm.audit", "--trace"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["实现状态"] == "已实现 paged attention" and report["阻塞项"] == []
    trace = report["trace"]
    assert trace["set_context_call_count"] > 0 and trace["blocks_taken"] == trace["blocks_given_back"] > 0
    assert all("block_tables" in names for names in trace["context_fields_read_by_layer"].values())
