"""The contiguous cache has the inherited interface, and decoding with it changes no answer."""

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minivllm import STORYTELLER
from minivllm.core.kv_cache import KVCache, bytes_per_token
from minivllm.layers.attention import Attn, use_kv_cache
from minivllm.model.qwen3 import Qwen3

INHERITED = Path(__file__).parents[1] / "notebooks" / "inherited" / "minivllm" / "core" / "kv_cache.py"
LAYERS, ROWS, HEADS, SIZE = 2, 6, 3, 4
MODEL_SHAPE = {"num_layers": 6, "max_seq_len": 64, "num_kv_heads": 4, "head_dim": 64}


def inherited_class() -> type[torch.nn.Module]:
    spec = importlib.util.spec_from_file_location("inherited_kv_cache", INHERITED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KVCache


def kv(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, HEADS, SIZE, generator=generator).to(dtype)
    return k, v


@pytest.fixture
def cache() -> KVCache:
    return KVCache(LAYERS, ROWS, HEADS, SIZE)


# --- the interface ---


def test_interface_is_the_inherited_one() -> None:
    theirs = inherited_class()
    for name in ("__init__", "write", "read", "reset", "layer_cache"):
        ours, expected = inspect.signature(getattr(KVCache, name)), inspect.signature(getattr(theirs, name))
        assert list(ours.parameters) == list(expected.parameters), name
        assert [p.kind for p in ours.parameters.values()] == [p.kind for p in expected.parameters.values()], name
        assert [p.default for p in ours.parameters.values()] == [p.default for p in expected.parameters.values()], name


def test_buffers_have_the_inherited_shape_and_stay_out_of_checkpoints(cache: KVCache) -> None:
    assert cache.k_cache.shape == cache.v_cache.shape == (LAYERS, ROWS, HEADS, SIZE)
    assert [name for name, _ in cache.named_buffers()] == ["k_cache", "v_cache"]
    assert not cache.state_dict() and not list(cache.parameters())


class Tried:
    """A cache and what it answers: a result or a refusal, so that two caches can be compared.

    Which of two mistakes in one call is named first may differ.
    """

    def __init__(self, cache: torch.nn.Module) -> None:
        self.cache = cache

    def __call__(self, method: str, *arguments: object) -> object:
        try:
            found = getattr(self.cache, method)(*arguments)
        except (IndexError, ValueError):
            return "refused"
        return None if found is None else [tensor.tolist() for tensor in found]


layer_indices = st.integers(-1, LAYERS)
positions = st.one_of(
    st.integers(-2, ROWS + 1), st.lists(st.integers(-2, ROWS + 1), min_size=1, max_size=4, unique=True)
)
operations = st.one_of(
    st.tuples(st.just("write"), layer_indices, positions, st.integers(0, 1), st.integers(0, 99)),
    st.tuples(st.just("read"), layer_indices, st.integers(-1, ROWS + 1)),
    st.tuples(st.just("layer_cache"), layer_indices),
    st.tuples(st.just("reset")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=8))
def test_it_does_what_the_inherited_one_does(steps: list[tuple]) -> None:
    """The second inherited report found that class correct: it is the oracle, refusals included."""
    ours, theirs = Tried(KVCache(LAYERS, ROWS, HEADS, SIZE)), Tried(inherited_class()(LAYERS, ROWS, HEADS, SIZE))
    for step in steps:
        if step[0] == "write":
            _, layer, where, extra_tokens, seed = step
            count = 1 if isinstance(where, int) else len(where)
            where = where if isinstance(where, int) else torch.tensor(where)
            step = ("write", layer, where, *kv(count + extra_tokens, seed))
        assert ours(*step) == theirs(*step)
    assert torch.equal(ours.cache.k_cache, theirs.cache.k_cache)
    assert torch.equal(ours.cache.v_cache, theirs.cache.v_cache)


# --- refusals ---


@pytest.mark.parametrize("layer", [-1, LAYERS, 99])
def test_a_layer_outside_is_named(cache: KVCache, layer: int) -> None:
    for call in (lambda: cache.write(layer, 0, *kv(1)), lambda: cache.read(layer, 1), lambda: cache.layer_cache(layer)):
        with pytest.raises(IndexError, match=f"layer {layer} is outside this cache: it has layers 0 to 1"):
            call()


@pytest.mark.parametrize("outside", [-1, -ROWS, ROWS, 10**6])
@pytest.mark.parametrize("as_int", [True, False])
def test_a_position_outside_is_named_and_nothing_is_written(cache: KVCache, outside: int, as_int: bool) -> None:
    where = outside if as_int else torch.tensor([0, 1, outside])
    with pytest.raises(IndexError, match=f"position {outside} is outside this cache: it has rows 0 to 5"):
        cache.write(0, where, *kv(1 if as_int else 3))
    assert not cache.k_cache.any() and not cache.v_cache.any()


@pytest.mark.parametrize("end", [-1, ROWS + 1])
def test_an_end_outside_is_named(cache: KVCache, end: int) -> None:
    with pytest.raises(IndexError, match=f"end_pos {end} is outside this cache: it must be from 0 to 6"):
        cache.read(0, end)


@pytest.mark.parametrize(
    "shape", [(2, HEADS, SIZE), (3, HEADS, SIZE + 1), (3, 1, SIZE), (3, HEADS * SIZE), (1, 3, HEADS, SIZE)]
)
@pytest.mark.parametrize("wrong", ["k", "v"])
def test_a_wrong_shape_is_named_and_nothing_is_written(cache: KVCache, shape: tuple[int, ...], wrong: str) -> None:
    given_k, given_v = (
        ({"k": torch.ones(shape)} | {"v": kv(3)[1]}).values() if wrong == "k" else (kv(3)[0], torch.ones(shape))
    )
    with pytest.raises(ValueError, match=rf"{wrong} has shape .* for 3 position\(s\), expected \[3, 3, 4\]"):
        cache.write(0, torch.arange(3), given_k, given_v)
    assert not cache.k_cache.any() and not cache.v_cache.any()


def test_positions_must_be_a_row_of_integers(cache: KVCache) -> None:
    with pytest.raises(ValueError, match=r"positions have shape \[1, 2\]"):
        cache.write(0, torch.tensor([[0, 1]]), *kv(2))
    for where in (torch.tensor([0.0, 1.9]), 1.5, True, torch.tensor([True, False])):
        with pytest.raises(TypeError, match="they must be integers"):
            cache.write(0, where, *kv(2))


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, -4)])
def test_a_cache_of_nothing_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is empty: all must be"):
        KVCache(*sizes)


# --- conversions ---


@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint8, torch.int64])
def test_what_is_written_takes_the_caches_dtype(cache_dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    cache = KVCache(LAYERS, ROWS, HEADS, SIZE, dtype=cache_dtype)
    k, v = kv(2)
    cache.write(1, torch.tensor([4, 2], dtype=index_dtype), k, v)
    assert torch.equal(cache.layer_cache(1)[0][[4, 2]], k.to(cache_dtype))
    assert torch.equal(cache.layer_cache(1)[1][[4, 2]], v.to(cache_dtype))
    assert not cache.k_cache[0].any() and not cache.k_cache[1][[0, 1, 3, 5]].any()


def test_the_cache_can_live_on_another_device() -> None:
    cache = KVCache(LAYERS, ROWS, HEADS, SIZE, device="meta")
    assert cache.k_cache.device.type == cache.layer_cache(0)[1].device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_written_moves_to_the_caches_device() -> None:
    cache = KVCache(LAYERS, ROWS, HEADS, SIZE, device="cuda")
    k, v = kv(2)
    cache.write(0, torch.tensor([0, 1]), k, v)
    assert torch.equal(cache.read(0, 2)[0].cpu(), k)


def test_reading_gives_views_and_writing_keeps_no_gradients(cache: KVCache) -> None:
    k, v = (tensor.requires_grad_() for tensor in kv(2))
    cache.write(0, torch.arange(2), k, v)
    keys, values = cache.read(0, 2)
    assert not keys.requires_grad and not values.requires_grad
    assert keys.data_ptr() == cache.k_cache.data_ptr()
    assert [len(tensor) for tensor in cache.read(0, 0)] == [0, 0]


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "kib"),
    [
        pytest.param(40, 40, 128, 800, id="OPT-13B, Kwon et al. 2023, section 3"),
        pytest.param(28, 8, 128, 112, id="Qwen3-0.6B"),
        pytest.param(36, 8, 128, 144, id="Qwen3-4B"),
        pytest.param(1, 32, 128, 16, id="Llama-2-7B, one layer"),
    ],
)
def test_bytes_per_token_are_the_published_ones(layers: int, kv_heads: int, head_dim: int, kib: int) -> None:
    assert bytes_per_token(layers, kv_heads, head_dim, torch.bfloat16) == kib * 1024
    cache = KVCache(layers, 3, kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
    assert cache.k_cache.nbytes + cache.v_cache.nbytes == 3 * kib * 1024


# --- in the attention ---


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.integers(1, 5), min_size=1, max_size=5), group=st.integers(1, 3), seed=st.integers(0, 99))
def test_attention_piece_by_piece_is_attention_at_once(pieces: list[int], group: int, seed: int) -> None:
    total = sum(pieces)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(total, 2 * group, 8, generator=generator)
    k, v = torch.randn(2, total, 2, 8, generator=generator)
    attn = Attn(num_heads=2 * group, head_dim=8, num_kv_heads=2)
    at_once = attn(q, k, v, torch.arange(total))
    with use_kv_cache(attn, KVCache(1, total, 2, 8)):
        parts = zip(*(tensor.split(pieces) for tensor in (q, k, v, torch.arange(total))), strict=True)
        piecewise = torch.cat([attn(*part) for part in parts])
    assert torch.allclose(at_once, piecewise, atol=1e-5)


# --- in the model ---


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return Qwen3.from_pretrained(STORYTELLER)


@pytest.fixture(scope="module")
def text(model: Qwen3) -> Tensor:
    """40 tokens, the last 30 of which are the greedy choice of brute force."""
    ids = [0, 390, 12, 77, 1042, 8, 9, 256, 31, 5]
    for _ in range(30):
        ids.append(model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids)))[-1:]).argmax().item())
    return torch.tensor(ids)


def logits_in_pieces(model: Qwen3, ids: Tensor, pieces: list[int]) -> Iterator[Tensor]:
    """Logits of the text, handed to the model in pieces of these lengths."""
    for part, at in zip(ids.split(pieces), torch.arange(len(ids)).split(pieces), strict=True):
        yield model.compute_logits(model(part, at))


@pytest.mark.parametrize(
    "pieces", [[10] + [1] * 30, [1] * 40, [40], [7, 1, 20, 12]], ids=["decode", "1", "40", "mixed"]
)
def test_logits_are_those_of_brute_force(model: Qwen3, text: Tensor, pieces: list[int]) -> None:
    exact = model.compute_logits(model(text, torch.arange(40)))
    with use_kv_cache(model, KVCache(**MODEL_SHAPE)):
        cached = torch.cat(list(logits_in_pieces(model, text, pieces)))
    assert (cached - exact).abs().max() < 1e-4
    assert torch.equal(cached.argmax(-1)[9:-1], text[10:])


@pytest.mark.parametrize("shift", [-1, 1])
def test_positions_that_are_off_by_one_show_in_the_logits(model: Qwen3, text: Tensor, shift: int) -> None:
    exact = model.compute_logits(model(text[:11], torch.arange(11)))[-1]
    with use_kv_cache(model, KVCache(**MODEL_SHAPE)):
        model(text[:10], torch.arange(10))
        wrong = model.compute_logits(model(text[10:11], torch.tensor([10 + shift])))[0]
    assert (wrong - exact).abs().max() > 0.1


def test_a_used_cache_needs_no_reset(model: Qwen3, text: Tensor) -> None:
    cache = KVCache(**MODEL_SHAPE)
    cache.k_cache.fill_(torch.nan)  # what is read before it was written would show
    cache.v_cache.fill_(torch.nan)
    with use_kv_cache(model, cache):
        logits = torch.cat(list(logits_in_pieces(model, text, [8, 1, 1, 30])))
    assert logits.isfinite().all()


def test_a_16_bit_cache_under_a_32_bit_model(model: Qwen3, text: Tensor) -> None:
    exact = model.compute_logits(model(text, torch.arange(40)))
    with use_kv_cache(model, KVCache(**MODEL_SHAPE, dtype=torch.bfloat16)):
        cached = torch.cat(list(logits_in_pieces(model, text, [10] + [1] * 30)))
    assert 1e-4 < (cached - exact).abs().max() < 1.0
    assert (cached.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.9


def test_a_text_longer_than_the_cache_is_refused(model: Qwen3, text: Tensor) -> None:
    with use_kv_cache(model, KVCache(**MODEL_SHAPE | {"max_seq_len": 39})):
        with pytest.raises(IndexError, match="position 39 is outside this cache"):
            model(text, torch.arange(40))


def test_the_cache_is_taken_back_even_after_an_error(model: Qwen3, text: Tensor) -> None:
    before = model.compute_logits(model(text, torch.arange(40)))
    cache = KVCache(**MODEL_SHAPE)
    with pytest.raises(ZeroDivisionError):
        with use_kv_cache(model, cache):
            model(text, torch.arange(40))
            raise ZeroDivisionError
    kept = cache.k_cache.clone()
    assert torch.equal(model.compute_logits(model(text, torch.arange(40))), before)
    model(text[:5] + 1, torch.arange(5))
    assert torch.equal(cache.k_cache, kept)


def test_the_cache_is_no_part_of_the_model(model: Qwen3) -> None:
    buffers = len(list(model.buffers()))
    with use_kv_cache(model, KVCache(**MODEL_SHAPE)):
        assert len(list(model.buffers())) == buffers
        assert not any("kv_cache" in name for name in model.state_dict())


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_a_cache_of_another_shape_is_refused_with_both_shapes(model: Qwen3, field: str) -> None:
    cache = KVCache(**MODEL_SHAPE | {field: 3})
    with pytest.raises(ValueError, match=r"the cache has .* = \(.*3.*\), the model needs \[\(6, 4, 64\)\]"):
        with use_kv_cache(model, cache):
            pass
    assert all(module.kv_cache is None for module in model.modules() if isinstance(module, Attn))
