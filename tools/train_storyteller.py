#!/usr/bin/env python3
"""Train the small Qwen3 that ships with the course, on plain-text stories.

    tools/train_storyteller.py books.txt.xz tinystories.txt.xz:2 --out build/storyteller

A corpus is a text file (plain, or .xz) whose stories are separated by `<|endoftext|>`. `:2` after its name means that
each of its stories is read twice in an epoch; the default is once, and 0.5 is half of them, drawn anew each time.
The result is a Hugging Face folder with weights in bfloat16, and `training_info.json`: the recipe, the curve, samples.
The defaults are the recipe of the model in `minivllm/assets/storyteller`; with them it takes minutes on a large GPU.
"""

import argparse
import json
import lzma
import math
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|endoftext|>"  # between stories; id 0, and begin, end and padding of a text in one
PROMPTS = ("Once upon a time", "One day, a little girl named Mia", "The small dog was sad because")


class CorpusError(ValueError):
    """A corpus that cannot be trained on; the message names the file and says why."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, but for the texts. Each field is an option of the command line."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 10_000.0
    context: int = 1024  # tokens in a row of a batch, and the longest text of the model
    batch: int = 32  # rows in a step
    steps: int = 8000
    warmup: int = 150  # steps
    lr: float = 4e-3
    final_lr: float = 1e-4
    weight_decay: float = 0.3  # on matrices; the norms' weights are left alone
    dropout: float = 0.2  # on what each block adds to the residual stream, in training only
    validation_share: float = 0.01  # of the stories
    eval_every: int = 500  # steps
    seed: int = 5


@dataclass(frozen=True)
class Part:
    """One corpus, as token ids: stories to learn from, and rows to be judged by."""

    name: str
    weight: float
    stories: list[np.ndarray]  # each [num_tokens], uint16
    validation: Tensor  # [num_rows, context], int64

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of this corpus that one epoch goes through: all of them, `weight` times."""
        return round(self.weight * sum(map(len, self.stories)))


# --- texts ---


def read_stories(path: Path) -> list[str]:
    """Raises FileNotFoundError, and CorpusError for a file without a story."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    stories = [story for text in raw.decode("utf-8").split(END) if (story := text.strip())]
    if not stories:
        raise CorpusError(f"{path.name}: no story in it; stories are separated by {END}")
    return stories


def parse_corpus(text: str) -> tuple[Path, float]:
    """`books.txt:2` → the path and the weight, 1 when none is given. Raises CorpusError for a weight not above 0."""
    name, _, weight = text.rpartition(":")
    try:
        value = float(weight)
    except ValueError:  # no weight, and perhaps the colon of a Windows drive
        return Path(text), 1.0
    if not 0 < value < math.inf:
        raise CorpusError(f"{text}: the weight is {value:g}; it must be above 0")
    return Path(name), value


def is_validation(story: str, share: float) -> bool:
    """The same stories in each run and in any order: decided by the story's first letters, not by its place."""
    return zlib.crc32(story[:200].encode()) % 10_000 < share * 10_000


def train_tokenizer(stories: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and END is put before each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def cut(tokens: np.ndarray, context: int) -> np.ndarray:
    """[num_tokens] → [num_rows, context]; what does not fill a row is dropped."""
    return tokens[: len(tokens) // context * context].reshape(-1, context)


def make_part(name: str, weight: float, stories: list[str], tokenizer: Tokenizer, recipe: Recipe) -> Part:
    """Tokenize a corpus, and keep a share of its stories for validation."""
    sides: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for story, encoded in zip(stories, tokenizer.encode_batch(stories), strict=True):
        sides[is_validation(story, recipe.validation_share)].append(np.array(encoded.ids, dtype=np.uint16))
    held_out = np.concatenate([np.empty(0, np.uint16), *sides[True]])
    return Part(name, weight, sides[False], torch.from_numpy(cut(held_out, recipe.context).astype(np.int64)))


def prepare(
    corpora: list[tuple[Path, float]], recipe: Recipe, tokenizer: Tokenizer | None
) -> tuple[Tokenizer, list[Part]]:
    """Raises CorpusError when there is too little text for one row to learn from, or to be judged by."""
    texts = [(path.name, weight, read_stories(path)) for path, weight in corpora]
    # Weighted as in training, so that a small corpus with a large weight has its words too.
    weighted = (story for _, weight, stories in texts for story in stories * max(1, round(weight)))
    tokenizer = tokenizer or train_tokenizer(weighted, recipe.vocab_size)
    parts = [make_part(*text, tokenizer, recipe) for text in texts]
    if not any(len(part.validation) for part in parts):
        raise CorpusError(f"no {recipe.context} tokens for validation: add stories, or raise --validation-share")
    if sum(part.tokens_per_epoch for part in parts) < 2 * recipe.context:
        raise CorpusError(f"an epoch has less than two rows of {recipe.context} tokens: add stories")
    return tokenizer, parts


# --- batches ---


def draw_epoch(parts: list[Part], rng: np.random.Generator, context: int) -> np.ndarray:
    """Whole stories in a new order, laid end to end and cut into rows at a new place: [num_rows, context]."""
    drawn: list[np.ndarray] = []
    for part in parts:
        copies, fraction = int(part.weight), part.weight % 1
        some = rng.permutation(len(part.stories))[: round(fraction * len(part.stories))]
        drawn += part.stories * copies + [part.stories[index] for index in some]
    stream = np.concatenate([drawn[index] for index in rng.permutation(len(drawn))])
    return rng.permutation(cut(stream[rng.integers(context) :], context))


def batches(parts: list[Part], recipe: Recipe) -> Iterator[Tensor]:
    """Batches of rows without end, [batch, context] int64. What is left of an epoch begins the next batch."""
    rng = np.random.default_rng(recipe.seed)
    rows = np.empty((0, recipe.context), np.uint16)
    while True:
        while len(rows) < recipe.batch:
            rows = np.concatenate([rows, draw_epoch(parts, rng, recipe.context)])
        batch, rows = rows[: recipe.batch], rows[recipe.batch :]
        yield torch.from_numpy(batch.astype(np.int64))


# --- model and optimizer ---


def make_config(recipe: Recipe, vocab_size: int) -> Qwen3Config:
    """The config of transformers with the sizes of the recipe."""
    shared = {field.name for field in fields(Recipe)} & set(Qwen3Config().to_dict()) - {"vocab_size", "rope_theta"}
    return Qwen3Config(
        **{name: getattr(recipe, name) for name in sorted(shared)},
        vocab_size=vocab_size,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def residual_outputs(model: nn.Module) -> list[nn.Linear]:
    """The last matrix of each attention and of each MLP: what they return is added to the residual stream."""
    return [module for name, module in model.named_modules() if name.endswith(("o_proj", "down_proj"))]


def make_model(config: Qwen3Config, dropout: float) -> Qwen3ForCausalLM:
    """A model with random weights, and dropout on what each block adds, in training only."""
    model = Qwen3ForCausalLM(config)
    for linear in residual_outputs(model):
        # 2 × layers terms are summed up in the stream: GPT-2's scaling keeps their sum at the size of one.
        nn.init.normal_(linear.weight, std=config.initializer_range / math.sqrt(2 * config.num_hidden_layers))
        # Qwen3 has no such dropout. As a hook it leaves no trace in the checkpoint.
        linear.register_forward_hook(lambda module, _, out: nn.functional.dropout(out, dropout, module.training))
    return model


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=device.type == "cuda")


def learning_rate(step: int, recipe: Recipe) -> float:
    """Up in a straight line for `warmup` steps, under a cosine that ends at final_lr. Steps count from 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    return min(1.0, step / max(1, recipe.warmup)) * (recipe.final_lr + (recipe.lr - recipe.final_lr) * cosine)


# --- training ---


def precision(device: torch.device) -> AbstractContextManager:
    """Weights stay float32; on a GPU the matrix products run in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats per token. rows: [num_rows, context]."""
    with precision(rows.device):
        logits = model(input_ids=rows, use_cache=False).logits  # [num_rows, context, vocab_size]
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, parts: list[Part], recipe: Recipe, device: torch.device) -> dict[str, float]:
    """Loss for each corpus, and `all`: their mean, weighted by the tokens that each has in an epoch."""
    model.eval()
    judged = [part for part in parts if len(part.validation)]
    losses = {}
    for part in judged:
        chunks = part.validation.split(recipe.batch)
        sums = [next_token_loss(model, chunk.to(device)).item() * len(chunk) for chunk in chunks]
        losses[part.name] = sum(sums) / len(part.validation)
    model.train()
    weights = [part.tokens_per_epoch for part in judged]
    mean = sum(losses[part.name] * weight for part, weight in zip(judged, weights, strict=True)) / sum(weights)
    return losses | {"all": mean}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor, lr: float) -> Tensor:
    """One step on rows [batch, context] at learning rate lr; returns the loss before it, a scalar on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = next_token_loss(model, rows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(model: nn.Module, parts: list[Part], recipe: Recipe, device: torch.device) -> list[dict]:
    """Leave the model with the weights of the best validation loss, and return the curve, an entry per evaluation."""
    optimizer = make_optimizer(model, recipe, device)
    run = torch.compile(model) if device.type == "cuda" else model
    log, losses, best, start = [], [], {}, time.perf_counter()
    model.train()
    for step, rows in zip(range(1, recipe.steps + 1), batches(parts, recipe), strict=False):
        lr = learning_rate(step, recipe)
        losses.append(train_step(run, optimizer, rows.to(device), lr))
        if step % recipe.eval_every and step < recipe.steps:
            continue
        val = validate(run, parts, recipe, device)
        entry = {"step": step, "train": torch.stack(losses).mean().item(), "val": val["all"], "val_by_corpus": val}
        log.append(entry | {"lr": lr, "sec": time.perf_counter() - start})
        losses.clear()
        print(f"step {step}  train {entry['train']:.3f}  val {entry['val']:.3f}  {log[-1]['sec']:.0f} s", flush=True)
        if entry["val"] == min(each["val"] for each in log):
            best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best)
    return log


# --- what is kept ---


@torch.no_grad()
def write_samples(model: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, length: int = 160) -> dict[str, str]:
    """A continuation of at most `length` tokens for each of PROMPTS: {prompt: whole text}."""
    model.eval()
    torch.manual_seed(seed)
    samples, room = {}, model.config.max_position_embeddings
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
        new = max(1, min(length, room - ids.shape[1]))
        out = model.generate(ids, max_new_tokens=new, do_sample=True, temperature=0.8, top_p=0.9, top_k=0)
        samples[prompt] = tokenizer.decode(out[0].tolist())
    return samples


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer, info: dict) -> None:
    """Write the folder: config, weights in bfloat16, tokenizer, generation defaults, the record of the training."""
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.8, top_p=0.95, max_new_tokens=256
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens = {f"{name}_token": END for name in ("bos", "eos", "pad")}
    length = model.config.max_position_embeddings
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **tokens).save_pretrained(folder)
    (folder / "training_info.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")


def make_storyteller(
    corpora: list[tuple[Path, float]], recipe: Recipe, tokenizer: Tokenizer | None, folder: Path, device: torch.device
) -> dict:
    """Tokenizer (a new one if none is given), training, samples, folder; returns what `training_info.json` holds."""
    torch.manual_seed(recipe.seed)
    tokenizer, parts = prepare(corpora, recipe, tokenizer)
    model = make_model(make_config(recipe, tokenizer.get_vocab_size()), recipe.dropout).to(device)
    log = train(model, parts, recipe, device)
    info = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "best_val": min(entry["val"] for entry in log),
        "stories": {part.name: len(part.stories) for part in parts},
        "tokens_per_epoch": sum(part.tokens_per_epoch for part in parts),
        "tokens_seen": recipe.steps * recipe.batch * recipe.context,
        "recipe": asdict(recipe),
        "corpora": {path.name: weight for path, weight in corpora},
        "log": log,
        "samples": write_samples(model, tokenizer, recipe.seed),
    }
    save(folder, model, tokenizer, info)
    return info


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", help="PATH or PATH:WEIGHT")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use, instead of training one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")
    options = vars(parser.parse_args(argv))
    recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe)})
    try:
        corpora = [parse_corpus(text) for text in options["corpus"]]
        tokenizer = Tokenizer.from_str(options["tokenizer"].read_text("utf-8")) if options["tokenizer"] else None
        info = make_storyteller(corpora, recipe, tokenizer, options["out"], torch.device(options["device"]))
    except (CorpusError, FileNotFoundError) as error:
        print(f"train_storyteller: {error}", file=sys.stderr)
        return 2
    print(f"validation loss {info['best_val']:.3f}; saved to {options['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
