"""The finished engine on a GPU: real CUDA graphs, real memory, compiled kernels. Skipped where there is none.

`tests/test_cuda_graphs.py` tests the same bookkeeping on any machine, with a function in the place of a graph.
"""

import gc

import pytest
import torch

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.audit_trace import trace_generation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {"dtype": "float32", "max_model_len": 64, "num_kvcache_blocks": 400, "block_size": 4}
MIXED = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, seed=4, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=8, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.8, min_p=0.1, seed=9, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=10),
    SamplingParams(temperature=0, min_tokens=6, max_tokens=8),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, stop=["."]),
]
PROMPTS = [[(7 * i + j) % 500 + 3 for j in range(5 + 4 * i)] for i in range(len(MIXED))]


def answers(prompts, params, **options):
    llm = LLM(minivllm.STORYTELLER, **SMALL | options)
    found = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    llm.llm_engine.block_manager.check_integrity()
    assert llm.llm_engine.runner.recordings or options.get("enforce_eager") or options.get("device") == "cpu"
    return found


@pytest.fixture(scope="module")
def on_the_cpu():
    return answers(PROMPTS, MIXED, device="cpu")


@pytest.mark.parametrize("eager", [False, True], ids=["mini-sglang#63-graphs", "mini-sglang#63-eager"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
def test_the_answers_are_those_of_the_cpu(on_the_cpu, fused, ahead, eager):
    """Filters and penalties included: the seeds' random numbers are the same everywhere."""
    options = {"fused_kernels": fused, "async_scheduling": ahead, "enforce_eager": eager, "max_num_seqs": 5}
    assert answers(PROMPTS, MIXED, **options) == on_the_cpu


@pytest.mark.parametrize("most", [1, 3, 12, 20, 33], ids=lambda n: f"vllm-ascend#16049-max{n}")
def test_every_batch_size_is_replayed(most):
    prompts = [[i + 3, i + 9, 5] for i in range(most)]
    params = [SamplingParams(temperature=0, max_tokens=i + 2, ignore_eos=True) for i in range(most)]
    options = {"max_num_seqs": most}
    assert answers(prompts, params, **options) == answers(prompts, params, enforce_eager=True, **options)


@pytest.mark.parametrize("limit", [60, 61, 64], ids=lambda n: f"nano-vllm#106-limit{n}")
def test_decoding_to_the_last_position(limit):
    prompts = [list(range(3, 2 + limit)), list(range(3, limit - 9))]
    params = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)] * 2
    found = answers(prompts, params, max_model_len=limit, max_num_seqs=3)
    assert [len(tokens) for tokens in found] == [1, 12]
    assert found == answers(prompts, params, max_model_len=limit, max_num_seqs=3, enforce_eager=True)


def test_padded_rows_write_nowhere():
    """[rvllm#32, gLLM#174, vLLM#57156] a graph for 4 with 3 rows leaves every other slot as it was."""
    engine = LLM(minivllm.STORYTELLER, **SMALL, max_num_seqs=4, async_scheduling=False).llm_engine
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests = [engine.add_request([5, 6, 7], params) for _ in range(3)]
    engine.step()
    cache = engine.runner.kv_cache
    cache.k_cache[cache.k_cache == 0] = 7.0
    before = cache.k_cache.clone()
    engine.step()
    changed = (cache.k_cache != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    tables = [engine.block_manager.block_table(request.samples[0].seq) for request in requests]
    assert sorted(changed) == sorted({table[3 // 4] for table in tables})


def test_graphs_and_cache_go_with_the_engine():
    """One engine after the other: memory does not grow, neither what is allocated nor what graphs have reserved."""
    used = []
    for _ in range(3):
        llm = LLM(minivllm.STORYTELLER, **SMALL, max_num_seqs=40)
        llm.generate(PROMPTS, MIXED, use_tqdm=False)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[1] == used[2]


def test_the_cache_takes_its_share_and_no_more():
    """The profiling pass on real counters: weights, cache and the widest step together stay within the share."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    llm = LLM(minivllm.STORYTELLER, gpu_memory_utilization=0.05, max_num_seqs=512, max_model_len=1024)
    cache = llm.llm_engine.runner.kv_cache
    torch.cuda.reset_peak_memory_stats()
    prompts = [[5] * 500 for _ in range(40)]
    llm.generate(prompts, SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=4), use_tqdm=False)
    assert torch.cuda.max_memory_allocated() <= 0.05 * total
    assert cache.num_blocks * cache.bytes_per_block > 0.5 * 0.05 * total or cache.num_blocks == 512 * 64


def test_a_traced_run_sees_every_layer():
    report = trace_generation(max_tokens=4)
    assert sorted(report["context_fields_read_by_layer"]) == list(range(6))
    assert report["blocks_taken"] == report["blocks_given_back"] > 0
    assert {name.split(".")[0] for name in report["kernel_launches"]} == {"triton"}
