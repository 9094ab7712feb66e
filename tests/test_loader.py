"""Weights: what is missing, broken, misshapen or too much is an error that names it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import save
from torch import Tensor

from minivllm.config import ConfigError
from minivllm.model.qwen3 import Qwen3
from minivllm.utils.loader import WeightsError, load_weights

UNTIED, TIED = "qwen3-TensorRT-LLM#5912", "qwen3-tied-vLLM#33036"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An untied model in one file."""
    return save(UNTIED, tmp_path)


def change(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder's single file."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Qwen3.from_pretrained(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"no weights in .*: model\.safetensors \(or its \.index\.json\) is missing")


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.*config\.json is missing"):
        Qwen3.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("length", [0, 5, 1000, -1])
def test_a_file_that_is_broken_off(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(folder, r"model\.safetensors is not a whole safetensors file .*: download it again")


def test_a_file_that_is_something_else(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(folder, r"model\.safetensors is not a whole safetensors file")


@pytest.mark.parametrize("name", [K_PROJ, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_a_tensor_that_is_missing(folder: Path, name: str) -> None:
    change(folder, {name: None})
    refused(folder, rf"no file in .* has {name} \(1 parameters are missing\)")


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.moe.weight"]
)
def test_a_tensor_too_many(folder: Path, name: str) -> None:
    change(folder, {name: torch.ones(3)})
    refused(folder, rf"model\.safetensors has {name}, for which this architecture has no place")


def test_frequencies_that_older_folders_store_are_passed_over(folder: Path) -> None:
    change(folder, {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)})
    assert isinstance(Qwen3.from_pretrained(folder), Qwen3)


@pytest.mark.parametrize("shape", [(40, 32), (32, 41), (32 * 40,), (1, 32, 40), (33, 40)])
def test_a_tensor_of_another_shape(folder: Path, shape: tuple[int, ...]) -> None:
    """tiny-llm#41: (inputs, outputs) is not (outputs, inputs); and nothing is broadcast."""
    change(folder, {K_PROJ: torch.ones(shape)})
    expected = rf"{K_PROJ} in model\.safetensors has shape \[{', '.join(map(str, shape))}\], but .* \[32, 40\]"
    refused(folder, expected)


def test_a_config_that_does_not_fit_the_weights(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**raw, "head_dim": 8}), encoding="utf-8")
    refused(folder, r"(q|k|v|o)_(proj|norm)\.weight .* has shape .*, but config\.json asks for")
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["Nope"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="architecture Nope"):
        Qwen3.from_pretrained(folder)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    save(UNTIED, tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, rf"model\.safetensors\.index\.json names {shard.name}, which is not in .*: download it again")


@pytest.mark.parametrize("text", ['{"weight_map": ', '{"metadata": {}}', "[]"])
def test_an_index_that_is_broken(tmp_path: Path, text: str) -> None:
    save(UNTIED, tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    refused(tmp_path, r"model\.safetensors\.index\.json .*download it again")


@pytest.mark.parametrize("stored", [pytest.param("once", id="mini-sglang@e10b9e4"), "twice"])
def test_tied_weights_are_found_however_often_they_are_stored(tmp_path: Path, stored: str) -> None:
    """A head of its own that is never filled is a random head."""
    save(TIED, tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    if stored == "twice":
        change(tmp_path, {"lm_head.weight": table.clone()})
    model = Qwen3.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, table) and torch.equal(model.model.embed_tokens.weight, table)


def test_weights_are_converted_to_the_dtype_that_is_asked_for(folder: Path) -> None:
    table = load_file(folder / "model.safetensors")["lm_head.weight"]
    model = Qwen3.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, table.bfloat16())
    assert model.model.layers[0].self_attn.rotary.cos.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_failed_load_leaves_torch_as_it_was(folder: Path) -> None:
    change(folder, {K_PROJ: torch.ones(1)})
    with pytest.raises(WeightsError):
        Qwen3.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.get_default_dtype() == torch.float32


def test_loading_twice_gives_the_same(folder: Path) -> None:
    model = Qwen3.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_weights(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
