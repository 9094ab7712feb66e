# Generated from notebooks/06_triton_decode.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""Triton kernels for decoding: one query token per sequence attends to all its pages.

Three launches share the work. `plan_kernel` runs once per step and cuts the batch into work items; `decode_kernel` and
`merge_kernel` run once per layer. Their grids follow from shapes, never from lengths, so that a CUDA graph can replay
them while the contexts grow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.kernels.launch import INTERPRETED, early_launch, start_early, target_arch

LOG2_E = 1.4426950408889634  # e^x = 2^(x * log2 e), and 2^x is one instruction


@triton.jit
def load_rows(base, offsets, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, UPCAST: tl.constexpr):
    """Rows of HEAD_DIM numbers at `base + offsets`, zero-padded to PADDED_DIM: [len(offsets), PADDED_DIM]."""
    dim = tl.arange(0, PADDED_DIM)
    pointers = base + offsets[:, None] + dim[None, :]
    if HEAD_DIM == PADDED_DIM:
        rows = tl.load(pointers)
    else:
        rows = tl.load(pointers, mask=dim[None, :] < HEAD_DIM, other=0.0)
    if UPCAST:  # the interpreter's bf16 arithmetic is wrong without a word; its loads and casts are right
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def softmax_step(scores, values, top, total, acc, scale_log2):
    """Fold one tile of keys into the running softmax of each row.

    scores [rows, keys] (-inf = hidden), values [keys, dim]; per row: `top` the largest score so far, `total` the sum of
    weights, `acc` the weighted sum of values, both relative to `top`. Online softmax: https://arxiv.org/abs/1805.02867.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores * scale_log2 - (new_top * scale_log2)[:, None])
    shrink = tl.exp2((top - new_top) * scale_log2)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def attend_tile(
    q_rows, limits, start, end, top, total, acc, k_head, v_head, block_table, scale_log2, block_stride, slot_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold the keys [start, start + KEYS) into the running softmax; if MASKED, row r only sees keys before limits[r].

    q_rows [rows, PADDED_DIM]; limits [rows], none above `end`; k_head, v_head: one KV head of the caches; block_table:
    the sequence's page ids; top, total, acc: as in softmax_step, and returned as they are after the tile.
    """
    key = start + tl.arange(0, KEYS)
    # Past the end we read the last key again and hide its score: a stale NaN in V would survive a weight of 0.
    read = tl.minimum(key, end - 1) if MASKED else key
    page = tl.load(block_table + read // BLOCK_SIZE).to(tl.int64)  # 64 bits: a cache may have more than 2^31 numbers
    offsets = page * block_stride + read % BLOCK_SIZE * slot_stride
    k = load_rows(k_head, offsets, HEAD_DIM, PADDED_DIM, UPCAST)
    v = load_rows(v_head, offsets, HEAD_DIM, PADDED_DIM, UPCAST)
    scores = tl.dot(q_rows, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(key[None, :] < limits[:, None], scores, float("-inf"))
    return softmax_step(scores, v, top, total, acc, scale_log2)


@triton.jit
def attend_keys(
    q_rows, first, end, k_head, v_head, block_table, scale_log2, block_stride, slot_stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The running softmax of all rows after the keys [first, end): top and total [ROWS], acc [ROWS, PADDED_DIM].

    q_rows [ROWS, PADDED_DIM]; the other arguments as in attend_tile. Without keys: -inf, 0 and 0.
    """
    limits = tl.zeros([ROWS], tl.int32) + end
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(first, end, KEYS):
        top, total, acc = attend_tile(
            q_rows, limits, start, end, top, total, acc, k_head, v_head, block_table, scale_log2,
            block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, True, UPCAST,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def write_items(items, seq, length, piece, first_item, num_pieces):
    """The rows of items [grid, 4] that belong to one sequence: its number, first key, end, number of its pieces."""
    for p in range(num_pieces):
        item = items + (first_item + p) * 4
        tl.store(item, seq)
        tl.store(item + 1, p * piece)
        tl.store(item + 2, tl.minimum((p + 1) * piece, length))
        tl.store(item + 3, num_pieces)


@triton.jit(do_not_specialize=["num_seqs", "wanted"])
def plan_kernel(context_lens, items, ranks, num_seqs, wanted, SHORTEST: tl.constexpr, PADDED_SEQS: tl.constexpr):
    """Cut the sequences into pieces of about the same number of keys, `wanted` in all (0 = leave them whole).

    context_lens int32 [num_seqs]; items int32 [grid, 4] and ranks int32 [num_seqs, 3], as in DecodePlan. Program i
    writes the items of sequence i, and marks item i as empty if there are fewer items than that.
    """
    i = tl.program_id(0)
    seqs = tl.arange(0, PADDED_SEQS)
    real = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=real, other=0)
    share = tl.cdiv(tl.cdiv(tl.sum(lens, 0), tl.maximum(wanted, 1)), SHORTEST) * SHORTEST
    piece = tl.maximum(tl.where(wanted > 0, share, tl.max(lens, 0)), SHORTEST)
    # A sequence without keys gets one item too: somebody must write its zeros.
    pieces = tl.where(real, tl.maximum(tl.cdiv(lens, piece), 1), 0)
    if i >= tl.sum(pieces, 0):
        tl.store(items + i * 4, -1)
    if i < num_seqs:
        length = tl.load(context_lens + i)
        ahead = real & ((lens > length) | ((lens == length) & (seqs < i)))
        first_item, rank = tl.sum(tl.where(ahead, pieces, 0), 0), tl.sum(ahead.to(tl.int32), 0)
        num_pieces = tl.maximum(tl.cdiv(length, piece), 1)
        write_items(items, i, length, piece, first_item, num_pieces)
        tl.store(ranks + rank * 3, i)
        tl.store(ranks + rank * 3 + 1, first_item)
        tl.store(ranks + rank * 3 + 2, num_pieces)


LONGEST_UNCUT = 4096  # keys that one program may read alone in a batch that fills the device


def programs_to_fill(device: torch.device) -> int:
    """How many programs keep a device busy: four per multiprocessor, as a power of two; few in the interpreter."""
    if device.type != "cuda":
        return 16  # the interpreter runs programs one by one: enough to have several pieces, no more
    count = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 << (count.bit_length() - 1)


def programs_wanted(uncut: int, max_context_len: int, enough: int) -> int:
    """Programs to cut a batch into that has `uncut` of them now; `enough` fill the device; 0 = leave it whole."""
    if uncut < enough // 2:
        return enough
    return 0 if max_context_len <= LONGEST_UNCUT else enough // 2


SHORTEST_PIECE = 64  # keys; below it, starting a program costs more than its share of the reading


class DecodePlan:
    """The work items of a decode step and the room for partial results, allocated once for all steps and layers.

    num_heads, num_kv_heads, head_dim: of the model; max_num_seqs: the largest batch. `enough` programs fill the device;
    `wanted` items are what the last update cut its batch into (0 = nothing was cut).
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, max_num_seqs: int = 1024
    ) -> None:
        self.num_kv_heads, self.max_num_seqs = num_kv_heads, max_num_seqs
        self.enough = programs_to_fill(device)
        self.num_seqs, self.max_context_len, self.wanted = 0, 0, 0
        most = self.enough // num_kv_heads + 1
        integers, floats = {"dtype": torch.int32, "device": device}, {"dtype": torch.float32, "device": device}
        self.items = torch.empty(max_num_seqs + most, 4, **integers)  # sequence (−1: empty), first key, end, pieces
        self.ranks = torch.empty(max_num_seqs, 3, **integers)  # longest first: sequence, first item, pieces
        self.part_out = torch.empty(2 * most, num_heads, head_dim, **floats)
        self.part_lse = torch.empty(2 * most, num_heads, **floats)  # log2 of the sum of weights

    def update(self, context_lens: Tensor, max_context_len: int) -> "DecodePlan":
        """Plan a step, on the device. context_lens int32 [num_seqs], none above max_context_len.

        The grids follow from num_seqs and max_context_len alone: inside a CUDA graph the plan follows the contexts.
        Raises ValueError for more sequences than the plan was made for.
        """
        num_seqs = len(context_lens)
        if num_seqs > self.max_num_seqs:
            raise ValueError(f"{num_seqs} sequences, and this plan has room for {self.max_num_seqs}: raise its size")
        wanted = programs_wanted(num_seqs * self.num_kv_heads, max_context_len, self.enough)
        self.num_seqs, self.max_context_len, self.wanted = num_seqs, max_context_len, -(-wanted // self.num_kv_heads)
        plan_kernel[(self.num_items,)](
            context_lens, self.items, self.ranks, num_seqs, self.wanted,
            SHORTEST=SHORTEST_PIECE, PADDED_SEQS=triton.next_power_of_2(num_seqs), num_warps=1,
        )  # fmt: skip
        return self

    @property
    def num_items(self) -> int:
        """Items to launch, empty ones included: each sequence may end with a piece that is not full."""
        return self.num_seqs + self.wanted

    @property
    def pieces_at_once(self) -> int:
        """Partial results that a program of merge_kernel holds together: those of an average sequence, 8 to 64."""
        return min(64, max(8, triton.next_power_of_2(-(-self.wanted // self.num_seqs))))


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, block_tables, items, out, part_out, part_lse, scale_log2,
    q_seq_stride, q_head_stride, block_stride, slot_stride, head_stride, table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of one KV head against the keys [first, end) of one work item.

    q, caches and block_tables as in paged_decode, strides in numbers; items int32 [grid, 4] as in DecodePlan.
    A whole sequence goes to out [num_seqs, NUM_HEADS, HEAD_DIM]; a piece, by the number of its item, to part_out
    [items, NUM_HEADS, HEAD_DIM] and part_lse [items, NUM_HEADS].
    """
    start_early(EARLY)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    seq = tl.load(items + item * 4).to(tl.int64)
    if seq < 0:
        return
    first, end, pieces = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    head = kv_head * GROUP + tl.minimum(row, GROUP - 1)  # rows that pad the group repeat its last head
    q_rows = load_rows(q + seq * q_seq_stride, head * q_head_stride, HEAD_DIM, PADDED_DIM, UPCAST)
    top, total, acc = attend_keys(
        q_rows, first, end, k_cache + kv_head * head_stride, v_cache + kv_head * head_stride,
        block_tables + seq * table_stride, scale_log2, block_stride, slot_stride,
        ROWS, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, UPCAST,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # no keys, no weights: zeros
    inside = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
    if pieces == 1:
        target = out + (seq * NUM_HEADS + head[:, None]) * HEAD_DIM + dim[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    else:
        part = item * NUM_HEADS + head
        tl.store(part_out + part[:, None] * HEAD_DIM + dim[None, :], result, mask=inside)
        tl.store(part_lse + part, top * scale_log2 + tl.log2(total), mask=row < GROUP)


@triton.jit
def merge_kernel(
    part_out, part_lse, ranks, out,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the pieces of one head of one cut sequence, each weighted by its share of all the weights.

    part_out, part_lse: as decode_kernel wrote them; ranks int32 [num_seqs, 3]; out [num_seqs, NUM_HEADS, HEAD_DIM].
    """
    start_early(EARLY)
    head, rank = tl.program_id(0), tl.program_id(1)
    seq = tl.load(ranks + rank * 3).to(tl.int64)
    first_item, pieces = tl.load(ranks + rank * 3 + 1), tl.load(ranks + rank * 3 + 2)
    if pieces == 1:
        return
    dim = tl.arange(0, PADDED_DIM)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        part = (first_item + piece) * NUM_HEADS + head
        lse = tl.load(part_lse + part, mask=piece < pieces, other=float("-inf"))
        inside = (piece[:, None] < pieces) & (dim[None, :] < HEAD_DIM)
        averages = tl.load(part_out + part[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        share, shrink = tl.exp2(lse - new_top), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(share, 0)
        acc = acc * shrink + tl.sum(averages * share[:, None], 0)
        top = new_top
    target = out + (seq * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def decode_tile(num_programs: int, max_context_len: int, row_bytes: int, arch: int) -> dict[str, int]:
    """Keys per tile, warps and pipeline stages of `decode_kernel`; row_bytes: one key of one head.

    A multiprocessor needs some 64 to 130 KB of loads in flight: programs on it × tiles ahead × bytes of a tile.
    Measured on an H200, for heads of 128 numbers of 16 bits inside the engine: one tile for all batches, as the grid of
    a recorded step does not change with the contexts.
    """
    if row_bytes > 256 or arch < 80:  # float32, wide heads; no bf16 tensor cores before Ampere
        return {"KEYS": 16, "num_warps": 4, "num_stages": 3}
    if max_context_len <= 64:
        return {"KEYS": 16, "num_warps": 1, "num_stages": 2}
    if row_bytes == 256:
        return {"KEYS": 64, "num_warps": 2, "num_stages": 2}
    if num_programs <= 768:
        return {"KEYS": 32, "num_warps": 1, "num_stages": 5}
    return {"KEYS": 64, "num_warps": 2, "num_stages": 5}


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor, scale: float,
    *, plan: DecodePlan | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query token per sequence, its newest, over its pages: [num_seqs, num_heads, head_dim].

    q [num_seqs, num_heads, head_dim], its last stride 1; caches [num_blocks, block_size, num_kv_heads, head_dim], both
    with the same strides; block_tables int32 [num_seqs, max_blocks]; context_lens int32 [num_seqs], a context of 0 (a
    padded row) gives zeros; scale, usually head_dim ** -0.5, multiplies the scores. plan: updated with these
    context_lens; without one, a plan is made for this call. Nothing is raised for a page id outside the caches: what
    lies there is read. Cutting sequences into pieces follows Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    if plan is None:
        plan = DecodePlan(num_heads, num_kv_heads, head_dim, q.device, num_seqs)
        plan.update(context_lens, block_tables.shape[1] * block_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    padded_dim = max(16, triton.next_power_of_2(head_dim))  # tl.dot takes no fewer than 16
    dims = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim}
    group, row_bytes = num_heads // num_kv_heads, padded_dim * k_cache.element_size()
    decode_kernel[(num_kv_heads, plan.num_items)](
        q, k_cache, v_cache, block_tables, plan.items, out, plan.part_out, plan.part_lse, scale * LOG2_E,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], block_tables.stride(0),
        **dims, GROUP=group, ROWS=triton.next_power_of_2(group), BLOCK_SIZE=block_size, UPCAST=INTERPRETED,
        **decode_tile(num_kv_heads * plan.num_items, plan.max_context_len, row_bytes, target_arch()), **early_launch(),
    )  # fmt: skip
    if plan.wanted:
        merge_kernel[(num_heads, min(num_seqs, plan.wanted))](
            plan.part_out, plan.part_lse, plan.ranks, out, **dims, PIECES=plan.pieces_at_once, **early_launch()
        )
    return out
