"""config.json, as transformers 4 and 5 write it: read once, refused by name where it cannot be run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minivllm import STORYTELLER
from minivllm.config import ARCHITECTURES, ConfigError, ModelConfig, RopeConfig
from minivllm.layers.numpy.rotary_embedding import rotary_angles
from minivllm.layers.rotary_embedding import RotaryEmbedding

RAW = json.loads((STORYTELLER / "config.json").read_text(encoding="utf-8"))
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(*fields: str) -> dict:
    """The storyteller's config without some fields."""
    return {name: value for name, value in RAW.items() if name not in fields}


def rope_forms(theta: float, scaling: dict | None) -> dict[str, dict]:
    """The same rotation as different versions of transformers write it."""
    kind = {"rope_type": "default"} if scaling is None else scaling
    older = None if scaling is None else {**scaling, "type": scaling["rope_type"]}
    if older:
        del older["rope_type"]
    return {
        "transformers 4": {"rope_theta": theta, "rope_scaling": scaling},
        "transformers 4, key 'type'": {"rope_theta": theta, "rope_scaling": older},
        "transformers 5": {"rope_parameters": {**kind, "rope_theta": theta}},
        "both": {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": {**kind, "rope_theta": theta}},
    }


# --- the rotation ---


@pytest.mark.parametrize("theta", [1e3, 1e4, 1e6, 5e6])
@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=["", "linear", "llama3"]
)
def test_both_config_forms_give_transformers_own_angles(theta: float, scaling: dict | None) -> None:
    """A theta that is looked for under one name only is a default in silence; a dict is no key of a cache."""
    forms = rope_forms(theta, scaling)
    found = {name: RopeConfig.from_dict(form) for name, form in forms.items()}
    assert len(set(found.values())) == 1  # and hashable: an lru_cache takes it
    shape = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, **forms["transformers 5"]))
    cos, sin = theirs(torch.zeros(1), torch.arange(512)[None])  # [1, 512, 64], both halves of the head alike
    ours = RotaryEmbedding(64, 512, found["transformers 4"])
    assert torch.allclose(ours.cos, cos[0, :, :32], atol=5e-5)
    assert torch.allclose(ours.sin, sin[0, :, :32], atol=5e-5)
    exact = rotary_angles(np.arange(512), 64, found["transformers 4"])
    assert np.abs(np.cos(exact) - ours.cos.numpy()).max() < 1e-4


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_unknown_rope_scaling_is_refused_by_name(kind: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"rope scaling '{kind}' is not supported.*llama3"):
        ModelConfig.from_dict({**without("rope_parameters"), field: {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    "raw", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}}]
)
def test_rotating_a_part_of_the_head_is_refused(raw: dict) -> None:
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.\d+ is not supported"):
        RopeConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("linear", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
    ],
)
def test_scaling_that_leaves_out_a_number_is_refused(kind: str, field: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != field} | {"rope_type": kind}
    with pytest.raises(ConfigError, match=f"no '{field}'"):
        RopeConfig.from_dict({"rope_parameters": scaling})


def test_a_theta_of_null_is_the_default() -> None:
    assert RopeConfig.from_dict({"rope_theta": None}) == RopeConfig()
    assert RopeConfig.from_dict({"rope_parameters": {"rope_type": None, "rope_theta": None}}) == RopeConfig()


# --- shapes ---


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param({"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}, 128, id="Qwen3-0.6B"),
        pytest.param({"hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128}, 128, id="TensorRT-LLM#5912"),
        pytest.param({"hidden_size": 2560, "num_attention_heads": 32, "head_dim": None}, 128, id="EAGLE#315"),
        pytest.param({"hidden_size": 1024, "num_attention_heads": 8}, 128, id="entrenar#262"),
    ],
)
def test_head_dim_of_qwen3_is_read_not_divided(sizes: dict, expected: int) -> None:
    config = ModelConfig.from_dict({**without("head_dim"), **sizes})
    assert config.head_dim == expected


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"])
def test_head_dim_of_the_others_is_divided_where_it_is_not_given(architecture: str) -> None:
    raw = {**without("head_dim"), "architectures": [architecture]}
    assert ModelConfig.from_dict(raw).head_dim == 256 // 8
    assert ModelConfig.from_dict({**raw, "head_dim": 48}).head_dim == 48


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    raw = {name: RAW[name] for name in kept} | {"num_attention_heads": 8, "num_key_value_heads": 4}
    name = architecture.removesuffix("ForCausalLM") + "Config"
    theirs = getattr(transformers, name)(**raw)
    ours = ModelConfig.from_dict({**raw, "architectures": [architecture]})
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // 8)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures_differ_in_norms_and_biases(architecture: str) -> None:
    config = ModelConfig.from_dict({**RAW, "architectures": [architecture]})
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert not config.o_bias


def test_attention_bias_is_on_all_four_projections() -> None:
    config = ModelConfig.from_dict({**RAW, "attention_bias": True})
    assert config.qkv_bias and config.o_bias


def test_fewer_heads_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads 6 is not a multiple of num_key_value_heads 4"):
        ModelConfig.from_dict({**RAW, "num_attention_heads": 6})
    with pytest.raises(ConfigError, match="head_dim 63 is odd"):
        ModelConfig.from_dict({**RAW, "head_dim": 63})


# --- bad input ---


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    + ["max_position_embeddings"],
)
def test_a_missing_field_is_named(field: str) -> None:
    for raw in (without(field), {**RAW, field: None}):
        with pytest.raises(ConfigError, match=f"config.json has no '{field}'; it has .*architectures"):
            ModelConfig.from_dict(raw)


@pytest.mark.parametrize("size", [0, -1, 2.5, "256", [4]])
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_a_size_that_is_no_positive_integer_is_refused(field: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is .*: a size must be a positive integer"):
        ModelConfig.from_dict({**RAW, field: size})


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["Qwen3MoeForCausalLM"], [], None])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(architectures: list[str] | None) -> None:
    named = architectures[0] if architectures else r"\(none\)"
    with pytest.raises(ConfigError, match=f"architecture {named} is not supported; supported are Qwen3ForCausalLM"):
        ModelConfig.from_dict({**RAW, "architectures": architectures})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window 4096"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "use_sliding_window": None}, "sliding_wind"),
    ],
)
def test_features_that_would_change_answers_are_refused(changes: dict, message: str) -> None:
    raw = {name: value for name, value in {**RAW, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


def test_a_window_that_is_switched_off_is_no_hindrance() -> None:
    assert ModelConfig.from_dict({**RAW, "use_sliding_window": False, "sliding_window": 4096})
    assert ModelConfig.from_dict({**RAW, "architectures": ["MistralForCausalLM"], "sliding_window": None})


# --- folders ---


def folder_with(folder: Path, **files: object) -> Path:
    """A folder with JSON files; a string is written as it is."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing: a model folder has"):
        ModelConfig.from_folder(tmp_path)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    folder_with(tmp_path, config='{"hidden_size": ')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"null", b'"config"', b"\xff\xfe{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_no_table_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder_with(tmp_path, config=RAW)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} is not (a table|valid JSON)"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        pytest.param(151645, [151645, 151643], (151645, 151643), id="vLLM#4180"),
        pytest.param([1, 2], None, (1, 2), id="exllamav2#803"),
        pytest.param(7, None, (7,), id="one"),
        pytest.param(0, 0, (0,), id="zero is an id"),
        pytest.param(None, None, (), id="none"),
        pytest.param(3, "no file", (3,), id="no generation_config.json"),
    ],
)
def test_every_id_that_ends_a_text_is_kept(
    tmp_path: Path, in_config: object, in_generation: object, expected: tuple[int, ...]
) -> None:
    folder_with(tmp_path, config={**RAW, "eos_token_id": in_config})
    if in_generation != "no file":
        folder_with(tmp_path, generation_config={} if in_generation is None else {"eos_token_id": in_generation})
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_is_found_under_both_names(field: str) -> None:
    assert ModelConfig.from_dict({**without("dtype", "torch_dtype"), field: "float16"}).dtype == "float16"
