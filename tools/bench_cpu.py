#!/usr/bin/env python3
"""The engine against transformers on a CPU: one workload, side by side in one process.

    OMP_NUM_THREADS=2 tools/bench_cpu.py [--requests 64] [--sample 16] [--skip continuous]

(On a machine that is busy with other things, add OMP_WAIT_POLICY=passive: threads that wait for a second thread which
does not get a core spend most of the time, and what is measured is the waiting.)

64 ragged requests to the storyteller in float32, greedy, every answer of exactly the length that was drawn for it.
transformers' `generate` one by one runs a sample of the requests, of which it makes the same number of tokens a second.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import minivllm
from minivllm import LLM, SamplingParams


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the number of tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]

    def first(self, count: int) -> "Workload":
        """The first `count` requests (they are in random order)."""
        return Workload(self.prompts[:count], self.lengths[:count])

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all answers have together."""
        return sum(self.lengths)


def draw_workload(count: int, vocab_size: int, seed: int = 0) -> Workload:
    """Prompts of 16 to 512 tokens, answers of 16 to 256, uniformly."""
    rng = random.Random(seed)
    prompts = [[0, *(rng.randrange(1, vocab_size) for _ in range(rng.randint(16, 512) - 1))] for _ in range(count)]
    return Workload(prompts, [rng.randint(16, 256) for _ in range(count)])


def run_engine(llm: LLM, work: Workload) -> list[list[int]]:
    """The answers of our engine, all requests at once."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.lengths]
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run_one_by_one(model: torch.nn.Module, work: Workload) -> list[list[int]]:
    """transformers' `generate`, a request at a time."""
    answers = []
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def run_padded(model: torch.nn.Module, work: Workload, width: int = 16) -> list[list[int]]:
    """transformers' `generate` in batches padded on the left; each batch runs as long as its longest answer."""
    answers = []
    for start in range(0, len(work.prompts), width):
        prompts, lengths = work.prompts[start : start + width], work.lengths[start : start + width]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": max(lengths), "min_new_tokens": max(lengths), "do_sample": False}
        out = model.generate(ids, attention_mask=mask, **options)
        answers += [row[longest : longest + n].tolist() for row, n in zip(out, lengths, strict=True)]
    return answers


def run_continuous(model: torch.nn.Module, work: Workload) -> list[list[int]]:
    """transformers' own continuous batching. It has one length for all requests: each gets the mean."""
    from transformers import GenerationConfig

    mean = round(work.num_output_tokens / len(work.lengths))
    config = GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config.num_blocks, config.max_batch_tokens = 2048, 2048
    results = model.generate_batch(inputs=work.prompts, generation_config=config, progress_bar=False)
    return [result.generated_tokens for result in results.values()]


def measure(name: str, run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Output tokens per second of a run, and its answers; prints a line."""
    start = time.perf_counter()
    answers = run()
    seconds, tokens = time.perf_counter() - start, sum(map(len, answers))
    print(f"{name:44} {tokens:6,} tokens in {seconds:6.2f} s: {tokens / seconds:7,.0f} tok/s", flush=True)
    return tokens / seconds, answers


class Stopwatch:
    """The seconds that calls of a method take, from now on."""

    def __init__(self, owner: object, name: str) -> None:
        self.seconds, method = 0.0, getattr(owner, name)

        def timed(*arguments: object, **options: object) -> object:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def report_shares(llm: LLM, context: Stopwatch, sampler: Stopwatch) -> None:
    """Where the engine's time went, since it was made."""
    metrics = llm.llm_engine.metrics
    parts = {
        "scheduler": metrics.schedule_seconds,
        "Context": context.seconds,
        "sampler": sampler.seconds + metrics.sample_seconds,
        "model": metrics.model_seconds - context.seconds - sampler.seconds,
    }
    whole = sum(parts.values())
    shares = ", ".join(f"{name} {seconds / whole:.1%}" for name, seconds in parts.items())
    print(f"  {metrics.num_steps} steps: {shares}")


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many answers are the same, token for token."""
    same = sum(a == b for a, b in zip(ours, theirs, strict=False))
    return f"{same} of {min(len(ours), len(theirs))} answers are the same"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--sample", type=int, default=16, help="requests that `generate` runs one by one")
    parser.add_argument("--rounds", type=int, default=1, help="repeat all of it: other programs on the machine disturb")
    parser.add_argument("--skip", nargs="*", default=[], choices=["one", "padded", "continuous"])
    options = parser.parse_args()

    import transformers

    transformers.logging.set_verbosity_error()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(minivllm.STORYTELLER, dtype=torch.float32)
    work, llm = draw_workload(options.requests, theirs.config.vocab_size), LLM(dtype="float32")
    sample = work.first(options.sample)
    run_engine(llm, work.first(2))  # warm-up
    runner = llm.llm_engine.runner
    context, sampler = Stopwatch(runner, "lay_out_step"), Stopwatch(runner, "choose")
    run_one_by_one(theirs, Workload(sample.prompts[:1], [4]))
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}")
    for _ in range(options.rounds):
        speed, ours = measure("minivllm", lambda: run_engine(llm, work))
        report_shares(llm, context, sampler)
        others = {
            "one": ("transformers generate, one by one", lambda: run_one_by_one(theirs, sample)),
            "padded": ("transformers generate, padded batches of 16", lambda: run_padded(theirs, work)),
            "continuous": ("transformers generate_batch", lambda: run_continuous(theirs, work)),
        }
        for key in (key for key in others if key not in options.skip):
            their_speed, answers = measure(*others[key])
            note = "" if key == "continuous" else f"; {agreement(ours, answers)}"
            print(f"  minivllm is {speed / their_speed:.1f}× as fast{note}")


if __name__ == "__main__":
    main()
