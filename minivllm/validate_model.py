# Generated from notebooks/11_the_audit_again.ipynb by tools/export.py; edit there.
"""Does the engine answer like transformers, whatever its scheduler does?

`python -m minivllm.validate_model [MODEL]` compares prefill logits and greedy tokens under every combination of
backend, tokens per step, prefix cache and pool size, prints a table, and exits with 1 if anything differs.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm import STORYTELLER
from minivllm.core.block_manager import cdiv
from minivllm.engine.llm_engine import LLMEngine
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

TIE = 1e-4  # logits closer than this are equal up to the order of float32 sums


def is_tie(logits: Tensor, token: int, tolerance: float = TIE) -> bool:
    """Whether a token's logit is so close to the largest of logits [vocab_size] that it is a right choice too."""
    return (logits.max() - logits[token]).item() <= tolerance


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token on which two answers differ, None when they are the same."""
    for index, (a, b) in enumerate(itertools.zip_longest(ours, theirs)):
        if a != b:
            return index
    return None


class Oracle:
    """Greedy answers and logits of transformers, in float32. folder: of the model, or its hub name."""

    def __init__(self, folder: str, device: torch.device) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # A fresh config: the folder's own may say to sample, and which ids end a text.
        model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self.model, self.device = model.to(device).eval(), device

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position: [num_tokens, vocab_size]."""
        return self.model(torch.tensor([list(token_ids)], device=self.device)).logits[0]

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens after a prompt; ids that end a text are tokens like others here."""
        ids = torch.tensor([list(prompt)], device=self.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens)
        return out[0, len(prompt) :].tolist()

    def agrees(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether two answers are the same, or part at a tie."""
        index = first_difference(ours, theirs)
        if index is None or index == min(len(ours), len(theirs)):
            return index is None  # an answer that only ends sooner is no tie
        return is_tie(self.logits([*prompt, *theirs[:index]])[-1], ours[index])


BLOCK_SIZE = 4  # small, so that short texts cross many borders


@dataclass(frozen=True)
class Setting:
    """One combination of the engine's switches."""

    backend: str
    max_num_batched_tokens: int  # tokens per step
    enable_prefix_caching: bool
    scarce: bool  # a pool that holds little more than one request

    def options(self, longest: int) -> dict[str, Any]:
        """The engine's options, for requests of at most `longest` tokens, prompt and answer."""
        num_blocks = cdiv(longest, BLOCK_SIZE) + 1
        return {
            "attention_backend": self.backend,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.enable_prefix_caching,
            "num_kvcache_blocks": num_blocks if self.scarce else 16 * num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "dtype": "float32",
        }


STEPS = (5, 2048)  # tokens per step: long prompts in pieces, all prompts at once


def all_settings(backends: Sequence[str]) -> list[Setting]:
    """Every combination of backend, tokens per step, prefix cache and pool."""
    return [Setting(*values) for values in itertools.product(backends, STEPS, (True, False), (False, True))]


@dataclass(frozen=True)
class Row:
    """What one setting gave."""

    setting: Setting
    num_preemptions: int
    num_found: int  # tokens of the prompts that the prefix cache held
    num_different: int  # answers that differ from transformers', ties excepted

    def __str__(self) -> str:
        s = self.setting
        verdict = "equal" if not self.num_different else f"{self.num_different} answers differ"
        pool, cache = "scarce" if s.scarce else "ample", "on" if s.enable_prefix_caching else "off"
        switches = f"{s.backend:8} {s.max_num_batched_tokens:11,}  {cache:12}  {pool:7}"
        return f"{switches} {self.num_preemptions:11} {self.num_found:6}  {verdict}"


HEADER = f"{'backend':8} {'tokens/step':>11}  {'prefix cache':12}  {'pool':7} {'preemptions':>11} {'found':>6}  answers"


def run_setting(
    model: str, setting: Setting, prompts: list[list[int]], answers: list[list[int]], oracle: Oracle
) -> Row:
    """Generate under one setting, and compare with transformers' answers.

    prompts, answers: token ids of each. Raises BlockManagerError if the blocks do not add up afterwards.
    """
    max_tokens = len(answers[0])
    llm = LLM(model, **setting.options(max(map(len, prompts)) + max_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.llm_engine.block_manager.check_integrity()
    pairs = zip(prompts, outputs, answers, strict=True)
    different = [not oracle.agrees(prompt, out.outputs[0].token_ids, answer) for prompt, out, answer in pairs]
    metrics = [out.metrics for out in outputs]
    num_preemptions, num_found = sum(m.num_preemptions for m in metrics), sum(m.num_cached_tokens for m in metrics)
    return Row(setting, num_preemptions, num_found, sum(different))


@torch.inference_mode()
def largest_logit_difference(engine: LLMEngine, prompts: list[list[int]], oracle: Oracle) -> float:
    """Largest difference of any logit at any position of the prompts (token ids), ours against transformers'."""
    device, model, worst = oracle.device, engine.model, 0.0
    for prompt in prompts:
        hidden = model(torch.tensor(prompt, device=device), torch.arange(len(prompt), device=device))
        worst = max(worst, (model.compute_logits(hidden) - oracle.logits(prompt)).abs().max().item())
    return worst


TEXTS = (
    "Once upon a time",
    "The little fox looked at the moon and",
    "There was once a king who had three daughters, and the youngest was so beautiful that",
    "The little fox looked at the moon and said to the king",
)


def validate(model: str, backends: Sequence[str], max_tokens: int) -> bool:
    """Print the comparison of a model (a folder or a hub name) in every setting; whether everything was equal.

    max_tokens: greedy tokens after each of TEXTS. Raises as `LLM` does for a model or a backend that cannot run.
    """
    # One block: of this engine only the model and the tokenizer are wanted.
    engine = LLM(model, dtype="float32", num_kvcache_blocks=1, max_num_seqs=1).llm_engine
    oracle = Oracle(engine.config.model, engine.model.lm_head.weight.device)
    prompts = [engine.tokenize(text)[1] for text in TEXTS]
    difference = largest_logit_difference(engine, prompts, oracle)
    print(f"largest difference of a logit: {'at most' if difference <= TIE else 'MORE than'} {TIE}", HEADER, sep="\n")
    answers = [oracle.answer(prompt, max_tokens) for prompt in prompts]
    rows = []
    for setting in all_settings(backends):
        rows.append(run_setting(model, setting, prompts, answers, oracle))
        print(rows[-1])
    return difference <= TIE and not any(row.num_different for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 0 when everything is equal, 1 when anything differs."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.validate_model", description="Compare with transformers.")
    parser.add_argument("model", nargs="?", default=str(STORYTELLER), help="a folder or a hub name")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens per prompt")
    backends = ["torch", "triton"] if torch.cuda.is_available() else ["torch"]
    parser.add_argument("--backends", nargs="+", default=backends, choices=["torch", "triton"])
    options = parser.parse_args(argv)
    return 0 if validate(options.model, options.backends, options.tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
