"""Each layer in PyTorch equals its readable twin in NumPy, for shapes of every kind; and has the properties it must."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minivllm.config import RopeConfig
from minivllm.kernels.reference import causal_attention
from minivllm.layers.attention import Attn
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.numpy import attention, embedding, layernorm, mlp, rotary_embedding
from minivllm.layers.rotary_embedding import RotaryEmbedding

few = settings(max_examples=25, deadline=None)
counts, sizes = st.integers(1, 9), st.integers(1, 40)
seeds = st.integers(0, 2**16)
ROPES = [
    RopeConfig(),
    RopeConfig(theta=1e6),
    RopeConfig(kind="linear", factor=4.0),
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
]


def exact(tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor as float64."""
    return tensor.detach().double().numpy()


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# --- RMSNorm ---


@few
@given(num_tokens=counts, size=sizes, seed=seeds)
def test_rms_norm_equals_its_twin(num_tokens: int, size: int, seed: int) -> None:
    x, weight = normal(seed, (num_tokens, 3, size), (size,))
    norm = RMSNorm(size, eps=1e-5)
    norm.weight.data.copy_(weight)
    assert np.abs(exact(norm(x)) - layernorm.rms_norm(exact(x), exact(weight), 1e-5)).max() < 1e-5


def test_rms_norm_of_zeros_is_zero_and_of_16_bits_is_16_bits() -> None:
    norm = RMSNorm(8, eps=1e-6)
    assert not norm(torch.zeros(2, 8)).any()
    x = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square is too large for 16 bits
    out = norm.half()(x)
    assert out.dtype == torch.float16 and torch.equal(out, torch.ones_like(x))


# --- rotation ---


@few
@given(num_heads=counts, half=sizes, positions=st.lists(st.integers(0, 511), min_size=1, max_size=6), seed=seeds)
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope.kind}-{rope.theta:g}")
def test_rotation_equals_its_twin(rope: RopeConfig, num_heads: int, half: int, positions: list[int], seed: int) -> None:
    q, k = normal(seed, (len(positions), num_heads, 2 * half), (len(positions), 1, 2 * half))
    turned = RotaryEmbedding(2 * half, 512, rope)(torch.tensor(positions), q, k)
    angles = rotary_embedding.rotary_angles(np.array(positions), 2 * half, rope)
    for ours, plain in zip(turned, (q, k), strict=True):
        assert np.abs(exact(ours) - rotary_embedding.rotate(exact(plain), angles)).max() < 5e-4


@few
@given(first=st.integers(0, 200), apart=st.integers(0, 200), shift=st.integers(0, 100), seed=seeds)
def test_rotation_keeps_lengths_and_tells_only_distances(first: int, apart: int, shift: int, seed: int) -> None:
    x, y = (exact(tensor) for tensor in normal(seed, (1, 1, 16), (1, 1, 16)))

    def dot(position: int, other: int) -> float:
        angles = rotary_embedding.rotary_angles(np.array([position, other]), 16, RopeConfig())
        a, b = rotary_embedding.rotate(x, angles[:1]), rotary_embedding.rotate(y, angles[1:])
        assert np.isclose(np.linalg.norm(a), np.linalg.norm(x))
        return float((a * b).sum())

    assert np.isclose(dot(first, first + apart), dot(first + shift, first + apart + shift))


def test_rotation_table_stays_float32_in_a_16_bit_model() -> None:
    rotary = RotaryEmbedding(8, 2048, RopeConfig())
    q = torch.randn(1, 2, 8).bfloat16()
    turned, _ = rotary(torch.tensor([2000]), q, q)
    angles = rotary_embedding.rotary_angles(np.array([2000]), 8, RopeConfig())
    assert turned.dtype == torch.bfloat16
    assert np.abs(exact(turned) - rotary_embedding.rotate(exact(q), angles)).max() < 2e-2


# --- attention ---


@few
@given(
    kv_heads=st.integers(1, 3), group=st.integers(1, 5), head_dim=sizes, past=st.integers(0, 9), new=counts, seed=seeds
)
def test_attention_equals_its_twin(kv_heads: int, group: int, head_dim: int, past: int, new: int, seed: int) -> None:
    total = past + new
    q, k, v = normal(seed, (new, kv_heads * group, head_dim), (total, kv_heads, head_dim), (total, kv_heads, head_dim))
    q_positions, k_positions = torch.arange(past, total), torch.arange(total)
    ours = causal_attention(q, k, v, q_positions, k_positions, head_dim**-0.5)
    twin = attention.causal_attention(*map(exact, (q, k, v)), q_positions.numpy(), k_positions.numpy(), head_dim**-0.5)
    assert ours.shape == q.shape
    assert np.abs(exact(ours) - twin).max() < 1e-5


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_shows(shift: int) -> None:
    """mlir-air#1427, #1450: a tolerance that hides a wrong mask is no test; ours must see it."""
    q, k, v = normal(0, (6, 4, 16), (6, 2, 16), (6, 2, 16))
    positions = torch.arange(1, 7)
    right = causal_attention(q, k, v, positions, positions, 0.25)
    wrong = causal_attention(q, k, v, positions + shift, positions, 0.25)
    seen = slice(1, None) if shift < 0 else slice(None, -1)  # the first query sees nothing, or the last sees all
    assert ((wrong - right)[seen].abs().amax(dim=(1, 2)) > 1e-2).all()


def test_later_tokens_change_nothing_and_earlier_ones_do() -> None:
    q, k, v = normal(1, (5, 4, 16), (5, 2, 16), (5, 2, 16))
    attn, positions = Attn(num_heads=4, head_dim=16, num_kv_heads=2), torch.arange(5)
    before = attn(q, k, v, positions)
    k[3], v[3] = 9.0, 9.0
    after = attn(q, k, v, positions)
    assert torch.equal(before[:3], after[:3])
    assert not torch.isclose(before[3:], after[3:]).all(dim=2).any()


def test_query_heads_share_key_heads_in_order() -> None:
    q, k, v = normal(2, (3, 6, 8), (3, 2, 8), (3, 2, 8))
    positions = torch.arange(3)
    grouped = causal_attention(q, k, v, positions, positions, 1.0)
    spread = [tensor.repeat_interleave(3, dim=1) for tensor in (k, v)]
    assert torch.allclose(grouped, causal_attention(q, *spread, positions, positions, 1.0), atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (1e4 * tensor for tensor in normal(3, (4, 2, 8), (4, 2, 8), (4, 2, 8)))
    positions = torch.arange(4)
    assert causal_attention(q, k, v, positions, positions, 1.0).isfinite().all()
    assert np.isfinite(attention.softmax(np.array([[1e6, -1e6, 0.0]]))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in normal(4, (8, 4, 16), (8, 2, 16), (8, 2, 16)))
    positions = torch.arange(8)
    ours = causal_attention(q, k, v, positions, positions, 0.25)
    twin = attention.causal_attention(*map(exact, (q, k, v)), positions.numpy(), positions.numpy(), 0.25)
    assert ours.dtype == dtype
    assert np.abs(exact(ours) - twin).max() < 2 * torch.finfo(dtype).eps


# --- the feed-forward network and the two ends ---


@few
@given(num_tokens=counts, hidden_size=sizes, intermediate_size=sizes, seed=seeds)
def test_mlp_equals_its_twin(num_tokens: int, hidden_size: int, intermediate_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = GatedMLP(hidden_size, intermediate_size)
    x = torch.randn(num_tokens, hidden_size)
    matrices = [exact(linear.weight) for linear in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    assert np.abs(exact(layer(x)) - mlp.gated_mlp(exact(x), *matrices)).max() < 1e-5


@few
@given(vocab_size=sizes, hidden_size=sizes, tokens=st.lists(st.integers(0, 2**16), min_size=1, max_size=6), seed=seeds)
def test_the_two_ends_equal_their_twins(vocab_size: int, hidden_size: int, tokens: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    table, ids = nn.Embedding(vocab_size, hidden_size), torch.tensor(tokens) % vocab_size
    head = nn.Linear(hidden_size, vocab_size, bias=False)
    head.weight = table.weight
    vectors = embedding.embed(ids.numpy(), exact(table.weight))
    assert np.array_equal(exact(table(ids)), vectors)
    assert np.abs(exact(head(table(ids))) - embedding.compute_logits(vectors, exact(table.weight))).max() < 1e-4
