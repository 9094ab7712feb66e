"""The interface: four forms of prompts, refusals that name what is wrong, streams, interrupts, metrics, models."""

import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_all_free, greedy, make_engine, make_llm, storyteller, ties_in

import minivllm
from minivllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from minivllm.config import ConfigError, EngineConfig
from minivllm.core.scheduler import RequestError
from minivllm.engine import memory
from minivllm.engine.llm_engine import LLMEngine, pick_dtype
from minivllm.kernels import backends, reference
from minivllm.kernels.backends import AttentionBackend, BackendError
from minivllm.llm import ChatTemplateError
from minivllm.sampling_params import SamplingParamsError
from minivllm.utils.loader import ModelNotFoundError, WeightsError, find_model
from minivllm.utils.prompts import PromptError

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = [0, 641, 585, 259, 448]  # "Once upon a time"


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_names_and_defaults_are_those_of_vllm() -> None:
    ours = {name: p.default for name, p in inspect.signature(SamplingParams).parameters.items()}
    assert ours["temperature"] == ours["top_p"] == ours["repetition_penalty"] == 1.0
    assert (ours["n"], ours["top_k"], ours["max_tokens"], ours["min_tokens"], ours["seed"]) == (1, 0, 16, 0, None)
    fields = ["index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"]
    assert list(CompletionOutput.__dataclass_fields__) == fields
    config = EngineConfig(model="")
    assert (config.gpu_memory_utilization, config.block_size, config.enable_prefix_caching) == (0.9, 16, True)


def test_llm_without_arguments_tells_a_story() -> None:
    [output] = LLM().generate("Once upon a time", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == PROMPT and output.prompt == "Once upon a time"
    assert not ties_in(output.outputs[0].token_ids, tuple(PROMPT), 6)
    assert output.finished and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompts",
    [
        "Once upon a time",
        PROMPT,
        {"prompt_token_ids": PROMPT},
        {"prompt": "Once upon a time"},
        [PROMPT],
        ["Once upon a time"],
    ],
    ids=["text", "ids", "dict-ids", "dict-text", "list-of-ids", "list-of-text"],
)
def test_a_prompt_in_every_form(prompts: object) -> None:
    [output] = make_llm().generate(prompts, GREEDY, use_tqdm=False)
    assert tuple(output.outputs[0].token_ids) == greedy(tuple(PROMPT), 6).tokens


def test_many_prompts_each_with_its_own_parameters() -> None:
    lengths = [1, 4, 2]
    params = [replace(GREEDY, max_tokens=n) for n in lengths]
    outputs = make_llm().generate(["The fox", PROMPT, {"prompt": "A king"}], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == ["The fox", None, "A king"]


def test_no_prompts_give_no_answers() -> None:
    assert make_llm().generate([], GREEDY) == []


BAD_PROMPTS = [
    ([[]], PromptError, "no tokens", "vLLM#7283"),
    ({"prompt_token_ids": []}, PromptError, "no tokens", "vLLM#7632"),
    ([5, 4096], PromptError, "4096: ids go from 0 to 4095", "beyond-vocabulary"),
    ([5, -1], PromptError, "-1: ids go from 0", "negative-id"),
    ([0] * 64, RequestError, "64 tokens .* 64 tokens", "max_model_len[vLLM#904]"),
    ([0] * 100, RequestError, "100 tokens", "beyond-max_model_len[vLLM#40302]"),
    (3.5, PromptError, "3.5", "no-prompt"),
    ({"text": "x"}, PromptError, "None", "unknown-key"),
    ([[1, "a"]], PromptError, "'a'", "mixed"),
]


@pytest.mark.parametrize(("bad", "error", "match"), [case[:3] for case in BAD_PROMPTS], ids=[c[3] for c in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_and_the_others_are_served(bad: object, error: type, match: str) -> None:
    llm = make_llm(max_model_len=64, num_kvcache_blocks=8)
    engine = llm.llm_engine
    other = engine.add_request(PROMPT, GREEDY)
    engine.step()
    with pytest.raises(error, match=match) as caught:
        llm.generate(bad, GREEDY, use_tqdm=False)
    assert isinstance(caught.value, ValueError)
    while engine.has_unfinished_requests():
        engine.step()
    assert not ties_in(other.output().outputs[0].token_ids, tuple(PROMPT), 6)
    assert_all_free(engine)


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(RequestError, match=r"2 blocks of 4 \(8 tokens\)"):
        make_engine(num_kvcache_blocks=2, block_size=4).add_request(list(range(1, 9)), GREEDY)


def test_one_bad_prompt_among_many_queues_none() -> None:
    llm = make_llm()
    with pytest.raises(PromptError):
        llm.generate([PROMPT, [9999], PROMPT], GREEDY, use_tqdm=False)
    assert_all_free(llm.llm_engine)


def test_parameters_must_match_prompts_in_number() -> None:
    with pytest.raises(SamplingParamsError, match="3 prompts, but 2"):
        make_llm().generate([PROMPT] * 3, [GREEDY] * 2)


def test_stop_token_outside_the_vocabulary() -> None:
    with pytest.raises(SamplingParamsError, match="4096"):
        make_engine().add_request(PROMPT, replace(GREEDY, stop_token_ids=[4096]))


BAD_OPTIONS = [
    ({"dtype": "float8"}, ConfigError, "float8"),
    ({"kv_cache_dtype": "fp8"}, ConfigError, "fp8"),
    ({"attention_backend": "flash"}, BackendError, "flash"),
    ({"gpu_memory_utilization": 1.5}, ConfigError, "1.5"),
    ({"block_size": 0}, ConfigError, "block_size"),
    ({"num_kvcache_blocks": 0}, ConfigError, "num_kvcache_blocks"),
    ({"max_model_len": 5000}, ConfigError, "5000 .* 1024"),
    ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
    ({"tensor_parallel": 2}, ConfigError, "tensor_parallel"),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD_OPTIONS, ids=[next(iter(o)) for o, _, _ in BAD_OPTIONS])
def test_a_bad_option_is_refused_by_name(options: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        LLM(**options)
    assert isinstance(caught.value, ValueError)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    shutil.copy(minivllm.STORYTELLER / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        LLM(tmp_path)


def test_a_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return str(minivllm.STORYTELLER)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("someone/some-model") == minivllm.STORYTELLER and asked == ["someone/some-model"]


@pytest.mark.parametrize("name", ["no/such/model", "someone/some-model", "bad name"])
def test_a_model_that_cannot_be_had(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def offline(name: str, **options: object) -> str:
        return real(name, local_files_only=True, **options)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match=name):
        find_model(name)


# Stops


@pytest.mark.parametrize("eos", [12, 420], ids=["first", "second"])  # vLLM#4180: a list of which one id was kept
def test_each_end_token_of_the_model_ends_the_answer(eos: int) -> None:
    model, tokenizer = storyteller()
    config = model.config
    model.config = replace(config, eos_token_ids=(12, 420) if eos == 12 else (9, 420))
    try:
        engine = LLMEngine(EngineConfig(model="", num_kvcache_blocks=64), model, tokenizer)
        request = engine.add_request(PROMPT, GREEDY)
        kept = engine.add_request(PROMPT, replace(GREEDY, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        model.config = config
    expected = greedy(tuple(PROMPT), 6).tokens
    answer = request.output().outputs[0]
    assert answer.token_ids == list(expected[: expected.index(eos) + 1]) and answer.finish_reason == "stop"
    assert len(kept.output().outputs[0].token_ids) == 6


def test_the_token_that_ends_an_answer_is_not_in_its_text() -> None:  # mini-sglang 21f19c0
    params = replace(GREEDY, stop_token_ids=[420], skip_special_tokens=False)
    [answer] = make_llm().generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert answer.token_ids[-1] == 420 and answer.text == "," and answer.stop_reason == 420


def test_min_tokens_holds_the_end_off() -> None:
    params = replace(GREEDY, stop_token_ids=[12], min_tokens=3)
    [answer] = make_llm().generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert 12 not in answer.token_ids[:3] and len(answer.token_ids) >= 3


def test_a_stop_string_ends_the_answer_and_frees_its_blocks() -> None:
    llm = make_llm()
    whole = texts(llm.generate("Once upon a time", replace(GREEDY, max_tokens=30), use_tqdm=False))[0]
    params = replace(GREEDY, max_tokens=30, stop=["girl na", "unheard of"])
    [answer] = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert answer.text == whole[: whole.index("girl na")]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "girl na")
    assert len(answer.token_ids) < 30
    assert_all_free(llm.llm_engine)


def test_a_stop_string_in_the_very_last_token() -> None:
    params = replace(GREEDY, max_tokens=2, stop=[" there"])
    [answer] = make_llm().generate("Once upon a time", params, use_tqdm=False)[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (",", "stop", " there")


@pytest.mark.parametrize("stop", [None, "girl na"], ids=["plain", "stop"])
def test_a_stream_is_the_answer_in_pieces(stop: str | None) -> None:
    llm, params = make_llm(), SamplingParams(temperature=0.8, seed=3, max_tokens=25, stop=stop)
    pieces = list(llm.stream("Once upon a time", params))
    assert len(pieces) > 2 and "".join(pieces) == texts(llm.generate("Once upon a time", params, use_tqdm=False))[0]
    assert_all_free(llm.llm_engine)


def test_streams_side_by_side_and_one_that_is_left() -> None:
    llm = make_llm()
    alone = ["".join(llm.stream(text, GREEDY)) for text in ("The fox", "A king")]
    fox, king, left = (llm.stream(text, GREEDY) for text in ("The fox", "A king", "One day"))
    told = ["", ""]
    next(left)
    for a, b in zip(fox, king, strict=True):
        told = [told[0] + a, told[1] + b]
    left.close()
    assert told == alone
    assert_all_free(llm.llm_engine)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "dropped"])
def test_a_stream_that_is_left_before_its_first_piece(closed: bool) -> None:
    llm = make_llm()
    stream = llm.stream("The fox", GREEDY)
    assert llm.llm_engine.has_unfinished_requests()
    if closed:
        stream.close()
    del stream
    assert not llm.llm_engine.has_unfinished_requests()
    assert_all_free(llm.llm_engine)


def test_a_stream_refuses_at_once() -> None:
    with pytest.raises(PromptError):
        make_llm().stream([])
    with pytest.raises(SamplingParamsError, match="n is 2"):
        make_llm().stream("x", SamplingParams(n=2))


# Randomness


def crowd(engine: LLMEngine, count: int) -> None:
    for number in range(count):
        engine.add_request(f"The {number}", SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True))


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, 0),
        ({}, 7),
        ({"block_size": 4, "num_kvcache_blocks": 12}, 5),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 3}, 4),
    ],
    ids=["alone", "batch[vLLM#51226]", "preempted", "chunked"],
)
def test_a_seeded_answer_depends_on_nothing_else(options: dict, others: int) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True)
    expected = make_llm().generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids
    engine = make_engine(**options)
    crowd(engine, others)
    request = engine.add_request("Once upon a time", params)
    while engine.has_unfinished_requests():
        engine.step()
    assert request.output().outputs[0].token_ids == expected
    assert "num_kvcache_blocks" not in options or engine.scheduler.num_preemptions > 0


def test_seeds_differ_and_unseeded_requests_differ() -> None:  # aprender#2027: the batched path was greedy
    params = [SamplingParams(seed=seed, max_tokens=4) for seed in range(50)] + [SamplingParams(max_tokens=4)] * 50
    outputs = make_llm().generate([PROMPT] * 100, params, use_tqdm=False)
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(answers[:50])) > 8 and len(set(answers[50:])) > 8


def test_the_engine_seed_repeats_unseeded_answers() -> None:
    params = SamplingParams(max_tokens=8)
    told = [texts(make_llm(seed=seed).generate(["The fox"] * 3, params, use_tqdm=False)) for seed in (5, 5, 6)]
    assert told[0] == told[1] != told[2]


def test_n_answers_share_the_prompt() -> None:
    llm = make_llm(block_size=4)
    [output] = llm.generate(PROMPT * 4, SamplingParams(n=4, seed=1, max_tokens=6), use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    assert llm.llm_engine.metrics.num_computed_tokens < 20 + 4 * 6 + 4, "the prompt is computed once"
    assert_all_free(llm.llm_engine)


def test_logprobs() -> None:
    params = replace(GREEDY, logprobs=2, repetition_penalty=1.3)
    [answer] = make_llm().generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert len(answer.logprobs) == 6 and all(2 <= len(found) <= 3 for found in answer.logprobs)
    chosen = [found[token] for found, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    model, _ = storyteller()
    ids = torch.tensor(PROMPT + answer.token_ids)
    expected = model.compute_logits(model(ids, torch.arange(len(ids)))).log_softmax(-1)
    for place, (one, token) in enumerate(zip(chosen, answer.token_ids, strict=True)):
        assert one.logprob == pytest.approx(float(expected[len(PROMPT) - 1 + place, token]), abs=1e-4)
    assert chosen[0].decoded_token == ","


# A life with interruptions


def test_ctrl_c_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    launch, steps = llm.llm_engine.runner.launch, []

    def interrupted(*step: object) -> object:
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)  # in the middle of a step
        return launch(*step)

    monkeypatch.setattr(llm.llm_engine.runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The fox", "A king"], replace(GREEDY, max_tokens=50), use_tqdm=False)
    assert len(steps) == 3
    assert_all_free(llm.llm_engine)
    assert not ties_in(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids, tuple(PROMPT), 6)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_fails_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(block_size=4)
    request = engine.add_request(PROMPT, SamplingParams(n=2, temperature=0, max_tokens=6))
    launch, failures = engine.runner.launch, iter([False, True, False, True] + [False] * 50)

    def out_of_memory(*step: object) -> object:
        if next(failures):
            raise RuntimeError("out of memory")
        return launch(*step)

    monkeypatch.setattr(engine.runner, "launch", out_of_memory)
    failed = 0
    while engine.has_unfinished_requests():
        try:
            engine.step()
        except RuntimeError:
            failed += 1
        engine.block_manager.check_integrity()
    assert failed == 2
    assert all(not ties_in(answer.token_ids, tuple(PROMPT), 6) for answer in request.output().outputs)
    assert_all_free(engine)


def test_two_engines_in_one_process() -> None:
    first, second = make_llm(block_size=4), make_llm(enable_prefix_caching=False)
    expected = "".join(first.stream("The fox", GREEDY))
    pieces = zip(first.stream("The fox", GREEDY), second.stream("The fox", GREEDY), strict=True)
    assert "".join(b for _, b in pieces) == expected


def test_metrics_of_a_request_and_of_the_engine() -> None:
    llm = make_llm(block_size=4)
    for cached in (0, 8):
        [output] = llm.generate([PROMPT + PROMPT], GREEDY, use_tqdm=False)
        metrics = output.metrics
        assert metrics.num_cached_tokens == cached and metrics.num_generated_tokens == 6
        assert 0 <= metrics.queue_time <= metrics.ttft <= metrics.e2e_latency
        assert metrics.tpot * 5 == pytest.approx(metrics.e2e_latency - metrics.ttft, rel=0.5)
    engine = llm.llm_engine
    assert engine.metrics.num_generated_tokens == 12 and engine.metrics.num_computed_tokens == 10 + 2 + 5 * 2
    assert engine.block_manager.stats.hit_tokens == 8


def test_aborting_a_finished_request_spares_the_next_one_of_that_id() -> None:
    engine = make_llm().llm_engine
    old = engine.add_request("The fox", GREEDY, "story")
    while engine.has_unfinished_requests():
        engine.step()
    new = engine.add_request("A king", GREEDY, "story")
    engine.abort(old)
    assert engine.has_unfinished_requests() and not new.finished
    while engine.has_unfinished_requests():
        engine.step()
    assert new.output().outputs[0].finish_reason == "length"
    assert_all_free(engine)


# Chat


def test_a_model_without_a_template_does_not_chat() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        make_llm().chat([{"role": "user", "content": "Hi"}])


def test_chat_follows_the_template() -> None:
    llm = make_llm()
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if loud %}!{% endif %}"
    try:
        message = [{"role": "user", "content": "Once upon a time"}]
        [one] = llm.chat(message, GREEDY, use_tqdm=False)
        many = llm.chat([message, message], GREEDY, use_tqdm=False, loud=True)
    finally:
        tokenizer.chat_template = None
    assert one.prompt_token_ids[-4:] == PROMPT[1:]
    assert len(many) == 2 and many[0].prompt_token_ids[-1] == tokenizer.encode("!")[-1]


# Memory


def test_what_other_processes_hold_is_not_ours() -> None:  # nanovllm-voxcpm#27, nano-vllm#51
    gib = 2**30
    assert memory.gpu_budget(total=80 * gib, free=78 * gib, weights=2 * gib, utilization=0.9) == 72 * gib
    assert memory.gpu_budget(total=80 * gib, free=22 * gib, weights=2 * gib, utilization=0.9) == 24 * gib


def test_no_memory_is_said_with_sizes_and_knobs(monkeypatch: pytest.MonkeyPatch) -> None:  # vLLM#2248, vLLM#31418
    monkeypatch.setattr(memory, "cpu_budget", lambda: 1000)
    with pytest.raises(ConfigError, match=r"no memory is left .* gpu_memory_utilization"):
        make_engine(num_kvcache_blocks=None)


def test_a_cpu_engine_counts_its_blocks() -> None:  # transformers#42869
    engine = make_engine(num_kvcache_blocks=None, max_num_seqs=2, max_model_len=100)
    assert engine.block_manager.num_blocks == 2 * 7, "as many as two sequences of 100 tokens can ever need"


def test_the_widest_step_is_as_wide_as_the_scheduler_may_make_it() -> (
    None
):  # nano-vllm#39: max_model_len above the budget
    for limit in (100, 512, 4096):
        batch, num_blocks = memory.widest_batch(EngineConfig(model="", max_num_batched_tokens=512), limit)
        assert batch.num_tokens == 512 and max(row.end for row in batch.rows) <= limit
        assert sum(len(row.block_table) for row in batch.rows) <= num_blocks


def test_the_profiling_pass_runs_the_widest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a stand-in for the counters of torch.cuda that a model on a GPU would move."""
    counters = {"memory_allocated": iter([100, 140]), "max_memory_allocated": iter([175])}
    for name, values in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, values=values: next(values))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    seen, model = [], storyteller()[0]
    hook = model.model.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    config = EngineConfig(model="", max_num_batched_tokens=70, max_num_seqs=8)
    try:
        assert memory.measure_peak(model, config, 32, "torch") == (100, 35), "the cache of 40 is not counted"
    finally:
        hook.remove()
    assert seen == [70]


def test_a_number_that_somebody_took_as_an_id_is_passed_over() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=2)
    taken = [engine.add_request([5, 6], params, request_id=name) for name in ("0", "2")]
    free = [engine.add_request([5, 6], params) for _ in range(3)]
    ids = [request.request_id for request in [*taken, *free]]
    assert len(set(ids)) == 5 and ids[:2] == ["0", "2"]


def test_dtype_auto() -> None:
    config = storyteller()[0].config
    assert pick_dtype("auto", config, torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", config, torch.device("cpu")) == torch.float16


# Models and backends


def test_bf16_agrees_with_float32_where_the_choice_is_clear() -> None:  # vLLM#18352
    model = type(storyteller()[0]).from_pretrained(minivllm.STORYTELLER, dtype=torch.bfloat16)
    engine = LLMEngine(EngineConfig(model="", num_kvcache_blocks=64), model, storyteller()[1])
    expected = greedy(tuple(PROMPT), 6)
    request = engine.add_request(PROMPT, GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    for ours, right, lead in zip(request.output().outputs[0].token_ids, expected.tokens, expected.leads, strict=True):
        assert ours == right or lead < 0.5
        if ours != right:
            break


def test_a_hundred_greedy_tokens() -> None:  # vLLM#1069, vLLM#1334
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = make_llm().generate(["Once upon a time", "The fox"], params, use_tqdm=False)
    for output in outputs:
        assert not ties_in(output.outputs[0].token_ids, tuple(output.prompt_token_ids), 100)


def test_the_backend_changes_no_greedy_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> AttentionBackend:
        return AttentionBackend("reference", reference.store_kv, reference.paged_prefill, reference.paged_decode)

    monkeypatch.setitem(backends.BACKENDS, "reference", plain)
    prompts = ["Once upon a time", "The fox", "A king had three daughters, and the"]
    options = {"max_num_batched_tokens": 9, "max_num_seqs": 4, "block_size": 4}
    told = [
        texts(
            make_llm(attention_backend=name, **options).generate(
                prompts, replace(GREEDY, max_tokens=20), use_tqdm=False
            )
        )
        for name in ("torch", "reference")
    ]
    assert told[0] == told[1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has wheels for Linux only")
def test_the_kernels_change_no_greedy_token(tmp_path: Path) -> None:
    """A model of one layer, as the interpreter takes milliseconds for each program of a kernel."""
    save_random_model("qwen3", tmp_path, num_hidden_layers=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    options = {"block_size": 16, "num_kvcache_blocks": 8, "max_num_batched_tokens": 8, "max_num_seqs": 2}
    told = [
        LLM(tmp_path, attention_backend=backend, **options).generate([[5, 6, 7], [9] * 6], params, use_tqdm=False)
        for backend in ("torch", "triton")
    ]
    assert [o.outputs[0].token_ids for o in told[0]] == [o.outputs[0].token_ids for o in told[1]]


SMALL = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


def save_random_model(name: str, folder: Path, **sizes: int) -> Any:
    """A small model of an architecture with random weights, saved to the folder; returns transformers' model."""
    import transformers

    family, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra, **sizes}, eos_token_id=1, bos_token_id=0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():  # random biases too, and logits that differ
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_answers_like_transformers(name: str, tmp_path: Path) -> None:
    model = save_random_model(name, tmp_path)
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(tmp_path, block_size=4, num_kvcache_blocks=40, max_num_batched_tokens=16, max_num_seqs=4)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
        assert output.outputs[0].text == "", "this folder has no tokenizer"
    with pytest.raises(PromptError, match="no tokenizer"):
        llm.generate("text", params)


def test_the_terminal_program_streams(capsys: pytest.CaptureFixture[str]) -> None:
    from minivllm.__main__ import main

    assert main(["Once upon a time", "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time, there was")
    assert main(["Once upon a time", "--top-p", "7"]) == 2
    assert "top_p" in capsys.readouterr().err


def test_the_default_model_is_in_the_package() -> (
    None
):  # nano-vllm#181, nano-vllm#112: import with torch and triton only
    assert json.loads((minivllm.STORYTELLER / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(minivllm.__all__)


def test_importing_the_engine_loads_neither_transformers_nor_the_hub() -> None:
    """An engine for token ids needs torch alone; the rest is loaded where it is used."""
    code = (
        "import sys; from minivllm import LLM; print({'transformers', 'huggingface_hub', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_cpu_engine_is_modest() -> None:
    engine = make_engine(num_kvcache_blocks=None)
    assert engine.block_manager.num_blocks <= memory.CPU_SEQUENCES * 64, "1024 tokens are 64 blocks"
    assert engine.block_manager.num_blocks * engine.runner.kv_cache.bytes_per_block <= memory.cpu_budget()
