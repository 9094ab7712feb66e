"""Checks of chapter 01: shapes, rotation, counting work, counting parameters, packed requests."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Integral

import numpy as np
import torch

from minivllm import STORYTELLER
from minivllm.course.exercises import Case, exercise


@exercise("1.1")
def shapes_of_projections(q_shape: tuple, k_shape: tuple, o_shape: tuple) -> Iterator[Case]:
    for name, shape in {"q_proj": q_shape, "k_proj": k_shape, "o_proj": o_shape}.items():
        two = isinstance(shape, tuple | list) and len(shape) == 2
        yield two, f"{name}: a shape is a tuple of two sizes, (outputs, inputs), not {shape!r}"
    reversed_ = "the two sizes are swapped: PyTorch stores (outputs, inputs)"
    yield tuple(q_shape) != (2560, 4096), f"q_proj: {reversed_}"
    yield tuple(q_shape) == (4096, 2560), "q_proj: its outputs are all query heads, each of head_dim numbers"
    yield tuple(k_shape) != (2560, 1024), f"k_proj: {reversed_}"
    yield tuple(o_shape) != (4096, 2560), f"o_proj: {reversed_}"
    yield tuple(k_shape) == (1024, 2560), "k_proj: count the key/value heads, not the query heads"
    yield tuple(o_shape) == (2560, 4096), "o_proj: it starts from the outputs of all query heads"


@exercise("1.2")
def rotation_of_neighbours(rotate: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Iterator[Case]:
    quarter = np.full((1, 2), np.pi / 2)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    turned = np.asarray(rotate(x, quarter))
    yield turned.shape == x.shape, f"the shape: x has {x.shape}, you returned {turned.shape}"
    yield bool(np.allclose(x, [[[1, 2, 3, 4]]])), "your function changed its input"
    yield (
        not np.allclose(turned, [[[-3, -4, 1, 2]]]),
        "one token (1, 2, 3, 4), a quarter turn: you paired number i with number i + 2, as the checkpoints do",
    )
    yield (
        bool(np.allclose(turned, [[[-2, 1, -4, 3]]])),
        f"one token (1, 2, 3, 4), a quarter turn: the pair (1, 2) should become (-2, 1); you got {turned.round(2)}",
    )
    rng = np.random.default_rng(1)
    many, angles = rng.normal(size=(5, 3, 8)), rng.normal(size=(5, 4))
    expected = np.empty_like(many)
    for token, head, pair in np.ndindex(5, 3, 4):
        cos, sin = np.cos(angles[token, pair]), np.sin(angles[token, pair])
        x, y = many[token, head, 2 * pair : 2 * pair + 2]
        expected[token, head, 2 * pair : 2 * pair + 2] = x * cos - y * sin, y * cos + x * sin
    same = bool(np.allclose(rotate(many, angles), expected))
    yield same, "5 tokens, 3 heads: pair i of token t must turn by angles[t, i], in every head"


@exercise("1.3")
def work_of_a_chat(passed: int, repeated: int) -> Iterator[Case]:
    yield passed != 200 * 1_024, "passed: the text grows by one token with every step; you kept it at 1,024"
    yield passed != 224_900, "passed: the first step runs the prompt alone; you began one token later"
    yield passed == 224_700, "passed: each of the 200 steps runs the prompt and all that is written so far; add them up"
    yield (
        repeated == 224_700 - 1_223,
        "repeated: take away the passes that run a token for the first time (the last token written is never run)",
    )


@exercise("1.4")
def number_of_parameters(count: Callable[[object], int]) -> Iterator[Case]:
    from minivllm.config import ModelConfig
    from minivllm.model.qwen3 import Qwen3

    base = replace(ModelConfig.from_folder(STORYTELLER), vocab_size=32, hidden_size=12, num_hidden_layers=2)
    variants = {
        "our config with vocab_size 32, hidden_size 12 and 2 layers (head_dim stays 64)": base,
        "untied embeddings": replace(base, tie_word_embeddings=False),
        "a bias on q, k and v, no norm on q and k": replace(base, qkv_bias=True, qk_norm=False),
        "a bias on o too": replace(base, qkv_bias=True, o_bias=True),
        "as many key/value heads as query heads": replace(base, num_key_value_heads=8),
    }
    for name, config in variants.items():
        expected = sum(parameter.numel() for parameter in Qwen3(config).parameters())
        got = count(config)
        yield isinstance(got, Integral), f"{name}: return a whole number, not {got!r}"
        yield got == expected, f"{name}: you counted {got:,}, off by {got - expected:+,}"
    try:  # no machine has the memory for this one
        got = count(replace(base, vocab_size=10**15))
    except (RuntimeError, MemoryError):
        got = 0
    yield got > 10**15, "a vocabulary of 10¹⁵ words: count from the config; this model is too large to be built"


@exercise("1.5")
def packed_requests(packed: Callable[..., torch.Tensor]) -> Iterator[Case]:
    from minivllm.kernels.reference import causal_attention

    torch.manual_seed(0)
    for lengths in ([3, 2], [1, 4, 1], [5]):
        total = sum(lengths)
        q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
        got = packed(q, k, v, lengths, 0.5)
        yield isinstance(got, torch.Tensor), f"lengths {lengths}: return one tensor, not a {type(got).__name__}"
        yield got.shape == q.shape, f"lengths {lengths}: q has shape {list(q.shape)}, you returned {list(got.shape)}"
        start = 0
        for number, length in enumerate(lengths):
            rows = slice(start, start + length)
            own = torch.arange(length)
            alone = causal_attention(q[rows], k[rows], v[rows], own, own, 0.5)
            reason = f"lengths {lengths}: request {number} does not get what it gets alone"
            yield bool(torch.allclose(got[rows], alone, atol=1e-6)), reason
            start += length
