"""Measure the whole engine on a GPU: what chapter 10 draws. Answers are checked before anything is timed.

    python tools/bench_throughput.py --out figures/data/throughput_h200.json [--only equality yardstick …]

The model has the shape of Qwen3-0.6B and random weights, whose values do not change the speed. Text has no meaning
then, so equality is checked on the storyteller and on a small random Qwen3. Rates count output tokens.
"""

import argparse
import datetime
import gc
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.config import ModelConfig
from minivllm.core.sequence import Sequence
from minivllm.engine.cuda_graphs import bucket_for
from minivllm.engine.fast_runner import FastRunner
from minivllm.engine.llm_engine import LLMEngine
from minivllm.kernels import fused, launch, paged_decode
from minivllm.layers.sampler import SamplingRow
from minivllm.llm import collector_paused
from minivllm.model.qwen3 import Qwen3, default_dtype

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SMALL = QWEN3_06B | {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 16_384}
Result = dict[str, Any]
DEVICE = "cuda"

# Each version is the one before it and one more change; together they are the waterfall.
VERSIONS: dict[str, dict[str, bool]] = {}
SWITCHES: dict[str, bool] = {}
for label, switch in {
    "chapter 09 on a GPU": "",
    "+ CUDA graphs": "graphs",
    "+ fused kernels, packed weights": "fused",
    "+ streaming products, batch ≤ 4": "gemv",
    "+ kernels that start early": "early",
    "+ sampler in one kernel": "sampler",
    "+ the next step launched ahead": "ahead",
}.items():
    SWITCHES = {**SWITCHES, switch: True}
    VERSIONS[label] = SWITCHES
BEST = SWITCHES


def save_model(config: dict[str, Any], folder: Path) -> Path:
    """A model folder with random weights of unit gain, as Hugging Face folders are laid out."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    with default_dtype(getattr(torch, config["dtype"])), torch.device(DEVICE):
        model = Qwen3(ModelConfig.from_dict(config))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif "norm" not in name:
            torch.nn.init.normal_(weight, std=0.02)
    weights = {name: weight.data.contiguous().cpu() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    return folder


def cache_options() -> dict[str, int]:
    """40,000 blocks (73 GB) where the card is large enough, so that runs on such cards compare; else what fits."""
    return {"num_kvcache_blocks": 40_000} if torch.cuda.mem_get_info()[1] > 100e9 else {}


@contextmanager
def version(folder: Path | str, switches: dict[str, bool], **options: Any) -> Iterator[LLM]:
    """An engine with some of the changes switched off, gone again after the block."""
    most, samples_fast, early = fused.MOST_GEMV_ROWS, FastRunner.samples_fast, launch.early_launch
    fused.MOST_GEMV_ROWS = most if switches.get("gemv") else 0
    if not switches.get("sampler"):
        FastRunner.samples_fast = property(lambda runner: False)
    if not switches.get("early"):
        fused.early_launch = paged_decode.early_launch = lambda: {"EARLY": False}
    llm = None
    try:
        llm = LLM(
            str(folder),
            enforce_eager=not switches.get("graphs"),
            fused_kernels=bool(switches.get("fused")),
            async_scheduling=bool(switches.get("ahead")),
            **(OPTIONS | cache_options() | options),
        )
        yield llm
    finally:
        fused.MOST_GEMV_ROWS, FastRunner.samples_fast = most, samples_fast
        fused.early_launch = paged_decode.early_launch = early
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def prompts_of(lengths: list[int], seed: int = 0, highest: int = 10_000) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(0, highest) for _ in range(length)] for length in lengths]


def answers(llm: LLM, prompts: list[list[int]], lengths: list[int], temperature: float) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)
    ]
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def check_equality(folder: Path) -> Result:
    """The same tokens from every version, greedy and with seeds, in float32; and how far bfloat16 agrees."""
    found: Result = {}
    lengths = [7, 120, 33, 64, 5, 90, 17, 40, 61, 80, 12]
    for name, model in (
        ("storyteller", minivllm.STORYTELLER),
        ("small random Qwen3", save_model(SMALL, folder / "small")),
    ):
        prompts = prompts_of([9, 70, 1, 16, 33, 128, 5, 17, 64, 2, 40], highest=990)
        for dtype in ("float32", "bfloat16"):
            options = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": 12, "max_num_batched_tokens": 100}
            runs = {}
            tried = VERSIONS if dtype == "float32" else {"readable": {}, "finished": BEST}
            for label, switches in tried.items():
                with version(model, switches, **options, num_kvcache_blocks=400) as llm:
                    runs[label] = [answers(llm, prompts, lengths, temperature) for temperature in (0.0, 0.8)]
            first = next(iter(runs.values()))
            same = {label: [share_equal(a, b) for a, b in zip(first, run, strict=True)] for label, run in runs.items()}
            found[f"{name}, {dtype}"] = same
            if dtype == "float32":
                assert all(share == 1.0 for shares in same.values() for share in shares), (name, same)
    return found


def share_equal(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first difference of their answer."""
    equal = total = 0
    for a, b in zip(one, other, strict=True):
        total += len(a)
        equal += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return equal / total


@contextmanager
def decoding(llm: LLM, batch: int, prompt: int, tokens: int, **wanted: Any) -> Iterator[LLMEngine]:
    """The engine with `batch` sequences that all decode; they are gone again after the block."""
    engine = llm.llm_engine
    params = SamplingParams(**{"temperature": 0.6, "max_tokens": tokens, "ignore_eos": True} | wanted)
    requests = [engine.add_request(p, params) for p in prompts_of([prompt] * batch, seed=batch + prompt)]
    while any(len(request.samples[0].seq.completion_token_ids) < 8 for request in requests):
        engine.step()
    torch.cuda.synchronize()
    with collector_paused():  # as in `generate`
        yield engine
    for request in requests:
        engine.abort(request)
    engine._settle()


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Seconds of one call, from the first launch to the end of the last kernel."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def decode_steps(llm: LLM, batch: int, prompt: int, steps: int, **wanted: Any) -> Result:
    """Milliseconds of a decode step with `batch` sequences, contexts from `prompt` to `prompt` + `steps`."""
    with decoding(llm, batch, prompt, steps + 64, **wanted) as engine:
        seconds = seconds_of(engine.step, steps)
    return {"ms": 1e3 * seconds, "tok_s": batch / seconds, "mean_context": prompt + 8 + steps / 2}


def launch_overhead(llm: LLM, batch: int, prompt: int, steps: int = 200) -> Result:
    """How much of a step the device waits: for the host, and between its kernels.

    device_ms: the same step's device work (inputs in, recording, sampler, tokens out) enqueued again and again with the
    host far ahead, so that the device never waits for it. busy_ms, span_ms: of this work under PyTorch's profiler, the
    time of a step in which at least one kernel or copy is on the device, and the step.
    """
    with decoding(llm, batch, prompt, steps + 100) as engine:
        step = seconds_of(engine.step, steps)
        again = same_device_work(engine.runner, batch)
        device = seconds_of(again, steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            seconds_of(again, 50)
    busy, span = busy_and_span(profile)
    return {
        "step_ms": 1e3 * step, "device_ms": 1e3 * device, "host_share": 1 - device / step,
        "busy_ms": busy / 50e3, "span_ms": span / 50e3, "gap_share": 1 - busy / span,
    }  # fmt: skip


def same_device_work(runner: FastRunner, batch: int) -> Callable[[], object]:
    """What the device does in the last recorded step, without the host's part of it."""
    recording, inputs = runner.recordings[bucket_for(batch, runner.sizes)]
    sampling = [SamplingRow(Sequence(i, [0]), SamplingParams(temperature=0.6), seed=i) for i in range(batch)]
    host, end = runner.buffers.hosts[0], sum(-(-x.nbytes // 16) * 16 for x in inputs.values())

    def work() -> object:
        runner.buffers.device[:end].copy_(host[:end], non_blocking=True)
        recording.replay()
        return runner.choose(recording.output[:batch], sampling, inputs, drawn=True)

    return work


def busy_and_span(profile: torch.profiler.profile) -> tuple[float, float]:
    """Microseconds in which at least one event was under way on the device, and from the first to the last of them."""
    on_device = [e.time_range for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((span.start, span.end) for span in on_device)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - spans[0][0]


def host_share(llm: LLM, batch: int, prompt: int, steps: int) -> Result:
    """What a step costs the host alone: the same calls with the model's part left out."""
    runner = llm.llm_engine.runner
    replay, eager = FastRunner._replay, FastRunner._run_eagerly
    try:
        sizes, runner.sizes = runner.sizes, []
        logits = torch.zeros(batch, 8, device=DEVICE)

        def nothing(self: FastRunner, one: Any, sampling: Any) -> Any:
            arrays = self.lay_out_step(one, sampling, len(one.rows))
            self.buffers.send(arrays)
            return self.buffers.views(arrays), logits[: len(sampling)]

        FastRunner._replay = FastRunner._run_eagerly = nothing
        return decode_steps(llm, batch, prompt, steps)
    finally:
        FastRunner._replay, FastRunner._run_eagerly, runner.sizes = replay, eager, sizes


def yardstick_load() -> tuple[list[list[int]], list[SamplingParams]]:
    """256 requests, prompts and answers of 100 to 1024 tokens, drawn as nano-vllm's benchmark draws them."""
    random.seed(0)
    prompts = [[random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, 1024)) for _ in range(256)
    ]
    return prompts, params


def fresh(prompts: list[list[int]], salt: int) -> list[list[int]]:
    """The same lengths, other tokens: no run may find its prompts in the prefix cache."""
    return [[(token + 1 + salt * 7919) % 10_001 for token in prompt] for prompt in prompts]


def timed_generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], runs: int) -> Result:
    """Output tokens per second: the median of some runs after one that is not counted."""
    seconds, tokens = [], sum(one.max_tokens for one in params)
    for run in range(runs + 1):
        mine = fresh(prompts, run)
        torch.cuda.synchronize()
        start = time.perf_counter()
        outs = llm.generate(mine, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert sum(len(out.outputs[0].token_ids) for out in outs) == tokens
    median = statistics.median(seconds[1:])
    return {
        "tok_s": tokens / median, "seconds": median, "all_seconds": seconds, "output_tokens": tokens,
        "prompt_tokens": sum(map(len, prompts)),
    }  # fmt: skip


def profile_steps(llm: LLM, batch: int, prompt: int, steps: int = 8) -> Result:
    """Microseconds of GPU time per step by kernel name, from PyTorch's profiler; `ms`: of steps just before it."""
    with decoding(llm, batch, prompt, 200) as engine:
        ms = 1e3 * seconds_of(engine.step, 3 * steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            seconds_of(engine.step, steps)
    return {"ms": ms, **per_step(profile, steps)}


def profile_prefill(llm: LLM) -> Result:
    """The same for steps of 16 prompts of 1,024 tokens."""
    engine = llm.llm_engine
    for prompt in prompts_of([1024] * 64, seed=9):
        engine.add_request(prompt, SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        while engine.has_unfinished_requests():
            engine.step()
        torch.cuda.synchronize()
    return per_step(profile, 4)


def per_step(profile: torch.profiler.profile, steps: int) -> Result:
    """{kernel: [microseconds, launches]} of one step, the dearest first."""
    rows = {e.key[:90]: [e.self_device_time_total / steps, e.count / steps] for e in profile.key_averages()}
    return {"us_and_launches": {k: v for k, v in sorted(rows.items(), key=lambda kv: -kv[1][0]) if v[0] > 0}}


def ceilings() -> Result:
    """What the card reaches with nothing else to do: reading, and multiplying matrices."""
    from triton.testing import do_bench

    x = torch.randint(0, 2**31 - 1, (2**30,), dtype=torch.int32, device="cuda")
    copy = do_bench(lambda: torch.bitwise_not(x, out=x), return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product = do_bench(lambda: a @ b, return_mode="median")
    return {"copy_gb_s": 2 * x.nbytes / copy / 1e6, "matmul_tflop_s": 2 * 8192**3 / product / 1e9}


class Bench:
    """The sections of the measurement; each is a method and gives a dict."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: Path | None = None

    @property
    def model(self) -> Path:
        self._model = self._model or save_model(QWEN3_06B, self.folder / "qwen3-0.6b")
        return self._model

    def ceilings(self) -> Result:
        return ceilings()

    def equality(self) -> Result:
        return check_equality(self.folder)

    def startup(self) -> Result:
        """Seconds from weights on disk to the first token, graphs recorded; Triton's cache as it is found."""
        model = self.model
        start = time.perf_counter()
        llm = LLM(str(model), max_model_len=4096, max_num_batched_tokens=16_384)
        loaded = time.perf_counter()
        answers(llm, prompts_of([128]), [1], 0.0)
        end = time.perf_counter()
        blocks = llm.llm_engine.block_manager.num_blocks
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        return {"engine_s": loaded - start, "first_token_s": end - loaded, "total_s": end - start, "blocks": blocks}

    def best(self) -> Result:
        """The finished engine on all loads but the yardstick."""
        found: Result = {}
        with version(self.model, BEST) as llm:
            one = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True)
            found["batch 1, prompt 128, output 512, greedy"] = timed_generate(llm, prompts_of([128]), [one], 3)
            found["batch 256, context 144"] = decode_steps(llm, 256, 16, 240)
            found["batch 256, context 1152"] = decode_steps(llm, 256, 1024, 240)
            first = [SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True)] * 256
            found["prefill 256 x 1024"] = timed_generate(llm, prompts_of([1024] * 256), first, 3)
            found["host, batch 256"] = host_share(llm, 256, 100, 100)
            found["host, batch 1"] = host_share(llm, 1, 100, 100)
        return found

    def yardstick(self) -> Result:
        with version(self.model, BEST) as llm:
            return timed_generate(llm, *yardstick_load(), 3)

    def profile(self) -> Result:
        """Where a step's time goes. Batch 1 without early starts: with them the profiler's times overlap."""
        return {"batch 1, kernels in turn": self._profile_single(), **self._profile_large()}

    def _profile_single(self) -> Result:
        with version(self.model, BEST | {"early": False}) as llm:
            return profile_steps(llm, 1, 128)

    def _profile_large(self) -> Result:
        with version(self.model, BEST) as llm:
            return {
                "batch 256, context 150": profile_steps(llm, 256, 128),
                "batch 256, context 1122": profile_steps(llm, 256, 1100),
                "prefill 16 x 1024": profile_prefill(llm),
            }

    def overhead(self) -> Result:
        """Launch overhead, as it is and without early starts."""
        return {
            **self._overheads("as it is", BEST),
            **self._overheads("kernels in turn", BEST | {"early": False}),
        }

    def _overheads(self, label: str, switches: dict[str, bool]) -> Result:
        with version(self.model, switches) as llm:
            return {f"{label}, batch {batch}": launch_overhead(llm, batch, 128) for batch in (1, 256)}

    def sampling(self) -> Result:
        """What filters and penalties cost a step."""
        kinds: dict[str, Result] = {
            "temperature": {}, "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95}, "top_p 0.95": {"top_p": 0.95},
            "min_p 0.05": {"min_p": 0.05}, "repetition_penalty 1.1": {"repetition_penalty": 1.1},
            "logprobs 5": {"logprobs": 5},
        }  # fmt: skip
        with version(self.model, BEST) as llm:
            return {
                f"{name}, batch {b}": decode_steps(llm, b, 128, 30, **wanted)["ms"]
                for name, wanted in kinds.items()
                for b in (1, 256)
            }

    def waterfall(self) -> Result:
        return {label: self._decode_rates(switches) for label, switches in VERSIONS.items()}

    def _decode_rates(self, switches: dict[str, bool]) -> Result:
        with version(self.model, switches) as llm:
            return {"batch 1": decode_steps(llm, 1, 128, 100), "batch 256": decode_steps(llm, 256, 64, 100)}

    def tiles(self) -> Result:
        """Other tiles of the decode kernel than chapter 06 chose, and a lone sequence that is not cut."""
        found: Result = {}
        chosen, wanted = paged_decode.decode_tile, paged_decode.programs_wanted
        for keys, warps, stages in ((32, 1, 3), (32, 2, 3), (64, 2, 2), (64, 4, 2), (16, 1, 4)):
            paged_decode.decode_tile = lambda *_, t=(keys, warps, stages): dict(
                zip(("KEYS", "num_warps", "num_stages"), t, strict=True)
            )
            found[f"{keys} keys, {warps} warps, {stages} stages"] = self._tile_rates()
        paged_decode.decode_tile, paged_decode.programs_wanted = chosen, lambda *_: 0
        found["not cut"] = self._tile_rates()
        paged_decode.programs_wanted = wanted
        return found

    def _tile_rates(self) -> Result:
        with version(self.model, BEST) as llm:
            loads = ((1, 96, 100), (256, 94, 100), (256, 1102, 60))
            return {f"batch {b}, context {c + n // 2}": decode_steps(llm, b, c, n)["ms"] for b, c, n in loads}

    def more(self) -> Result:
        """Long prompts, and a prefix that all requests share."""
        return {**self._long_prompts(), **self._shared_prefix()}

    def _long_prompts(self) -> Result:
        with version(self.model, BEST, max_model_len=4352) as llm:
            params = [SamplingParams(temperature=0.6, max_tokens=256, ignore_eos=True)] * 64
            return {
                "batch 64, prompts of 4096, outputs of 256": timed_generate(llm, prompts_of([4096] * 64), params, 2)
            }

    def _shared_prefix(self) -> Result:
        with version(self.model, BEST) as llm:
            (prefix,) = prompts_of([1024], seed=5)
            prompts = [prefix + p for p in prompts_of([64] * 256, seed=6)]
            params = [SamplingParams(temperature=0.6, max_tokens=128, ignore_eos=True)] * 256
            return {"shared prefix of 1024, 256 requests": timed_generate(llm, prompts, params, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[
            "ceilings",
            "equality",
            "startup",
            "best",
            "yardstick",
            "profile",
            "overhead",
            "waterfall",
            "more",
            "sampling",
            "tiles",
        ],
    )
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no further section starts")
    arguments = parser.parse_args()
    start = time.perf_counter()
    about = {
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), "options": OPTIONS | cache_options(),
    }  # fmt: skip
    results: Result = {"about": about, "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name in arguments.only:
            if time.perf_counter() - start > arguments.stop_after:
                results["failed"][name] = "not started: out of time"
                continue
            section: Callable[[], Result] = getattr(bench, name)
            began = time.perf_counter()
            try:
                results[name] = section()
                print(f"{name}: {json.dumps(results[name])[:1500]}", flush=True)
            except Exception as error:
                traceback.print_exc()
                results["failed"][name] = f"{type(error).__name__}: {error}"
                gc.collect()
                torch.cuda.empty_cache()
            print(f"--- {name} took {time.perf_counter() - began:.1f} s", flush=True)
            arguments.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
