# Generated from notebooks/10_gpu_performance.ipynb by tools/export.py; edit there.
"""Triton kernels for everything between the matrix products, and for products with one to four rows.

Each has its twin, of the same name and signature, in kernels/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.launch import early_launch, start_early


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, eps, HIDDEN: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr
):
    """One program per row: residual += x, then the norm of the sum, which never leaves the registers in between."""
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, PADDED)
    inside = column < HIDDEN
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded before it is normalised, as it is when it takes the way through memory.
        rounded = total.to(dtype)
        tl.store(residual + row + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / HIDDEN + eps)
    normed = (total * scale).to(dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, normed.to(dtype), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x + residual, [num_tokens, hidden_size]; `residual` becomes the sum, in place. None: of x alone.

    x, residual [num_tokens, hidden_size], contiguous; weight [hidden_size].
    """
    num_tokens, hidden_size = x.shape
    out = torch.empty_like(x)
    add_rms_norm_kernel[(num_tokens,)](
        x, x if residual is None else residual, weight, out, eps,
        HIDDEN=hidden_size, PADDED=triton.next_power_of_2(hidden_size), ADD=residual is not None, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def turned_heads(
    heads, weight, cos, sin, eps,
    NUM: tl.constexpr, PADDED_NUM: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of NUM heads that lie one behind the other, normalised head by head and turned: two [NUM, HALF]."""
    head, dim = tl.arange(0, PADDED_NUM)[:, None], tl.arange(0, PADDED_HALF)[None, :]
    inside = (head < NUM) & (dim < HALF)
    place = heads + head * (2 * HALF) + dim
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        dtype: tl.constexpr = heads.dtype.element_ty
        mean = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        first_weight = tl.load(weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_halves(
    target, first, second,
    head_stride, NUM: tl.constexpr, PADDED_NUM: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    """Write two [NUM, HALF] as heads of 2 × HALF numbers, head_stride apart."""
    head, dim = tl.arange(0, PADDED_NUM)[:, None], tl.arange(0, PADDED_HALF)[None, :]
    inside = (head < NUM) & (dim < HALF)
    place = target + head * head_stride + dim
    tl.store(place, first.to(target.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(target.dtype.element_ty), mask=inside)


@triton.jit
def rope_and_store_kernel(
    qkv, positions, cos, sin, q_weight, k_weight, eps, q_out, k_cache, v_cache, slot_mapping,
    block_stride, slot_stride, head_stride, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    KV: tl.constexpr, PADDED_KV: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token: its queries to q_out, its keys and values into their slot."""
    start_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * (HEADS + 2 * KV) * 2 * HALF
    dim = tl.arange(0, PADDED_HALF)[None, :]
    angle = tl.load(positions + token) * HALF + dim
    cosine = tl.load(cos + angle, mask=dim < HALF, other=0.0)
    sine = tl.load(sin + angle, mask=dim < HALF, other=0.0)
    first, second = turned_heads(row, q_weight, cosine, sine, eps, HEADS, PADDED_HEADS, HALF, PADDED_HALF, NORM)
    store_halves(q_out + token * HEADS * 2 * HALF, first, second, 2 * HALF, HEADS, PADDED_HEADS, HALF, PADDED_HALF)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    keys = row + HEADS * 2 * HALF
    k_first, k_second = turned_heads(keys, k_weight, cosine, sine, eps, KV, PADDED_KV, HALF, PADDED_HALF, NORM)
    store_halves(k_cache + target, k_first, k_second, head_stride, KV, PADDED_KV, HALF, PADDED_HALF)
    values = keys + KV * 2 * HALF
    v_first, v_second = turned_heads(values, k_weight, 1.0, 0.0, eps, KV, PADDED_KV, HALF, PADDED_HALF, False)
    store_halves(v_cache + target, v_first, v_second, head_stride, KV, PADDED_KV, HALF, PADDED_HALF)


def rope_and_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    eps: float, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:  # fmt: skip
    """Norm and rotation of queries and keys, and K and V into the cache; returns the queries, [num_tokens, heads, dim].

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: queries, keys, values. positions int64
    [num_tokens]; cos, sin float32 [max_positions, head_dim / 2]; q_weight, k_weight [head_dim], None: no norm.
    Caches [num_blocks, block_size, num_kv_heads, head_dim]; slot_mapping int64 [num_tokens], negative: write nowhere.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads, half = qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim // 2
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    weights = (cos, cos) if q_weight is None else (q_weight, k_weight)
    rope_and_store_kernel[(len(qkv),)](
        qkv, positions, cos, sin, *weights, eps, q, k_cache, v_cache, slot_mapping, *k_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1], HEADS=num_heads, PADDED_HEADS=triton.next_power_of_2(num_heads),
        KV=num_kv_heads, PADDED_KV=triton.next_power_of_2(num_kv_heads),
        HALF=half, PADDED_HALF=triton.next_power_of_2(half), NORM=q_weight is not None, **early_launch(),
    )  # fmt: skip
    return q


@triton.jit
def silu_mul_kernel(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    """One program: TILE numbers of one row."""
    start_early(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < INNER
    gate = tl.load(gate_up + row * 2 * INNER + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * INNER + column, (opened * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [num_tokens, inner]. gate_up [num_tokens, 2 * inner], contiguous: gate, then up."""
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out, tile = gate_up.new_empty(num_tokens, inner), min(1024, triton.next_power_of_2(inner))
    silu_mul_kernel[(num_tokens, triton.cdiv(inner, tile))](gate_up, out, INNER=inner, TILE=tile, **early_launch())
    return out


@triton.jit
def embed_kernel(token_ids, sampled, weight, out, HIDDEN: tl.constexpr, PADDED: tl.constexpr):
    """One program per token copies its row of the table; a negative id −1 − i means: the i-th token sampled before."""
    token = tl.program_id(0).to(tl.int64)
    known = tl.load(token_ids + token)
    token_id = tl.where(known < 0, tl.load(sampled + tl.maximum(-1 - known, 0)), known)
    column = tl.arange(0, PADDED)
    row = tl.load(weight + token_id * HIDDEN + column, mask=column < HIDDEN)
    tl.store(out + token * HIDDEN + column, row, mask=column < HIDDEN)


def embed(token_ids: Tensor, sampled: Tensor, weight: Tensor) -> Tensor:
    """Rows of the embedding table, [num_tokens, hidden_size].

    token_ids int64 [num_tokens]; −1 − i stands for sampled[i], a token that only the device knows so far.
    sampled int64 [at least one]; weight [vocab_size, hidden_size].
    """
    hidden_size = weight.shape[1]
    out = weight.new_empty(len(token_ids), hidden_size)
    embed_kernel[(len(token_ids),)](
        token_ids, sampled, weight, out, HIDDEN=hidden_size, PADDED=triton.next_power_of_2(hidden_size)
    )
    return out


@triton.jit
def gemv_kernel(
    x, weight, bias, out, num_out, M: tl.constexpr, PADDED_M: tl.constexpr, K: tl.constexpr, PADDED_K: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: ROWS outputs of all M rows of x. Every weight is read once, by one program.

    EARLY: the program may be started before the kernel in front of it has ended, and fetches its weights meanwhile.
    """
    m, column = tl.arange(0, PADDED_M), tl.arange(0, PADDED_K)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    real = row < num_out
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    w = tl.load(weight + place, mask=real[:, None] & (column < K)[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # now what the kernel in front has written may be read
    inside = (m < M)[:, None] & (column < K)[None, :]
    rows = tl.load(x + m[:, None] * K + column[None, :], mask=inside, other=0.0)
    result = tl.sum(rows.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :], 2)  # [PADDED_M, ROWS]
    if BIAS:
        result += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[None, :]
    target = out + m[:, None] * num_out + row[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(m < M)[:, None] & real[None, :])


def gemv_tile(num_rows: int, num_in: int, num_out: int) -> dict[str, int]:
    """Outputs of one program, and its warps: some 2,000 weights, and enough programs to fill the device."""
    padded = triton.next_power_of_2(num_in)
    rows = 1 if padded > 2048 or num_out <= 256 else 2
    return {"PADDED_K": padded, "ROWS": rows, "num_warps": 8 if rows * padded * num_rows > 2048 else 4}


MOST_GEMV_ROWS = 4  # of x; from there on the tensor cores of the library's product pay off


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, [num_rows, num_out]: the library's product, or for up to four rows a kernel that streams.

    x [num_rows, num_in], contiguous; weight [num_out, num_in], contiguous; bias [num_out].
    """
    (num_rows, num_in), num_out = x.shape, len(weight)
    if not 0 < num_rows <= MOST_GEMV_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty(num_rows, num_out)
    tile = gemv_tile(num_rows, num_in, num_out)
    gemv_kernel[(triton.cdiv(num_out, tile["ROWS"]),)](
        x, weight, weight if bias is None else bias, out, num_out, M=num_rows,
        PADDED_M=triton.next_power_of_2(num_rows), K=num_in, BIAS=bias is not None, **tile, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def shift(x, BITS: tl.constexpr):
    """Logical shift of int64 to the right."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def scramble(x):
    """splitmix64's finalizer, as layers/sampler.py has it in PyTorch."""
    x = (x ^ shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ shift(x, 31)


@triton.jit
def best_kernel(
    logits,
    rules,
    lowest,
    seeds,
    positions,
    part_score,
    part_id,
    vocab_size,
    num_parts,
    TILE: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """One program: the best of TILE scores of a row. A score is a logit, or for a random row logit / T + noise."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_id = part * TILE + tl.arange(0, TILE)
    inside = token_id < vocab_size
    score = tl.load(logits + row * vocab_size + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    if FILTERED:
        score = tl.where(score >= tl.load(lowest + row), score, float("-inf"))
    temperature = tl.load(rules + row * 4)
    if temperature > 0:
        golden: tl.constexpr = -0x61C8864680B583EB
        key = scramble(scramble(tl.load(seeds + row)) + tl.load(positions + row).to(tl.int64) * golden)
        bits = shift(scramble(key + token_id.to(tl.int64) * golden), 41)
        uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
        score = score / temperature - tl.log(-tl.log(uniform))
    best, place = tl.max(score, 0, return_indices=True)
    tl.store(part_score + row * num_parts + part, best)
    tl.store(part_id + row * num_parts + part, part * TILE + place)


@triton.jit
def best_part_kernel(part_score, part_id, out, num_parts, PADDED_PARTS: tl.constexpr):
    """One program: the best of one row's parts."""
    row, part = tl.program_id(0), tl.arange(0, PADDED_PARTS)
    score = tl.load(part_score + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    _, place = tl.max(score, 0, return_indices=True)
    tl.store(out + row, tl.load(part_id + row * num_parts + place).to(tl.int64))


@triton.jit
def sort_key(bits):
    """The bits of a float32, as int32 → an int32 that sorts as the numbers do. Done twice, it undoes itself."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def amount_above(
    line, vocab_size, key, highest, temperature, COUNT: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr
):
    """Of a row's logits whose key is `key` or higher: how many they are, or the sum of exp((logit − highest) / T)."""
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        token_id = first + tl.arange(0, TILE)
        logit = tl.load(line + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
        above = (sort_key(logit.to(tl.int32, bitcast=True)) >> (32 - BITS)) >= key
        amount = tl.full([TILE], 1.0, tl.float32) if COUNT else tl.exp((logit - highest) / temperature)
        total += tl.where(above & (token_id < vocab_size), amount, 0.0)
    return tl.sum(total, 0)


@triton.jit
def find_bound(
    line, vocab_size, low, high, wanted, highest, temperature,
    COUNT: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The highest key that still has the wanted amount at or above it. `low` is known to have it, `high` not to.

    A binary search over the bits, so nothing is sorted or written.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        if amount_above(line, vocab_size, middle, highest, temperature, COUNT, TILE, BITS) >= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def lowest_kernel(logits, rules, lowest, vocab_size, TILE: tl.constexpr, BITS: tl.constexpr):
    """One program: the lowest logit of a row that its filters let pass; −inf where there are none."""
    row = tl.program_id(0).to(tl.int64)
    line, rule = logits + row * vocab_size, rules + row * 4
    temperature, top_k, top_p, min_p = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2), tl.load(rule + 3)
    bound = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        tops = tl.full([TILE], float("-inf"), tl.float32)
        for first in range(0, vocab_size, TILE):
            token_id = first + tl.arange(0, TILE)
            logit = tl.load(line + token_id, mask=token_id < vocab_size, other=float("-inf"))
            tops = tl.maximum(tops, logit.to(tl.float32))
        highest = tl.max(tops, 0)
        start = tl.full((), -0x7F800001 >> (32 - BITS), tl.int64)  # the key of −inf
        low, high = start, (sort_key(highest.to(tl.int32, bitcast=True)) >> (32 - BITS)).to(tl.int64) + 1
        if top_k > 0:
            wanted = tl.minimum(top_k, vocab_size.to(tl.float32))
            low = find_bound(line, vocab_size, low, high, wanted, highest, temperature, True, TILE, BITS)
        if top_p < 1:
            wanted = top_p * amount_above(line, vocab_size, low, highest, temperature, False, TILE, BITS)
            low = find_bound(line, vocab_size, low, high, wanted, highest, temperature, False, TILE, BITS)
        if low > start:
            bound = sort_key((low << (32 - BITS)).to(tl.int32)).to(tl.float32, bitcast=True)
        if min_p > 0:
            bound = tl.maximum(bound, highest + temperature * tl.log(min_p))
    tl.store(lowest + row, bound)


# Leading bits of a float32 that was made of one of these: what lies behind them is 0.
KEY_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


def sample_plain(
    logits: Tensor, rules: Tensor, seeds: Tensor, positions: Tensor, out: Tensor, *, filtered: bool = False
) -> Tensor:
    """One token per row into out, int64 [num_rows]: the most likely, or by the Gumbel-max trick with the row's noise.

    logits [num_rows, vocab_size], contiguous; rules float32 [num_rows, 4]: temperature (0: greedy), top_k (0: all),
    top_p, min_p, of which the last three count if `filtered`; seeds int64 [num_rows]; positions [num_rows], of the
    token that is drawn. The random numbers are those of layers/sampler.py. Raises KeyError for filtered logits of
    a dtype that is not in KEY_BITS.
    """
    num_rows, vocab_size = logits.shape
    tile = 4096
    num_parts = triton.cdiv(vocab_size, tile)
    part_score, lowest = rules.new_empty(num_rows, num_parts), rules.new_empty(num_rows)
    part_id = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    if filtered:
        lowest_kernel[(num_rows,)](
            logits, rules, lowest, vocab_size, TILE=2 * tile, BITS=KEY_BITS[logits.dtype], num_warps=32
        )
    best_kernel[(num_rows, num_parts)](
        logits, rules, lowest, seeds, positions, part_score, part_id, vocab_size, num_parts,
        TILE=tile, FILTERED=filtered, num_warps=8,
    )  # fmt: skip
    best_part_kernel[(num_rows,)](part_score, part_id, out, num_parts, PADDED_PARTS=triton.next_power_of_2(num_parts))
    return out
