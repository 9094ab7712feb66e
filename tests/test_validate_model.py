"""validate_model says equal where it is, and exits with 1 where it is not."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minivllm import STORYTELLER, validate_model
from minivllm.engine import fast_runner


def test_the_storyteller_is_equal_in_every_setting(capsys: pytest.CaptureFixture) -> None:
    assert validate_model.main(["--tokens", "16", "--backends", "torch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 8 and all(line.endswith("equal") for line in lines[2:])
    scarce = [line for line in lines[2:] if "scarce" in line]
    assert len(scarce) == 4 and all(int(line.split()[4]) > 0 for line in scarce), "nobody was preempted"
    found = {tuple(line.split()[1:4]): int(line.split()[5]) for line in lines[2:]}
    assert found["5", "on", "ample"] == found["5", "on", "scarce"] == 2 * validate_model.BLOCK_SIZE, "no prefix hit"
    assert not any(tokens for (_, cache, _), tokens in found.items() if cache == "off")


def test_a_planted_fault_is_exit_code_one(capsys: pytest.CaptureFixture) -> None:
    pad_tables = fast_runner.pad_tables

    def swapped(*tables: Any) -> np.ndarray:
        return pad_tables(*tables)[::-1].copy()

    with patch.object(fast_runner, "pad_tables", swapped):
        assert validate_model.main(["--tokens", "4", "--backends", "torch"]) == 1
    assert "differ" in capsys.readouterr().out


def test_other_weights_are_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The prefill logits are compared too: an oracle with other weights cannot pass by saying the same words."""
    from safetensors.torch import load_file, save_file

    for file in STORYTELLER.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] *= 1.0625  # scales every logit, and changes no greedy token
    save_file(weights, tmp_path / "model.safetensors")
    oracle = validate_model.Oracle
    with patch.object(validate_model, "Oracle", lambda folder, device: oracle(str(tmp_path), device)):
        assert validate_model.main(["--tokens", "2", "--backends", "torch"]) == 1
    assert "MORE than" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "agrees"),
    [([7, 2], True), ([7, 1, 9], True), ([7, 0, 9], False), ([7], False), ([], False), ([7, 2, 9], False)],
    ids=["same", "the other of a tie", "neither of a tie", "shorter", "empty", "longer"],
)
def test_only_a_token_of_the_tie_is_no_difference(ours: list[int], agrees: bool) -> None:
    oracle = validate_model.Oracle(str(STORYTELLER), torch.device("cpu"))
    tied = torch.tensor([[0.0, 5.0, 5.00001]])
    with patch.object(oracle, "logits", return_value=tied):
        assert oracle.agrees([3], ours, [7, 2]) is agrees


def test_a_tie_is_within_the_rounding_of_a_sum() -> None:
    assert validate_model.is_tie(torch.tensor([0.0, 5.0, 5.00001]), 1)
    assert not validate_model.is_tie(torch.tensor([0.0, 5.0, 5.01]), 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_first_difference(ours: list[int], theirs: list[int], index: int | None) -> None:
    assert validate_model.first_difference(ours, theirs) == index
