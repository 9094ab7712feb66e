"""Measure the Triton kernels on a GPU: every figure of chapters 06 and 07, each variant checked before it is timed.

    python tools/bench_kernels.py --out figures/data/kernels_h200.json

16 query heads, 8 KV heads, head_dim 128, bf16, blocks of 16, pages in random order. A call is timed inside a CUDA graph
that walks over more than 1.2 GB of K and V, so that nothing is found in the L2 cache. GB/s counts each byte of K and V
once, whatever a kernel reads; TFLOP/s counts only the keys that a causal query sees. Stages 1 to 3 are taken from the
cells of chapter 06; a variant named "stage 4, …" is the exported module with a few lines of its text changed.
"""

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from minivllm.kernels import paged_decode, paged_prefill, reference

HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
BYTES_PER_TOKEN = 2 * KV_HEADS * DIM * 2  # K and V in bf16
SCALE = DIM**-0.5
ROTATE_BYTES, MOST_SETS = 1.25e9, 72
MOST_RELATIVE_ERROR = 5e-3  # bf16 answers against a float32 reference on the same bf16 inputs
ROOT = Path(__file__).resolve().parents[1]
CHAPTER = ROOT / "notebooks" / "06_triton_decode.ipynb"
Run = Callable[["PagedSets", Tensor, Tensor], Tensor]  # (sets, q, block table of one set) → out
Row = dict[str, Any]

DECODE_CASES = {
    "B64 c1024": [1024] * 64,
    "B64 c4096": [4096] * 64,
    "B256 c1024": [1024] * 256,
    "B256 c4096": [4096] * 256,
    "B256 c100-1900": torch.randint(100, 1901, (256,), generator=torch.Generator().manual_seed(0)).tolist(),
    "B256 c17-41": torch.randint(17, 42, (256,), generator=torch.Generator().manual_seed(1)).tolist(),
    "B16 c1024": [1024] * 16,
    "B1 c4096": [4096],
    "B1 c32768": [32768],
    "B64 one c32768": [1024] * 63 + [32768],
}
PREFILL_CASES = {  # contexts, new tokens
    "4 × 4096": ([4096] * 4, [4096] * 4),
    "16 × 1024": ([1024] * 16, [1024] * 16),
    "8 × 512 of 4096": ([4096] * 8, [512] * 8),
    "2048 + 63 decoding": ([1024] * 63 + [2048], [1] * 63 + [2048]),
    "64 decoding at 1024": ([1024] * 64, [1] * 64),
    "1 decoding at 32768": ([32768], [1]),
}
LADDER = ["B64 c1024", "B256 c1024", "B256 c100-1900", "B16 c1024", "B1 c32768"]
PIECES = {"B1 c32768": 64}  # of stage 3; 4 elsewhere

# What a variant changes in the text of the exported module: (old, new) pairs.
CARRIED = (
    """    for start in range(first, end, KEYS):
        top, total, acc = attend_tile(
            q_rows, limits, start, end, top, total, acc, k_head, v_head, block_table, scale_log2,
            block_stride, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, True, UPCAST,
        )  # fmt: skip
""",
    """    lane, last = tl.arange(0, KEYS), tl.maximum(end, 1) - 1
    page = tl.load(block_table + tl.minimum(first + lane, last) // BLOCK_SIZE)
    for start in range(first, end, KEYS):
        read = tl.minimum(start + lane, last)
        offsets = page.to(tl.int64) * block_stride + read % BLOCK_SIZE * slot_stride
        k = load_rows(k_head, offsets, HEAD_DIM, PADDED_DIM, UPCAST)
        v = load_rows(v_head, offsets, HEAD_DIM, PADDED_DIM, UPCAST)
        page = tl.load(block_table + tl.minimum(start + KEYS + lane, last) // BLOCK_SIZE)
        scores = tl.dot(q_rows, tl.trans(k), input_precision="ieee")
        scores = tl.where(start + lane[None, :] < limits[:, None], scores, float("-inf"))
        top, total, acc = softmax_step(scores, v, top, total, acc, scale_log2)
""",
)
COUNTED = (
    """    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        later = tl.load(cu_seqlens_q + middle) // TOKENS + middle > tile
        low, high = tl.where(later, low, middle), tl.where(later, middle - 1, high)
""",
    """    seqs = tl.arange(0, 4)
    first_tiles = tl.load(cu_seqlens_q + seqs, mask=seqs < num_seqs, other=0) // TOKENS + seqs
    low = tl.sum(((seqs < num_seqs) & (first_tiles <= tile)).to(tl.int32), 0) - 1
""",
)
SMALL, ONE_WARP, TWO_WARPS, LARGE = (
    '"KEYS": 16, "num_warps": 1, "num_stages": 2',
    '"KEYS": 32, "num_warps": 1, "num_stages": 5',
    '"KEYS": 64, "num_warps": 2, "num_stages": 5',
    '"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128',
)
CHANGES: dict[str, list[tuple[str, str]]] = {
    "natural order": [("(lens > length) | ((lens == length) & (seqs < i))", "(seqs < i)")],
    "never cut": [("return 0 if max_context_len <= LONGEST_UNCUT else enough // 2", "return 0")],
    "cut allowed": [("LONGEST_UNCUT = 4096", "LONGEST_UNCUT = 0")],
    "page ids carried": [CARRIED, ('"num_stages": 5', '"num_stages": 3')],
    "16 rows": [("ROWS=triton.next_power_of_2(group)", "ROWS=16")],
    "64 keys, 4 warps, 3 stages": [(ONE_WARP, '"KEYS": 64, "num_warps": 4, "num_stages": 3')],
    "64 keys, 4 warps, 5 stages": [(TWO_WARPS, '"KEYS": 64, "num_warps": 4, "num_stages": 5')],
    "32 keys, 1 warp, 3 stages": [(ONE_WARP, '"KEYS": 32, "num_warps": 1, "num_stages": 3')],
    "tile of 32 keys": [(SMALL, ONE_WARP)],
    "no register limit": [(', "maxnreg": 128', "")],
    "mask everywhere": [("KEYS, False, UPCAST", "KEYS, True, UPCAST")],
    "light tiles first": [("tl.num_programs(1) - 1 - tl.program_id(1)", "tl.program_id(1)")],
    "sequence by counting": [COUNTED],
    "64 rows, 4 warps": [(LARGE, '"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3')],
    "tiles of 32 keys": [('"ROWS": 128, "KEYS": 64', '"ROWS": 128, "KEYS": 32')],
}
LEDGER = tomllib.loads((ROOT / "tools" / "kernel_ledger.toml").read_text(encoding="utf-8"))


@dataclass
class PagedSets:
    """Several batches of one shape on one pool of random K and V, each with pages of its own."""

    contexts: list[int]
    k_cache: Tensor  # [num_blocks, BLOCK, KV_HEADS, DIM]
    v_cache: Tensor
    context_lens: Tensor  # int32 [num_seqs]
    tables: list[Tensor]  # of each set: int32 [num_seqs, max_blocks]


def make_sets(contexts: list[int]) -> PagedSets:
    """Enough sets to walk over ROTATE_BYTES, on pages in random order."""
    blocks_of = [-(-c // BLOCK) for c in contexts]
    num_sets = max(1, min(MOST_SETS, int(-(-ROTATE_BYTES // (sum(contexts) * BYTES_PER_TOKEN)))))
    num_blocks = num_sets * sum(blocks_of)
    caches = [torch.randn(num_blocks, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    order = torch.randperm(num_blocks, device="cuda").int()
    columns = -(-max(blocks_of) // 16) * 16
    tables, taken = [], 0
    for _ in range(num_sets):
        table = torch.zeros(len(contexts), columns, dtype=torch.int32, device="cuda")
        for s, count in enumerate(blocks_of):
            table[s, :count] = order[taken : taken + count]
            taken += count
        tables.append(table)
    return PagedSets(contexts, *caches, torch.tensor(contexts, dtype=torch.int32, device="cuda"), tables)


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds that one replay takes on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_calls(calls: list[Callable[[], object]], warm_up: float = 0.1, measure: float = 0.2) -> Row:
    """Microseconds of one call, the calls one after the other in a CUDA graph: median, fastest and slowest replay."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = replay_seconds(graph)
    for _ in range(int(warm_up / once) + 1):
        graph.replay()
    times = sorted(1e6 * replay_seconds(graph) / len(calls) for _ in range(max(9, int(measure / once))))
    return {"us": statistics.median(times), "us_fastest": times[0], "us_slowest": times[-1]}


def relative_error(out: Tensor, want: Tensor) -> float:
    """‖out − want‖ / ‖want‖. Raises AssertionError when it is too large, or not a number."""
    error = float((out.float() - want.float()).norm() / want.float().norm())
    if not error < MOST_RELATIVE_ERROR:
        raise AssertionError(f"relative error {error:.2e}, more than {MOST_RELATIVE_ERROR}: not timed")
    return error


@triton.jit
def read_kernel(x, out, PER_PROGRAM: tl.constexpr, TILE: tl.constexpr):
    """Read a stretch of memory and keep one number of it."""
    start = tl.program_id(0).to(tl.int64) * PER_PROGRAM
    acc = tl.zeros([TILE], tl.int32)
    for i in range(0, PER_PROGRAM, TILE):
        acc ^= tl.load(x + start + i + tl.arange(0, TILE))
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def measure_ceilings() -> dict[str, float]:
    """What this card reaches with nothing else to do: reading, copying, multiplying matrices."""
    x = torch.randint(0, 2**31 - 1, (2**30,), dtype=torch.int32, device="cuda")  # 4 GiB
    y, part = torch.empty_like(x), 2**16
    sums = torch.empty(x.numel() // part, dtype=torch.int32, device="cuda")
    read = time_calls([lambda: read_kernel[(len(sums),)](x, sums, PER_PROGRAM=part, TILE=4096, num_warps=8)])
    copy = time_calls([lambda: torch.bitwise_not(x, out=y)])  # a kernel; the copy nodes of a graph are slower
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product = time_calls([lambda: a @ b])
    burst = time_calls([lambda: a @ b], warm_up=0.0, measure=0.005)
    return {
        "read_gb_s": x.nbytes / read["us"] / 1e3,
        "copy_gb_s": 2 * x.nbytes / copy["us"] / 1e3,
        "matmul_tflop_s": 2 * 8192**3 / product["us"] / 1e6,
        "matmul_burst_tflop_s": 2 * 8192**3 / burst["us"] / 1e6,  # the first milliseconds, before power is the limit
    }


def load_module(name: str, text: str) -> ModuleType:
    """A module from text, by way of a file: Triton reads the source of its kernels."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stages_of_chapter() -> ModuleType:
    """Stages 1 to 3, which live in cells of chapter 06 that begin with `# stage`."""
    cells = ["".join(cell["source"]) for cell in json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]]
    return load_module("stages", "\n\n".join(cell for cell in cells if cell.startswith("# stage ")))


def changed(module: ModuleType, change: str) -> ModuleType:
    """The module with some of its text replaced. Raises AssertionError when the text has nothing to replace."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    found = [pair for pair in CHANGES[change] if pair[0] in text]
    assert found, f"{change!r} finds nothing to change in {module.__name__}"
    for old, new in found:
        text = text.replace(old, new)
    return load_module(f"variant_{len(change)}_{abs(hash(change))}", text)


def exported_decode(module: ModuleType, sets: PagedSets) -> Run:
    """The decode kernel with its plan made once, as layers see it."""
    plan = module.DecodePlan(HEADS, KV_HEADS, DIM, torch.device("cuda"))
    plan.update(sets.context_lens, max(sets.contexts))
    module.early_launch = lambda: {"EARLY": False}  # a kernel is timed alone, from its own start
    return lambda sets, q, table: module.paged_decode(
        q, sets.k_cache, sets.v_cache, table, sets.context_lens, SCALE, plan=plan
    )


def stage_run(stage: Callable[..., Tensor], **options: int) -> Run:
    """A stage of chapter 06 as something that can be timed."""
    return lambda sets, q, table: stage(q, sets.k_cache, sets.v_cache, table, sets.context_lens, SCALE, **options)


def compared(kind: str, case: str) -> list[str]:
    """Variants that the ledger compares on a case."""
    entries = [entry for entry in LEDGER[kind] if entry["case"] == case]
    return sorted({entry[side] for entry in entries for side in ("before", "after")})


def decode_runs(case: str, sets: PagedSets, stages: ModuleType) -> dict[str, Run]:
    """What is measured on a case: the exported kernel, the ladder, and what the ledger compares."""
    runs = {"stage 4": exported_decode(paged_decode, sets)}
    if case in LADDER:
        runs["stage 1"] = stage_run(stages.decode_1)
        runs["stage 2"] = stage_run(stages.decode_2)
        runs["stage 3"] = stage_run(stages.decode_3, pieces=PIECES.get(case, 4))
    for name in compared("decode", case):
        if name == "stage 2, 16 keys":
            runs[name] = stage_run(stages.decode_2, KEYS=16)
        elif name not in runs:
            runs[name] = exported_decode(changed(paged_decode, name.removeprefix("stage 4, ")), sets)
    return runs


def decode_reference(q: Tensor, sets: PagedSets) -> Tensor:
    """The answers for the first set, a few sequences at a time."""
    caches, table = (sets.k_cache, sets.v_cache), sets.tables[0]
    rows = torch.arange(len(q), device=q.device).split(8)
    return torch.cat([reference.paged_decode(q[r], *caches, table[r], sets.context_lens[r], SCALE) for r in rows])


def measure_decode(case: str, contexts: list[int], stages: ModuleType) -> Iterator[Row]:
    """The rows of one decode case."""
    sets = make_sets(contexts)
    q = torch.randn(len(contexts), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    want = decode_reference(q, sets)
    for name, run in decode_runs(case, sets, stages).items():
        error = relative_error(run(sets, q, sets.tables[0]), want)
        timing = time_calls([lambda table=table, run=run: run(sets, q, table) for table in sets.tables])
        rate = sum(contexts) * BYTES_PER_TOKEN / timing["us"] / 1e3
        yield {"case": case, "variant": name, **timing, "gb_s": rate, "relative_error": error}


def measure_dense_decode(case: str, contexts: list[int]) -> Iterator[Row]:
    """PyTorch's own attention on contiguous K and V of the same size; all contexts must be equal."""
    length, num_sets = contexts[0], int(-(-ROTATE_BYTES // (sum(contexts) * BYTES_PER_TOKEN)))
    shape = min(num_sets, MOST_SETS), len(contexts), KV_HEADS, length, DIM
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    q = torch.randn(len(contexts), HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    want = scaled_dot_product_attention(q.float(), k[0].float(), v[0].float(), enable_gqa=True)
    ways = {
        "SDPA, contiguous": scaled_dot_product_attention,
        "flex attention, contiguous": torch.compile(flex_attention),
    }
    for name, attend in ways.items():
        calls = [lambda i=i, attend=attend: attend(q, k[i], v[i], enable_gqa=True) for i in range(len(k))]
        row = measure_theirs(case, name, calls, want)
        if row:
            yield row | {"gb_s": sum(contexts) * BYTES_PER_TOKEN / row["us"] / 1e3}


def measure_theirs(case: str, name: str, calls: list[Callable[[], Tensor]], want: Tensor) -> Row | None:
    """A row of another implementation, or None, and the reason printed, where it does not run on this machine."""
    try:
        error = relative_error(calls[0](), want)
        return {"case": case, "variant": name, **time_calls(calls), "relative_error": error}
    except Exception as problem:
        print(f"{case} {name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
        return None


def measure_prefill(case: str, contexts: list[int], new: list[int]) -> Iterator[Row]:
    """The rows of one prefill case."""
    sets = make_sets(contexts)
    q = torch.randn(sum(new), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *new]).cumsum(0).int().cuda()
    pages = sets.k_cache, sets.v_cache
    want = reference.paged_prefill(q, *pages, sets.tables[0], sets.context_lens, cu, SCALE)
    flop = 4 * DIM * HEADS * sum(n * c - n * (n - 1) // 2 for c, n in zip(contexts, new, strict=True))
    names = ["exported", *(name for name in compared("prefill", case) if name != "exported")]
    for name in names:
        module = paged_prefill if name == "exported" else changed(paged_prefill, name)

        def attend(table: Tensor, module: ModuleType = module) -> Tensor:
            return module.paged_prefill(q, *pages, table, sets.context_lens, cu, SCALE, max_seqlen_q=max(new))

        error = relative_error(attend(sets.tables[0]), want)
        timing = time_calls([lambda t=t, attend=attend: attend(t) for t in sets.tables[:10]])
        yield {"case": case, "variant": name, **timing, "tflop_s": flop / timing["us"] / 1e6, "relative_error": error}


def measure_dense_prefill(case: str, count: int, length: int) -> Iterator[Row]:
    """PyTorch's own causal attention on contiguous K and V."""
    q = torch.randn(count, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(count, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    causal = {"is_causal": True, "enable_gqa": True}
    rows = [tuple(x[None].float() for x in row) for row in zip(q, k, v, strict=True)]
    want = torch.cat([scaled_dot_product_attention(*row, **causal) for row in rows])
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")
    flex = torch.compile(flex_attention)
    ways = {
        "SDPA, contiguous": lambda: scaled_dot_product_attention(q, k, v, **causal),
        "flex attention, contiguous": lambda: flex(q, k, v, block_mask=mask, enable_gqa=True),
    }
    for name, attend in ways.items():
        row = measure_theirs(case, name, [attend] * 4, want)
        if row:
            flop = 4 * DIM * HEADS * count * length * (length + 1) / 2
            yield row | {"tflop_s": flop / row["us"] / 1e6}


def measure_plan() -> dict[str, float]:
    """Microseconds of planning a step, for several batches."""
    times = {}
    for num_seqs in (1, 64, 256, 1024):
        lens = torch.randint(1, 2000, (num_seqs,), dtype=torch.int32, device="cuda")
        plan = paged_decode.DecodePlan(HEADS, KV_HEADS, DIM, torch.device("cuda"))
        times[str(num_seqs)] = time_calls([lambda plan=plan, lens=lens: plan.update(lens, 2000)] * 20)["us"]
    return times


def told(rows: Iterator[Row]) -> list[Row]:
    """The rows, each printed when it is measured; device memory given back at the end."""
    kept = []
    for row in rows:
        kept.append(row)
        rate = f"{row['gb_s']:7,.0f} GB/s" if "gb_s" in row else f"{row['tflop_s']:7.1f} TFLOP/s"
        spread = f"({row['us_fastest']:.1f} to {row['us_slowest']:.1f})"
        print(f"{row['case']:20} {row['variant']:36} {row['us']:8.1f} µs {spread:22} {rate}", flush=True)
    del rows
    torch.cuda.empty_cache()
    return kept


def summary(data: Row) -> Row:
    """What is kept of a run to show the spread between runs: the read ceiling, and the time of what is exported."""
    ours = [row for row in data["decode"] + data["prefill"] if row["variant"] in ("stage 4", "exported")]
    return {"read_gb_s": data["ceilings"]["read_gb_s"], "us": {row["case"]: row["us"] for row in ours}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="files of earlier runs, to show the spread")
    arguments = parser.parse_args()
    card, today = torch.cuda.get_device_name(), datetime.date.today()
    versions = f"torch {torch.__version__.split('+')[0]}, triton {triton.__version__}"
    data: Row = {
        "about": f"{card}, {today:%B %Y}, {versions}, bf16, {HEADS} query and {KV_HEADS} KV heads of {DIM}",
        "card": card,
        "date": f"{today}",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "command": "python tools/bench_kernels.py --out figures/data/kernels_h200.json",
        "ceilings": measure_ceilings(),
        "plan_us": measure_plan(),
        "ledger": LEDGER,
    }
    torch.cuda.empty_cache()
    print(data["ceilings"], data["plan_us"], flush=True)
    stages, data["decode"], data["prefill"] = stages_of_chapter(), [], []
    for case, contexts in DECODE_CASES.items():
        data["decode"] += told(measure_decode(case, contexts, stages))
        if case in LADDER and len(set(contexts)) == 1:
            data["decode"] += told(measure_dense_decode(case, contexts))
    for case, (contexts, new) in PREFILL_CASES.items():
        data["prefill"] += told(measure_prefill(case, contexts, new))
        if contexts == new:
            data["prefill"] += told(measure_dense_prefill(case, len(new), new[0]))
    data["ceilings_after"] = measure_ceilings()
    data["runs"] = [summary(run) for run in [*(json.loads(path.read_text()) for path in arguments.earlier), data]]
    arguments.out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
