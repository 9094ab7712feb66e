"""Engines over the storyteller that share its weights, and transformers' greedy answers to compare with."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import minivllm
from minivllm import LLM
from minivllm.config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine, load_tokenizer
from minivllm.model.qwen3 import Qwen3

torch.set_num_threads(1)  # small models: a second thread costs more than it brings
TIE = 1e-4  # where transformers' two best logits are closer than this, either token is right


@cache
def storyteller() -> tuple[Qwen3, Any]:
    """Our model in float32, and its tokenizer."""
    return Qwen3.from_pretrained(minivllm.STORYTELLER), load_tokenizer(minivllm.STORYTELLER)


def make_engine(**options: Any) -> LLMEngine:
    """An engine with its own cache."""
    model, tokenizer = storyteller()
    return LLMEngine(EngineConfig(model="storyteller", **{"num_kvcache_blocks": 256, **options}), model, tokenizer)


def make_llm(**options: Any) -> LLM:
    """An LLM around such an engine."""
    llm = LLM.__new__(LLM)
    llm.llm_engine = make_engine(**options)
    return llm


def assert_all_free(engine: LLMEngine) -> None:
    """No block is held, nobody is queued, the books are right."""
    engine.block_manager.check_integrity()
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished()
    assert not engine._owners


@cache
def theirs() -> Any:
    """transformers' model, in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(minivllm.STORYTELLER, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Greedy:
    """transformers' greedy continuation, and at each step by how much the best logit leads."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]


@cache
def greedy(prompt: tuple[int, ...], num_tokens: int) -> Greedy:
    """What `generate` answers to the prompt alone; nothing stops it before num_tokens."""
    out = theirs().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return Greedy(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(float(b[0] - b[1]) for b in best))


def ties_in(ours: list[int], prompt: tuple[int, ...], num_tokens: int) -> int:
    """0 when our tokens are transformers', 1 when they differ from a tie on; raises AssertionError otherwise.

    Ours may be a part: an aborted answer is compared as far as it came.
    """
    expected = greedy(prompt, num_tokens)
    for place, (a, b) in enumerate(zip(ours, expected.tokens, strict=False)):
        if a != b:
            lead = expected.leads[place]
            assert lead < TIE, f"token {place} is {a}, transformers has {b}, which leads by {lead}; prompt {prompt}"
            return 1
    return 0
