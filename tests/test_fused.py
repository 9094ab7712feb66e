"""The fused kernels against their PyTorch twins, and all of them compiled for GPUs that need not be here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, DTYPES

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.core.sequence import Sequence
from minivllm.kernels import reference
from minivllm.layers.sampler import SamplingRow, sample
from minivllm.sampling_params import SamplingParams

fused = pytest.importorskip("minivllm.kernels.fused", reason="triton has no wheels for this platform")
# Relative to 1 + |value|: up to three roundings, which the interpreter does towards zero for bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2.5e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype == want.dtype and found.shape == want.shape
    error = ((found.float() - want.float()).abs() / (1 + want.float().abs())).max()
    assert error <= TOLERANCE[want.dtype], f"off by {error:.2e}"  # NaN is not <= anything


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_takes_known_ids_from_the_step_and_unknown_ones_from_the_device(dtype):
    weight, sampled = random(11, 40, dtype=dtype), torch.tensor([7, 3, 10], device=DEVICE)
    ids = torch.tensor([0, -1, 10, -3, -2], device=DEVICE)
    for module in (fused, reference):
        assert torch.equal(module.embed(ids, sampled, weight), weight[[0, 7, 10, 10, 3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 40, 1024])
@pytest.mark.parametrize("adds", [True, False], ids=["add", "first"])
def test_add_rms_norm(adds, size, dtype):
    x, residual, weight = (random(5, size, dtype=dtype, seed=s) for s in range(3))
    ours, theirs = (residual.clone(), residual.clone()) if adds else (None, None)
    assert_near(fused.add_rms_norm(x, ours, weight[0], 1e-6), reference.add_rms_norm(x, theirs, weight[0], 1e-6))
    if adds:
        assert_near(ours, theirs)  # not equal: the interpreter rounds to bf16 towards zero


def rope_inputs(tokens, heads, kv_heads, head_dim, dtype, norm=True, block_size=4):
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = random(64, head_dim // 2, seed=1)
    weights = [random(head_dim, dtype=dtype, seed=s) for s in (2, 3)] if norm else [None, None]
    positions = torch.arange(tokens, device=DEVICE) * 7 % 64
    slots = torch.randperm(9 * block_size, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    caches = [torch.full((9, block_size, kv_heads, head_dim), 7.0, dtype=dtype, device=DEVICE) for _ in "kv"]
    return [qkv, positions, angles.cos(), angles.sin(), *weights, 1e-6], caches, slots


def check_rope(tokens, heads, kv_heads, head_dim, dtype, norm=True, skip=()):
    inputs, caches, slots = rope_inputs(tokens, heads, kv_heads, head_dim, dtype, norm)
    slots[list(skip)] = -1
    ours, theirs = [c.clone() for c in caches], [c.clone() for c in caches]
    q = fused.rope_and_store(*inputs, *ours, slots)
    assert_near(q, reference.rope_and_store(*inputs, *theirs, slots))
    for found, want in zip(ours, theirs, strict=True):
        assert_near(found, want)
        assert torch.equal(found == 7.0, want == 7.0)  # written: the same slots, and no others


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128], ids=lambda d: f"vllm#25030-dim{d}")
def test_rope_and_store_head_dims(head_dim, dtype):
    check_rope(5, 4, 2, head_dim, dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (6, 2), (14, 2), (16, 8)])
@pytest.mark.parametrize("norm", [True, False], ids=["qk-norm", "plain"])
def test_rope_and_store_group_sizes(heads, kv_heads, norm):
    check_rope(3, heads, kv_heads, 16, torch.float32, norm)


def test_padded_rows_write_nowhere():
    """[vllm#43810, rvllm#32] slot −1 is neither the last slot nor the first."""
    check_rope(6, 4, 2, 16, torch.float32, skip=(0, 3, 5))
    inputs, caches, slots = rope_inputs(6, 4, 2, 16, torch.float32)
    fused.rope_and_store(*inputs, *caches, torch.full_like(slots, -1))
    assert all((cache == 7.0).all() for cache in caches)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [8, 56, 1500])
def test_silu_mul(inner, dtype):
    gate_up = 3 * random(4, 2 * inner, dtype=dtype)
    assert_near(fused.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("num_in", "num_out"), [(40, 97), (1500, 5), (64, 37)])
def test_linear(num_in, num_out, rows, dtype):
    x, weight, bias = (
        random(rows, num_in, dtype=dtype),
        random(num_out, num_in, dtype=dtype, seed=1),
        random(num_out, dtype=dtype, seed=2),
    )
    weight /= num_in**0.5
    assert_near(fused.linear(x, weight, bias), reference.linear(x, weight, bias))
    assert_near(fused.linear(x, weight), reference.linear(x, weight))


def drawn(logits, rules, seeds, lengths, filtered=True):
    """What the fused sampler takes, and what layers/sampler.py takes, for the same rows.

    rules: (temperature, top_k, top_p, min_p) of each row.
    """
    columns = [torch.tensor(rules, device=DEVICE), torch.tensor(seeds, device=DEVICE), torch.tensor(lengths).to(DEVICE)]
    out = torch.empty(len(logits), dtype=torch.int64, device=DEVICE)
    found = fused.sample_plain(logits, *columns, out, filtered=filtered)
    names = ("temperature", "top_k", "top_p", "min_p")
    rows = [
        SamplingRow(Sequence(i, [1] * length), SamplingParams(**dict(zip(names, rule, strict=True))), seed)
        for i, (rule, seed, length) in enumerate(zip(rules, seeds, lengths, strict=True))
    ]
    return found.tolist(), sample(logits.float().clone(), rows)


def at(temperature):
    return (temperature, 0, 1.0, 0.0)


@pytest.mark.parametrize("vocab_size", [7, 4096, 9000])
def test_the_sampler_draws_what_the_readable_one_draws(vocab_size):
    """[vllm#51226] the same seeds give the same tokens on either path, greedy and random rows in one batch."""
    logits = random(6, vocab_size)
    rules = [at(t) for t in (0.0, 1.0, 0.6, 0.0, 2.0, 5.0)]
    found, want = drawn(logits, rules, [0, 1, -(2**62), 2**40, 77, 78], [1, 2, 3, 40, 5, 6], filtered=False)
    assert found == want
    assert found[0] == int(logits[0].argmax())


def test_random_rows_are_random():
    """[aprender#2027] a batched path that is greedy in secret would draw one token only."""
    logits = torch.zeros(64, 50, device=DEVICE)
    found, _ = drawn(logits, [at(1.0)] * 64, list(range(64)), [3] * 64)
    assert len(set(found)) > 25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_first_is_taken(dtype):
    logits = torch.zeros(2, 5000, device=DEVICE, dtype=dtype)
    logits[0, [4095, 4096, 4999]] = 1.0
    found, _ = drawn(logits, [at(0.0), at(0.0)], [0, 0], [1, 1])
    assert found == [4095, 0]


FILTERS = {
    "none": (0, 1.0, 0.0), "k": (20, 1.0, 0.0), "k1": (1, 1.0, 0.0), "k-beyond-the-vocabulary": (10**6, 1.0, 0.0),
    "p": (0, 0.9, 0.0), "p-tiny": (0, 1e-6, 0.0), "min_p": (0, 1.0, 0.2), "min_p-1": (0, 1.0, 1.0),
    "qwen3": (20, 0.95, 0.0), "all": (50, 0.8, 0.05),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FILTERS)
def test_filters_let_pass_what_the_readable_sampler_lets_pass(name, dtype):
    """Rows with and without filters in one batch; 16-bit logits have many equal ones, and ties are kept together."""
    logits = 3 * random(24, 5000, dtype=dtype)
    rules = [(0.7, *FILTERS[name]), (1.5, *FILTERS[name]), at(0.0), at(1.0)] * 6
    found, want = drawn(logits, rules, list(range(24)), [5] * 24)
    assert found == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_logits_and_ruled_out_ones(dtype):
    """The bits of negative numbers sort the other way round; a banned token's logit is −∞."""
    logits = random(12, 300, dtype=dtype) - 40
    logits[:, 5:] = float("-inf")
    rules = [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (2.0, 20, 0.9, 0.01)] * 4
    found, want = drawn(logits, rules, list(range(12)), [9] * 12)
    assert found == want and max(found) < 5


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 600),
    st.integers(-1, 700),
    st.floats(0.0078125, 1.0, width=32),
    st.floats(0.0, 1.0, width=32),
    st.floats(0.125, 4.0, width=32),
)
def test_any_filter(vocab_size, top_k, top_p, min_p, temperature):
    rules = [(temperature, max(top_k, 0), top_p, min_p)] * 8
    found, want = drawn(2 * random(8, vocab_size), rules, list(range(8)), [3] * 8)
    assert found == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_the_kth_logit(dtype):
    logits = random(3, 700, dtype=dtype)
    rules = torch.tensor([(1.0, k, 1.0, 0.0) for k in (1, 7, 699)], device=DEVICE)
    lowest = torch.empty(3, device=DEVICE)
    bits = fused.KEY_BITS[dtype]
    fused.lowest_kernel[(3,)](logits, rules, lowest, 700, TILE=256, BITS=bits)
    ordered = logits.float().sort(descending=True).values
    for row, k in enumerate((1, 7, 699)):
        assert (logits[row].float() >= lowest[row]).sum() == (ordered[row] >= ordered[row, k - 1]).sum() >= k


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 3), st.sampled_from([2, 12, 32]), st.booleans())
def test_any_shape(tokens, group, kv_heads, head_dim, norm):
    check_rope(tokens, group * kv_heads, kv_heads, head_dim, torch.float32, norm)


COMPILE = """
import json, sys, types, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sys.modules["minivllm"] = types.ModuleType("minivllm")  # without its __init__, which would choose the interpreter
sys.modules["minivllm"].__path__ = [sys.argv[1]]
from minivllm.kernels import fused
P = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
def cases(p, early):
    i64, f, i = "*i64", "*fp32", "i32"
    yield fused.embed_kernel, [i64, i64, p, p], dict(HIDDEN=1024, PADDED=1024)
    yield fused.add_rms_norm_kernel, [p, p, p, p, "fp32"], dict(HIDDEN=1024, PADDED=1024, ADD=True, EARLY=early)
    yield fused.rope_and_store_kernel, [p, i64, f, f, p, p, "fp32", p, p, p, i64, i, i, i], dict(
        BLOCK_SIZE=16, HEADS=16, PADDED_HEADS=16, KV=8, PADDED_KV=8, HALF=64, PADDED_HALF=64, NORM=True, EARLY=early)
    yield fused.silu_mul_kernel, [p, p], dict(INNER=3072, TILE=1024, EARLY=early)
    for m in (1, 4):
        tile = fused.gemv_tile(m, 3072, 1024)
        tile.pop("num_warps")
        yield fused.gemv_kernel, [p, p, p, p, i], dict(M=m, PADDED_M=m, K=3072, BIAS=False, EARLY=early, **tile)
    for filtered in (False, True):
        yield fused.best_kernel, [p, f, f, i64, "*i32", f, "*i32", i, i], dict(TILE=4096, FILTERED=filtered)
    yield fused.lowest_kernel, [p, f, f, i], dict(TILE=4096, BITS=32 if p == "*fp32" else 16)
    yield fused.best_part_kernel, [f, "*i32", i64, i], dict(PADDED_PARTS=64)
for p in P.values():
    for arch in (80, 90):
        for kernel, types, constants in cases(p, arch == 90):
            names = kernel.arg_names
            signature = dict(zip(names, types)) | {name: "constexpr" for name in constants}
            source = ASTSource(kernel, signature, constexprs={(names.index(n),): v for n, v in constants.items()})
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32))
            print(json.dumps([kernel.__name__, p, arch, len(made.asm["cubin"])]))
"""


def test_every_kernel_compiles_for_two_generations():
    """The interpreter accepts what the compiler refuses; cubins can be made on a machine without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    path = Path(fused.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", COMPILE, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {name for name, thing in vars(fused).items() if name.endswith("_kernel")}
    assert {row[0] for row in made} == kernels
    assert all(size > 1000 for *_, size in made)
