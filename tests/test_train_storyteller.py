"""The training script: its parts one by one, and a small run from text to a folder that two libraries load."""

import importlib.util
import json
import lzma
import math
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import minivllm  # before transformers: it decides how triton is imported
from minivllm.model.qwen3 import Qwen3

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = load(ROOT / "tools" / "train_storyteller.py")
TINY = tool.Recipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    context=48,
    batch=8,
    steps=60,
    warmup=10,
    lr=1e-2,
    dropout=0.1,
    validation_share=0.1,
    eval_every=20,
)


def made_up_stories(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    names, things = ["The fox", "A hen", "The old king", "Mia"], ["a red ball", "the moon", "some bread", "a song"]
    verbs = ["saw", "found", "wanted", "gave away", "dreamt of"]
    return [". ".join(" ".join(map(rng.choice, (names, verbs, things))) for _ in range(6)) for _ in range(count)]


def write_corpus(path: Path, stories: list[str]) -> Path:
    text = f"\n{tool.END}\n".join(stories).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    books = write_corpus(folder / "books.txt", made_up_stories(150, seed=1))
    extra = write_corpus(folder / "extra.txt.xz", made_up_stories(60, seed=2))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in tool.asdict(TINY).items()]
    assert tool.main([str(books), f"{extra}:1.5", "--out", str(folder / "model"), "--device", "cpu", *flags]) == 0
    return folder / "model"


def info_of(folder: Path) -> dict:
    return json.loads((folder / "training_info.json").read_text(encoding="utf-8"))


# --- the whole way ---


def test_loss_falls(trained: Path) -> None:
    log = info_of(trained)["log"]
    assert [entry["step"] for entry in log] == [20, 40, 60]
    assert log[0]["train"] < math.log(320)  # a model that knows nothing
    assert log[-1]["val"] < log[0]["val"] - 0.5
    assert info_of(trained)["best_val"] == min(entry["val"] for entry in log)


def test_record_is_enough_to_repeat_the_run(trained: Path) -> None:
    info = info_of(trained)
    assert tool.Recipe(**info["recipe"]) == TINY
    assert info["corpora"] == {"books.txt": 1.0, "extra.txt.xz": 1.5}
    assert all(text.startswith(prompt) and len(text) > len(prompt) for prompt, text in info["samples"].items())
    means = {name: loss for name, loss in info["log"][-1]["val_by_corpus"].items() if name != "all"}
    assert min(means.values()) <= info["log"][-1]["val"] <= max(means.values())


def test_folder_is_an_ordinary_model(trained: Path) -> None:
    """transformers finds all it needs and nothing else, and our engine computes the same from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs, loading = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert AutoModelForCausalLM.from_pretrained(trained).dtype == torch.bfloat16
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode("The old king saw the moon").ids)
    assert ids.tolist() == AutoTokenizer.from_pretrained(trained)("The old king saw the moon")["input_ids"]
    assert ids[0] == 0 and tokenizer.id_to_token(0) == tool.END
    ours = Qwen3.from_pretrained(trained)
    with torch.inference_mode():
        logits = ours.compute_logits(ours(ids, torch.arange(len(ids))))
        torch.testing.assert_close(logits, theirs(ids[None]).logits[0], atol=1e-4, rtol=0)


def test_trained_like_the_model_that_ships() -> None:
    """The recipe's defaults are those of the recorded run, and its model has the same shape and size."""
    shipped = info_of(minivllm.STORYTELLER)
    names = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "inter": "intermediate_size",
    }
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    names |= {"ctx": "context", "wd": "weight_decay", "min_lr": "final_lr"}
    names |= {key: key for key in ("rope_theta", "batch", "steps", "warmup", "lr", "dropout", "eval_every", "seed")}
    recipe = tool.Recipe()
    assert {key: getattr(recipe, name) for key, name in names.items()} == {key: shipped["args"][key] for key in names}
    config = tool.make_config(recipe, recipe.vocab_size)
    written = json.loads((minivllm.STORYTELLER / "config.json").read_text(encoding="utf-8"))
    same = written.keys() & config.to_dict().keys() - {"architectures", "dtype", "torch_dtype"}
    assert {key: config.to_dict()[key] for key in same} == {key: written[key] for key in same}
    with torch.device("meta"):
        model = tool.Qwen3ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == shipped["parameters"]


# --- texts ---


def test_a_tokenizer_can_be_given(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "books.txt", made_up_stories(100, seed=5))
    tokenizer = Tokenizer.from_file(str(minivllm.STORYTELLER / "tokenizer.json"))
    used, (part,) = tool.prepare([(corpus, 1.0)], TINY, tokenizer)
    assert used is tokenizer
    assert tokenizer.decode(part.stories[0].tolist()) in made_up_stories(100, seed=5)


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [("a.txt", "a.txt", 1), ("a.txt:2", "a.txt", 2), ("a:b.txt:0.5", "a:b.txt", 0.5), (r"C:\a.txt", r"C:\a.txt", 1)],
)
def test_corpus_with_a_weight(text: str, path: str, weight: float) -> None:
    assert tool.parse_corpus(text) == (Path(path), weight)


@pytest.mark.parametrize("weight", ["0", "-1", "inf", "nan"])
def test_weights_that_mean_nothing_are_refused(weight: str) -> None:
    with pytest.raises(tool.CorpusError, match="must be above 0"):
        tool.parse_corpus(f"a.txt:{weight}")


@pytest.mark.parametrize(
    ("stories", "message"),
    [
        ([" \n"], "no story in it"),
        (made_up_stories(3, seed=1), "no 48 tokens for validation"),
    ],
)
def test_bad_corpora_are_named(
    tmp_path: Path, stories: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "books.txt", stories)
    assert tool.main([str(corpus), "--out", str(tmp_path / "out"), "--context", "48", "--vocab-size", "300"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_corpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path / "nowhere.txt"), "--out", str(tmp_path / "out")]) == 2
    assert "nowhere.txt" in capsys.readouterr().err


@given(st.text(max_size=200))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


TOKENIZER = tool.train_tokenizer(made_up_stories(20, seed=3), 300)


def test_validation_is_by_story_and_by_its_beginning_only() -> None:
    stories = [story * 2 for story in made_up_stories(2000, seed=4)]
    chosen = {story for story in stories if tool.is_validation(story, 0.1)}
    assert 0.05 < len(chosen) / len(set(stories)) < 0.15
    assert all(tool.is_validation(story + " The end.", 0.1) == (story in chosen) for story in stories)
    part = tool.make_part("books", 1.0, stories, TOKENIZER, TINY)
    assert len(part.stories) == sum(story not in chosen for story in stories)
    assert part.validation.shape[1] == TINY.context


# --- batches ---


def numbered_part(count: int, weight: float, first: int = 0, length: int = 7) -> "tool.Part":
    """Stories that are one number, `length` times: so it can be counted who is in a row."""
    stories = [np.full(length, first + index, dtype=np.uint16) for index in range(count)]
    return tool.Part("numbers", weight, stories, torch.empty(0, 10, dtype=torch.int64))


@given(st.integers(10, 40), st.sampled_from([0.5, 1.0, 2.0, 2.5]), st.integers(0, 99))
def test_an_epoch_has_each_story_as_often_as_its_weight_says(count: int, weight: float, seed: int) -> None:
    rows = tool.draw_epoch([numbered_part(count, weight)], np.random.default_rng(seed), context=10)
    seen = Counter(rows.flatten().tolist())
    assert max(seen.values()) <= 7 * math.ceil(weight)
    # the cut loses less than a row at each end
    assert 0 <= 7 * (count * int(weight) + round(count * (weight % 1))) - seen.total() < 20


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    parts = [numbered_part(30, 1.0), numbered_part(10, 2.0, first=100)]
    draw = [tool.draw_epoch(parts, np.random.default_rng(seed), 10) for seed in (1, 1, 2)]
    assert np.array_equal(draw[0], draw[1]) and not np.array_equal(draw[0], draw[2])


def test_batches_go_on_beyond_an_epoch() -> None:
    recipe = tool.Recipe(context=10, batch=9, seed=3)
    shapes = [rows.shape for rows, _ in zip(tool.batches([numbered_part(20, 1.0)], recipe), range(5), strict=False)]
    assert shapes == [(9, 10)] * 5


# --- recipe ---


def test_learning_rate_rises_and_falls() -> None:
    recipe = tool.Recipe(steps=1000, warmup=100, lr=1.0, final_lr=0.1)
    rates = [tool.learning_rate(step, recipe) for step in range(1, 1001)]
    assert rates[0] == pytest.approx(0.01, rel=1e-4) and rates[-1] == pytest.approx(0.1)
    assert np.argmax(rates) + 1 == 100
    assert rates[499] == pytest.approx(0.55)
    assert rates[99:] == sorted(set(rates[99:]), reverse=True)


def test_weight_decay_is_for_matrices_only() -> None:
    model = tool.make_model(tool.make_config(TINY, 320), 0.1)
    matrices, vectors = tool.make_optimizer(model, TINY, CPU).param_groups
    assert matrices["weight_decay"] == TINY.weight_decay and vectors["weight_decay"] == 0
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert {parameter.dim() for parameter in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_dropout_works_in_training_only_and_stays_out_of_the_checkpoint() -> None:
    torch.manual_seed(0)
    config = tool.make_config(TINY, 320)
    model, rows = tool.make_model(config, 0.5), torch.arange(20)[None]
    with torch.no_grad():
        first, second = model.train()(rows).logits, model(rows).logits
        assert not torch.equal(first, second)
        assert torch.equal(model.eval()(rows).logits, model(rows).logits)
    assert model.state_dict().keys() == tool.Qwen3ForCausalLM(config).state_dict().keys()


def test_loss_of_an_untrained_model_is_that_of_guessing() -> None:
    torch.manual_seed(0)
    model = tool.make_model(tool.make_config(TINY, 320), 0.0)
    loss = tool.next_token_loss(model, torch.randint(320, (4, 48)))
    assert loss.item() == pytest.approx(math.log(320), abs=0.1)


# --- the model card ---


def test_card_says_what_the_record_says() -> None:
    card = (minivllm.STORYTELLER / "README.md").read_text(encoding="utf-8")
    info = info_of(minivllm.STORYTELLER)
    assert f"{info['parameters']:,} parameters" in card
    assert f"{info['best_val']:.3f} nats per token" in card
    assert f"{round(info['tokens_seen'] / 1e6)} M tokens, about {info['epochs']} epochs" in card
    assert f"{round(info['seconds'])} seconds" in card
    samples = (minivllm.STORYTELLER / "training.log").read_text(encoding="utf-8")
    quoted = [line[2:].replace("**", "").removesuffix(" […]") for line in card.splitlines() if line.startswith("> ")]
    assert len(quoted) == 6 and all(line in samples for line in quoted)


def test_card_counts_the_sources() -> None:
    card = (minivllm.STORYTELLER / "README.md").read_text(encoding="utf-8")
    head, *books = (minivllm.STORYTELLER / "SOURCES.tsv").read_text(encoding="utf-8").splitlines()
    kept = [dict(zip(head.split("\t"), book.split("\t"), strict=True)) for book in books]
    stories, size = (sum(int(book[key]) for book in kept) for key in ("stories", "bytes_kept"))
    assert f"{len(kept)} books, {stories:,} pieces, {size / 1e6:.1f} MB" in card


def test_the_model_that_ships_is_small() -> None:
    assert sum(file.stat().st_size for file in minivllm.STORYTELLER.iterdir()) < 15 * 2**20
