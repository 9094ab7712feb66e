# Generated from notebooks/01_qwen3_from_scratch.ipynb, 08_scheduler.ipynb, 09_engine.ipynb, 10_gpu_performance.ipynb by
# tools/export.py; edit there.
"""What a model folder's config.json says: read once, checked once, named once."""

import json
from dataclasses import dataclass
from pathlib import Path


class ConfigError(ValueError):
    """A config.json that this engine cannot run. The message names the field, its value and what is supported."""


def require(raw: dict, field: str) -> object:
    """A field that must be there. Raises ConfigError, naming the field and those that were found."""
    if raw.get(field) is None:
        raise ConfigError(f"config.json has no {field!r}; it has {', '.join(sorted(raw))}")
    return raw[field]


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. Frozen, so that it is hashable.

    theta: base of the geometric series of frequencies.
    kind: "default", "linear" (all frequencies divided by `factor`) or "llama3" (only the slow ones,
        https://arxiv.org/abs/2407.21783, with a smooth passage between the two bounds below).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_dict(cls, raw: dict) -> "RopeConfig":
        """From a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

        Raises ConfigError for a kind of scaling that is not in ROPE_KINDS, and for rotating a part of the head only.
        """
        found = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        kind = found.get("rope_type") or found.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise ConfigError(f"rope scaling {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
        scaling = {name: require(found, name) for name in ROPE_KINDS[kind]}
        part = found.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        if part != 1.0:
            raise ConfigError(f"partial_rotary_factor {part} is not supported: the whole head is rotated")
        theta = found.get("rope_theta") or raw.get("rope_theta") or cls.theta
        return cls(theta=float(theta), kind=kind, **scaling)


# The kinds of scaling that we know, and what each of them must say.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder, under the names of the Hugging Face config.

    head_dim is a field of its own: num_attention_heads * head_dim may differ from hidden_size.
    qk_norm: RMSNorm on each query and key head; qkv_bias, o_bias: a bias on those projections.
    max_position_embeddings: the longest text, in tokens.
    dtype: of the stored weights; eos_token_ids: every id that ends a text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    architecture: str
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, raw: dict) -> "ModelConfig":
        """From the contents of a config.json. Raises ConfigError for a missing field or an unsupported feature."""
        refuse_unsupported(raw)
        architecture, bias = read_architecture(raw), bool(raw.get("attention_bias", False))
        return cls(
            **read_sizes(raw),
            architecture=architecture,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_dict(raw),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            o_bias=bias,
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            eos_token_ids=read_eos_token_ids(raw),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """From a model folder. Raises FileNotFoundError without a config.json, ConfigError when it cannot be run."""
        raw = read_json(Path(folder) / "config.json")
        generation = Path(folder) / "generation_config.json"
        ends = read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_dict(raw if ends is None else {**raw, "eos_token_id": ends})


ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")


def read_architecture(raw: dict) -> str:
    """The architecture's name. Raises ConfigError for one that is not in ARCHITECTURES."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return architecture


def refuse_unsupported(raw: dict) -> None:
    """Raises ConfigError for a feature that this decoder does not have and that would change the answers."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if raw.get("quantization_config"):
        raise ConfigError("quantization_config is set: quantized weights are not supported; use the bf16 checkpoint")
    if raw.get("mlp_bias"):
        raise ConfigError("mlp_bias true is not supported: the feed-forward network has no bias here")
    # Qwen has a switch for its window; Mistral uses one whenever its size is given.
    has_window = raw.get("use_sliding_window", read_architecture(raw) == "MistralForCausalLM")
    if has_window and raw.get("sliding_window"):
        raise ConfigError(f"sliding_window {raw['sliding_window']} is not supported: attention sees all tokens here")


def read_head_dim(raw: dict) -> int:
    """The size of one head. Without a field of its own it is 128 for Qwen3, hidden size / heads for the others."""
    if raw.get("head_dim") is not None:
        return raw["head_dim"]
    if read_architecture(raw) == "Qwen3ForCausalLM":
        return 128
    return require(raw, "hidden_size") // require(raw, "num_attention_heads")


def read_sizes(raw: dict) -> dict[str, int]:
    """The eight sizes of a ModelConfig.

    Raises ConfigError for one that is missing or no positive integer, for query heads that cannot share the key/value
    heads evenly, and for a head that cannot be rotated.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: require(raw, name) for name in (*names, "max_position_embeddings")}
    heads, kv_heads = sizes["num_attention_heads"], raw.get("num_key_value_heads")
    sizes |= {"num_key_value_heads": heads if kv_heads is None else kv_heads, "head_dim": read_head_dim(raw)}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} is {size!r}: a size must be a positive integer")
    if heads % sizes["num_key_value_heads"]:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if sizes["head_dim"] % 2:
        raise ConfigError(f"head_dim {sizes['head_dim']} is odd: a rotation needs pairs")
    return sizes


def read_eos_token_ids(raw: dict) -> tuple[int, ...]:
    """All ids that end a text: configs give none, one, or a list."""
    found = raw.get("eos_token_id")
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def read_json(path: Path) -> dict:
    """A JSON file. Raises FileNotFoundError naming the path, ConfigError when it is not JSON."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a model folder has a config.json and *.safetensors files")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a table of fields, but a {type(found).__name__}")
    return found


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits that every step keeps.

    Raises ConfigError for a limit below 1, and for a budget that cannot give each running sequence a token.
    """

    max_num_seqs: int = 256  # sequences that run at the same time
    max_num_batched_tokens: int = 2048  # tokens that one step computes: its budget
    max_model_len: int = 4096  # tokens of one sequence, prompt and answer together

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot give each of max_num_seqs="
                f"{self.max_num_seqs} running sequences one token per step: raise the first or lower the second"
            )


def num_blocks_that_fit(budget_bytes: int, *, model_bytes: int, peak_bytes: int, block_bytes: int) -> int:
    """Blocks of the KV cache in the memory that the engine may use, next to the weights and a step's activations.

    Raises ConfigError, naming the sizes and what to change, when there is no room for a single block.
    """
    num_blocks = (budget_bytes - model_bytes - peak_bytes) // block_bytes
    if num_blocks < 1:
        budget, model, peak, block = (n / 2**30 for n in (budget_bytes, model_bytes, peak_bytes, block_bytes))
        raise ConfigError(
            f"no memory is left for the KV cache: the engine may use {budget:.2f} GiB, the model takes {model:.2f} "
            f"GiB, the largest step {peak:.2f} GiB, and one block {block:.4f} GiB. Raise gpu_memory_utilization, lower "
            "max_num_batched_tokens (it sets the largest step), or take a smaller model."
        )
    return num_blocks


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine can be told. Names are vLLM's where it has them.

    model: a folder, or a name on the Hugging Face hub. max_model_len: tokens of one sequence (None: the model's limit).
    gpu_memory_utilization: share of the GPU's memory that weights, activations and cache may take together.
    num_kvcache_blocks: blocks of block_size tokens (None: as many as the memory holds). max_num_seqs: sequences at
    once. max_num_batched_tokens: tokens of one step. enable_prefix_caching: look for known prompts (chapter 04).
    device: "auto" is the GPU if there is one. kv_cache_dtype: only "auto", the model's.
    dtype: "auto" is the model's own on a GPU and float32 on a CPU. attention_backend: "auto" is "triton" on a GPU and
    "torch" on a CPU. seed: of the requests that bring none. enforce_eager: no recorded CUDA graphs.
    async_scheduling: launch a step before the tokens of the one before it are known. fused_kernels: run the model on
    packed weights and fused kernels. None: on a GPU.

    Raises ConfigError for a value outside its range.
    """

    model: str
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    num_kvcache_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    attention_backend: str = "auto"
    device: str = "auto"

    async_scheduling: bool | None = None
    fused_kernels: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; supported are {', '.join(map(repr, DTYPES))}")
        if self.kv_cache_dtype != "auto":
            raise ConfigError(f"kv_cache_dtype {self.kv_cache_dtype!r} is not supported; 'auto' is the model's dtype")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0, at most 1, not {self.gpu_memory_utilization}")
        for name in ("block_size", "num_kvcache_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


DTYPES = ("auto", "float32", "float16", "bfloat16")
