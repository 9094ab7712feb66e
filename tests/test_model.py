"""Our logits are those of transformers: for the storyteller, and for tiny models of every architecture."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from small_models import VARIANTS, build, save
from tokenizers import Tokenizer
from torch import Tensor

from minivllm import STORYTELLER
from minivllm.model.qwen3 import Qwen3
from minivllm.utils.prompts import PromptError, check_prompt

TOKENIZER = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
STARTS = ["Once upon a time", "There was once a king who had three daughters", "The fox said to the crow:"]


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return Qwen3.from_pretrained(STORYTELLER)


@pytest.fixture(scope="module")
def theirs() -> Iterator[transformers.PreTrainedModel]:
    transformers.logging.disable_progress_bar()
    yield transformers.AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    transformers.logging.enable_progress_bar()


def logits_of(model: Qwen3, ids: Tensor) -> Tensor:
    """[num_tokens, vocab_size]"""
    return model.compute_logits(model(ids, torch.arange(len(ids))))


@torch.inference_mode()
def their_logits(theirs: transformers.PreTrainedModel, ids: Tensor) -> Tensor:
    return theirs(ids[None]).logits[0].float()


def greedy_text(theirs: transformers.PreTrainedModel, start: str, num_tokens: int) -> Tensor:
    """A prompt and what transformers writes after it; the end-of-text token does not stop it."""
    ids = torch.tensor([TOKENIZER.encode(start).ids])
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    return theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].clone()


# --- the storyteller ---


@pytest.mark.parametrize("start", STARTS)
def test_a_hundred_greedy_steps_are_those_of_transformers(
    model: Qwen3, theirs: transformers.PreTrainedModel, start: str
) -> None:
    """vLLM#1069, #18352: in float32 every choice is the same. One pass over the text shows all of them."""
    ids = greedy_text(theirs, start, 100)
    ours, reference = logits_of(model, ids).clone(), their_logits(theirs, ids)
    assert (ours - reference).abs().max() <= 1e-4
    prompt_length = len(TOKENIZER.encode(start).ids)
    # generate() forbids the end of the text, and so must the comparison
    ours[:, 0] = -torch.inf
    assert torch.equal(ours.argmax(-1)[prompt_length - 1 : -1], ids[prompt_length:])


def test_the_longest_text_that_the_model_knows(model: Qwen3, theirs: transformers.PreTrainedModel) -> None:
    ids = torch.arange(1024) * 7 % 4096
    assert (logits_of(model, ids)[-8:] - their_logits(theirs, ids)[-8:]).abs().max() <= 2e-4


def test_bf16_is_as_near_to_float32_as_transformers_bf16_is(model: Qwen3, record_property: object) -> None:
    """vLLM#18352, #39146: 16-bit texts differ; what can be asked is the agreement on a given text."""
    ids = torch.tensor(TOKENIZER.encode("\n".join(STARTS) * 8).ids[:200])
    exact = logits_of(model, ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.bfloat16)
    found = {
        "ours": logits_of(Qwen3.from_pretrained(STORYTELLER, dtype=torch.bfloat16), ids),
        "theirs": their_logits(theirs, ids),
    }
    for name, logits in found.items():
        record_property(f"{name}: top-1 agreement", (logits.argmax(-1) == exact.argmax(-1)).float().mean().item())
        record_property(f"{name}: largest difference", (logits - exact).abs().max().item())
    errors = {name: (logits - exact).abs().mean().item() for name, logits in found.items()}
    assert errors["ours"] <= 1.2 * errors["theirs"]
    assert (found["ours"].argmax(-1) == exact.argmax(-1)).float().mean() >= 0.95


# --- every architecture ---


@pytest.mark.parametrize("shards", ["one file", "many files"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_saved_by_transformers_gives_its_logits(tmp_path: Path, variant: str, shards: str) -> None:
    save(variant, tmp_path, max_shard_size="20KB" if shards == "many files" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shards == "many files")
    ids = torch.arange(60) * 13 % 97
    reference = their_logits(build(variant), ids)
    ours = logits_of(Qwen3.from_pretrained(tmp_path), ids)
    assert (ours - reference).abs().max() <= 1e-4 * max(1.0, reference.abs().max().item())
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_reaches_the_logits(variant: str) -> None:
    """So the comparison above can fail: a norm, bias or table that was not loaded would show."""
    reference, ids = build(variant), torch.arange(60) * 13 % 97
    before = their_logits(reference, ids)
    for name, parameter in reference.named_parameters():
        kept = parameter.detach().clone()
        parameter.data.add_(torch.randn(kept.shape))
        change = (their_logits(reference, ids) - before).abs().max()
        parameter.data.copy_(kept)
        assert change > 1e-2, f"{name} does not reach the logits"


@pytest.mark.parametrize("starts", [pytest.param(STARTS, id="mini-sglang#98")])
def test_logits_of_three_prompts_are_those_of_their_last_tokens(model: Qwen3, starts: list[str]) -> None:
    """Only the rows that are asked for, and each its own."""
    prompts = [torch.tensor(TOKENIZER.encode(start).ids) for start in starts]
    assert len({len(ids) for ids in prompts}) == 3
    last = torch.cat([model(ids, torch.arange(len(ids)))[-1:] for ids in prompts])
    together = model.compute_logits(last)
    assert together.shape == (3, 4096) and together.dtype == torch.float32
    for row, ids in zip(together, prompts, strict=True):
        assert torch.allclose(row, logits_of(model, ids)[-1], atol=1e-4)


def test_tied_tables_are_one_tensor(model: Qwen3) -> None:
    """vLLM#33036: a head that is not in the file is the embedding, not a random matrix."""
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_nothing_is_kept_for_gradients(model: Qwen3) -> None:
    hidden = model(torch.tensor([1, 2]), torch.arange(2))
    assert not hidden.requires_grad and not model.compute_logits(hidden).requires_grad


# --- prompts ---


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match="no tokens"):
        check_prompt([], 10)


@pytest.mark.parametrize("token_id", [1.0, "a", None, [1]])
def test_an_id_that_is_no_integer_is_refused(token_id: object) -> None:
    with pytest.raises(PromptError, match=r"token 1 of the prompt is .*: ids are integers"):
        check_prompt([3, token_id], 10)


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=5))
def test_the_first_id_outside_the_vocabulary_is_named(ids: list[int]) -> None:
    outside = [(index, token_id) for index, token_id in enumerate(ids) if token_id not in range(10)]
    if not outside:
        check_prompt(ids, 10)
        return
    index, token_id = outside[0]
    with pytest.raises(PromptError, match=f"^token {index} of the prompt is {token_id}: ids go from 0 to 9$"):
        check_prompt(ids, 10)
