# Generated from notebooks/01_qwen3_from_scratch.ipynb, 09_engine.ipynb by tools/export.py; edit there.
"""Weights from a Hugging Face folder into a model whose parameters have the same names."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn


class WeightsError(ValueError):
    """Weights that are missing, broken or of the wrong shape. The message names the file or the tensor."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those that the index names, or the single one.

    Raises WeightsError when there are none, or when the index names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not (folder / "model.safetensors").exists():
            raise WeightsError(f"no weights in {folder}: model.safetensors (or its .index.json) is missing")
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} has no weight_map that can be read: download it again") from error
    if missing := [name for name in names if not (folder / name).exists()]:
        raise WeightsError(f"{index.name} names {missing[0]}, which is not in {folder}: download it again")
    return [folder / name for name in names]


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The name and tensor of each weight in a safetensors file. Raises WeightsError when the file is broken."""
    try:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                yield name, weights.get_tensor(name)
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a whole safetensors file ({error}): download it again") from error


def copy_weight(target: Tensor, source: Tensor, name: str, path: Path) -> None:
    """Copy source, of any shape, into target, in place and in its dtype. Raises WeightsError when shapes differ."""
    if target.shape != source.shape:
        raise WeightsError(
            f"{name} in {path.name} has shape {list(source.shape)}, but config.json asks for {list(target.shape)}"
        )
    target.copy_(source)


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter of the model from the folder's safetensors files.

    Raises WeightsError for a file that is missing or broken, a tensor of another shape or that the model has no place
    for, and for parameters that no file filled.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    filled: set[int] = set()
    for path in weight_files(Path(folder)):
        for name, tensor in read_weights(path):
            if name.endswith(".rotary_emb.inv_freq"):
                continue  # older folders store what the config says too
            if name not in targets:
                raise WeightsError(f"{path.name} has {name}, for which this architecture has no place")
            copy_weight(targets[name], tensor, name, path)
            filled.add(id(targets[name]))
    if empty := [name for name, target in targets.items() if id(target) not in filled]:
        raise WeightsError(f"no file in {folder} has {empty[0]} ({len(empty)} parameters are missing)")


class ModelNotFoundError(ValueError):
    """A model that is neither a folder nor on the hub."""


# Config, weights, tokenizer and chat template; a hub folder may hold the same weights again in other formats.
WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def find_model(name: str) -> Path:
    """The folder of a model: `name` itself if it is one, else the hub's model of that name, downloaded if need be.

    Raises ModelNotFoundError when neither is there, or the hub cannot be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    import huggingface_hub  # here, as a folder needs no hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED_FILES))
    except (huggingface_hub.errors.HFValidationError, OSError) as error:  # no network and no such model are OSErrors
        raise ModelNotFoundError(f"{name!r} is no folder here, and the hub did not give it: {error}") from error
