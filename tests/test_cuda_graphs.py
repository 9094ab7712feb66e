"""Recorded steps, steps launched ahead, fused layers: the answers are those of the plain engine.

What a CUDA graph itself does needs a GPU: `tests/test_engine_gpu.py`. Here a recording is a function that is called
again, which finds every fault of the bookkeeping around it: sizes, padding, addresses, lifetimes.
"""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.core.block_manager import BlockManager
from minivllm.engine.cuda_graphs import Recording, bucket_for, bucket_sizes
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.transfer import StepBuffers
from minivllm.kernels import sparse

STORYTELLER = str(minivllm.STORYTELLER)


def call_again(work, pool):
    """A recording without a GPU: the same function on the same tensors, into the same output."""
    output = work()

    def replay():
        sparse.page_matrix.cache_clear()  # it knows tensors by identity, and these get new contents
        output.copy_(work())

    return Recording(replay, output)


def engine(*, recorded=False, **options) -> LLMEngine:
    options = {"max_model_len": 64, "num_kvcache_blocks": 64, "block_size": 4, "dtype": "float32"} | options
    made = LLMEngine.from_config(EngineConfig(model=STORYTELLER, device="cpu", **options))
    if recorded:
        made.runner.record_steps(call_again)
    return made


def answers(made: LLMEngine, prompts, params) -> list[list[int]]:
    requests = [made.add_request(p, one) for p, one in zip(prompts, params, strict=True)]
    while made.has_unfinished_requests():
        made.step()
    made.block_manager.check_integrity()
    assert made.block_manager.num_free_blocks == made.block_manager.num_blocks
    return [r.samples[0].seq.completion_token_ids for r in requests]


def some_prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(draw.randint(1, longest))] for _ in range(count)]


MIXED = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.8, seed=4, max_tokens=14),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=10),
    SamplingParams(temperature=1.2, top_k=5, seed=5, max_tokens=1),
    SamplingParams(temperature=0, min_tokens=6, max_tokens=8),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, stop=["."]),
    SamplingParams(temperature=0, max_tokens=60),
]


@pytest.fixture(scope="module")
def plain_answers():
    return answers(engine(async_scheduling=False), some_prompts(8), MIXED)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("fused", [False, True], ids=["layers", "fused"])
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "mini-sglang#63-recorded"])
def test_answers_do_not_depend_on_how_a_step_is_run(plain_answers, recorded, fused, ahead):
    made = engine(async_scheduling=ahead, fused_kernels=fused, recorded=recorded)
    assert answers(made, some_prompts(8), MIXED) == plain_answers


def test_tokens_drawn_in_a_recording_give_way_to_filters():
    """With Triton's kernels a recording draws a token for each row. Rows that filter get another; penalties go the slow
    way."""
    pytest.importorskip("triton", reason="triton has no wheels for this platform")
    params = [
        SamplingParams(temperature=0.9, seed=3, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=3.0, top_k=3, seed=4, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=2, ignore_eos=True),
    ]
    prompts, options = some_prompts(4, longest=5), {"max_num_seqs": 4}
    made, seen = engine(attention_backend="triton", recorded=True, async_scheduling=True, **options), []
    choose = made.runner.choose

    def noted(*arguments, drawn):
        seen.append(drawn)
        return choose(*arguments, drawn=drawn)

    made.runner.choose = noted
    assert answers(made, prompts, params) == answers(engine(async_scheduling=False, **options), prompts, params)
    assert set(seen) == {True, False}


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.parametrize("blocks", [19, 25])
def test_preemption_under_a_step_that_is_under_way(plain_answers, blocks, ahead):
    made = engine(
        async_scheduling=ahead, num_kvcache_blocks=blocks, max_num_batched_tokens=16, max_num_seqs=5, recorded=True
    )
    assert answers(made, some_prompts(8), MIXED) == plain_answers
    assert made.scheduler.num_preemptions > 0 or blocks == 25


@pytest.mark.parametrize("most", [1, 3, 12, 20, 33, 256, 513], ids=lambda n: f"vllm-ascend#16049-max{n}")
def test_every_batch_has_a_bucket(most):
    """[vLLM#5563, nano-vllm] a batch between two sizes, or above the last round one, must not fall through."""
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for batch in range(1, most + 1):
        size = bucket_for(batch, sizes)
        assert batch <= size and all(other < batch or other >= size for other in sizes)
    with pytest.raises(ValueError, match=f"batch of {most + 1} rows"):
        bucket_for(most + 1, sizes)


@pytest.mark.parametrize("most", [1, 3, 12, 20], ids=lambda n: f"nano-vllm-max{n}")
def test_every_batch_size_runs_recorded(most):
    """Answers of lengths 1 … most let the batch shrink one by one, through every size and every padding."""
    prompts = some_prompts(most, longest=6, seed=most)
    params = [SamplingParams(temperature=0, max_tokens=i + 2, ignore_eos=True) for i in range(most)]
    options = {"max_num_seqs": most, "num_kvcache_blocks": 200}
    made, replays = engine(recorded=True, async_scheduling=True, **options), []
    for size, (recording, inputs) in made.runner.recordings.items():
        noted = Recording(lambda size=size, replay=recording.replay: (replays.append(size), replay()), recording.output)
        made.runner.recordings[size] = noted, inputs
    assert answers(made, prompts, params) == answers(engine(async_scheduling=False, **options), prompts, params)
    assert set(replays) == set(bucket_sizes(most))


def test_decoding_to_the_last_position():
    """[nano-vllm#106, #190, #258] the recorded table is as wide as max_model_len needs, not one less."""
    for limit in (60, 61, 64):
        options = {"max_model_len": limit, "max_num_seqs": 3}
        prompts = [list(range(3, 2 + limit)), list(range(3, limit - 9))]
        params = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)] * 2
        found = answers(engine(recorded=True, async_scheduling=True, **options), prompts, params)
        assert [len(tokens) for tokens in found] == [1, 12]
        assert found == answers(engine(async_scheduling=False, **options), prompts, params)


def test_padded_rows_write_nowhere():
    """[rvllm#32, gLLM#174, xLLM#1939, vLLM#57156] a bucket of 4 with 3 rows leaves every other slot as it was."""
    made = engine(recorded=True, max_num_seqs=4, async_scheduling=False)
    cache = made.runner.kv_cache
    requests = [
        made.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)) for _ in range(3)
    ]
    made.step()
    held = {b for r in requests for b in made.block_manager.block_table(r.samples[0].seq)}
    others = [b for b in range(cache.num_blocks) if b not in held]
    cache.k_cache[:, others] = 7.0
    before = cache.k_cache.clone()
    made.step()
    changed = (cache.k_cache != before).flatten(2).any(2).any(0).nonzero().flatten().tolist()
    tables = [made.block_manager.block_table(r.samples[0].seq) for r in requests]
    assert sorted(changed) == sorted({table[3 // 4] for table in tables})


def test_the_recordings_go_with_the_engine():
    made = engine(max_num_seqs=2)
    made.runner.record_steps(lambda work, pool: Recording(print, work()))
    outputs = [weakref.ref(recording.output) for recording, _ in made.runner.recordings.values()]
    gc.disable()
    try:
        del made
        assert [ref() for ref in outputs] == [None] * len(outputs)
    finally:
        gc.enable()


def test_an_abort_while_the_step_runs():
    """The row of an aborted sequence is dropped when its token arrives; the others' answers are their own."""
    prompts = some_prompts(3)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    made = engine(async_scheduling=True, recorded=True)
    requests = [made.add_request(prompt, greedy) for prompt in prompts]
    for _ in range(4):
        made.step()
    made.abort(requests[1])
    assert len(requests[1].samples[0].seq.completion_token_ids) == 3  # the fourth was under way
    while made.has_unfinished_requests():
        made.step()
    alone = answers(engine(async_scheduling=False), prompts, [greedy] * 3)
    assert [requests[i].samples[0].seq.completion_token_ids for i in (0, 2)] == [alone[0], alone[2]]


def test_a_failing_launch_loses_no_token(monkeypatch):
    """The step that was under way is taken in, the failed one is computed again."""
    prompts, params = some_prompts(4), [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)] * 4
    made = engine(async_scheduling=True)
    requests = [made.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    launch, calls = made.runner.launch, []

    def fail_sometimes(batch, sampling):
        calls.append(batch)
        if len(calls) in (2, 5, 6):
            raise MemoryError("no room")
        return launch(batch, sampling)

    monkeypatch.setattr(made.runner, "launch", fail_sometimes)
    for _ in range(60):
        try:
            made.step()
        except MemoryError:
            made.block_manager.check_integrity()
    found = [request.samples[0].seq.completion_token_ids for request in requests]
    assert found == answers(engine(async_scheduling=False), prompts, params)


def test_samples_of_one_prompt_ahead():
    several = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=8)
    texts = [
        [
            [o.text for o in one.outputs]
            for one in LLM(STORYTELLER, async_scheduling=ahead, device="cpu").generate(
                ["Once upon a time", "The fox"], several, use_tqdm=False
            )
        ]
        for ahead in (False, True)
    ]
    assert texts[0] == texts[1]


def test_logprobs_ahead():
    asking = SamplingParams(temperature=0, logprobs=2, max_tokens=6)
    found = [
        LLM(STORYTELLER, async_scheduling=ahead, device="cpu").generate(["The fox", "A dog"], asking, use_tqdm=False)
        for ahead in (False, True)
    ]
    for one, other in zip(*found, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)


def test_the_host_lets_go_of_a_buffer_only_after_two_steps():
    import numpy as np

    buffers = StepBuffers(64, torch.device("cpu"))
    first, second = np.arange(4, dtype=np.int64), np.arange(4, 8, dtype=np.int64)
    buffers.send({"a": first})
    kept = buffers.hosts[0]
    buffers.send({"a": second})
    assert kept[:32].numpy().view(np.int64).tolist() == [0, 1, 2, 3]
    assert buffers.views({"a": second})["a"].tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="64 bytes"):
        buffers.send({"a": first, "b": second, "c": first})


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(9, 40), st.integers(4, 30), st.integers(1, 4))
def test_any_traffic(seed, blocks, budget, most):
    """Random prompts, lengths, pools and budgets: ahead, recorded and fused equals in turn, eager and plain."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    prompts = some_prompts(count, longest=min(20, blocks * 4 - 8), seed=seed)
    if draw.random() < 0.5:
        prompts = [prompts[0] + p[:4] for p in prompts]  # shared prefixes
    params = [
        SamplingParams(temperature=draw.choice([0, 0.8]), seed=i, max_tokens=draw.randint(1, 12)) for i in range(count)
    ]
    options = {"num_kvcache_blocks": blocks, "max_num_batched_tokens": budget, "max_num_seqs": most}
    plain = answers(engine(async_scheduling=False, **options), prompts, params)
    made = engine(async_scheduling=True, fused_kernels=True, recorded=True, **options)
    assert answers(made, prompts, params) == plain


def test_scheduling_ahead_keeps_the_blocks_of_a_sequence_until_its_last_token_arrived():
    from minivllm.config import SchedulerConfig
    from minivllm.core.scheduler import Scheduler
    from minivllm.core.sequence import Sequence

    scheduler = Scheduler(SchedulerConfig(2, 8, 64), BlockManager(4, 4))
    seq = Sequence(0, [5, 6, 7], max_tokens=1)
    scheduler.add(seq)
    batch = scheduler.schedule()
    scheduler.advance(batch)
    assert scheduler.schedule().rows == [] and scheduler.block_manager.num_free_blocks == 3
    assert scheduler.settle(batch, [9]) == [seq]
    assert seq.token_ids == [5, 6, 7, 9] and scheduler.block_manager.num_free_blocks == 4
