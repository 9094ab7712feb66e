"""The kernel tests bite: kernels with one thing wrong, made by changing their text, must fail the same comparison.

In mlir-air a head counter that wrapped too late let the causal mask advance at half its rate, and a test whose
tolerance was 0.5 passed (https://github.com/Xilinx/mlir-air/issues/1427, mended in #1428).
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, PagedBatch, assert_close, dense_answer, make_batch

import minivllm

pytest.importorskip("triton", reason="triton has no wheels for this platform")
KERNELS = Path(minivllm.__file__).parent / "kernels"


def mutant(folder: Path, module: str, old: str, new: str):
    """The module minivllm.kernels.<module> with `old` replaced by `new`, everywhere."""
    text = (KERNELS / f"{module}.py").read_text(encoding="utf-8")
    assert old in text, f"{module} no longer has {old!r}: bring this test up to date"
    path = folder / f"{module}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutant_{module}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def decode(module, batch: PagedBatch) -> torch.Tensor:
    return module.paged_decode(
        batch.q, batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.scale
    )


def prefill(module, batch: PagedBatch) -> torch.Tensor:
    args = batch.k_cache, batch.v_cache, batch.block_tables, batch.context_lens, batch.cu_seqlens_q
    return module.paged_prefill(batch.q, *args, batch.scale)


def stored(module) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory around two caches after a store with a padded row, and what it should be."""
    pool = torch.full((2, 6, 4, 2, 16), 7.0, device=DEVICE)
    caches = pool[0, 1:-1], pool[1, 1:-1]  # a wrong slot must not leave the memory that we own
    k, v = torch.randn(2, 3, 2, 32, device=DEVICE)[..., :16]
    module.store_kv(k, v, *caches, torch.tensor([5, -1, 10], device=DEVICE))
    want = torch.full_like(pool, 7.0)
    for part, new in ((want[0, 1:-1], k), (want[1, 1:-1], v)):
        part.view(16, 2, 16)[[5, 10]] = new[[0, 2]]
    return pool, want


@pytest.mark.parametrize("module", ["paged_decode", "paged_prefill", "store_kv"])
def test_the_text_itself_is_right(tmp_path, module):
    """Without a change, what is loaded from text passes: a mutant fails because of its mutation."""
    loaded = mutant(tmp_path, module, '"""Triton', '"""Triton')
    if module == "paged_decode":
        batch = make_batch([300, 140], block_size=64, device=DEVICE)
        assert_close(decode(loaded, batch), dense_answer(batch), torch.float32)
    elif module == "paged_prefill":
        batch = make_batch([150, 90, 70, 5], [150, 40, 1, 5], block_size=64, device=DEVICE)
        assert_close(prefill(loaded, batch), dense_answer(batch), torch.float32)
    else:
        assert torch.equal(*stored(loaded))


DECODE = [
    ("mask-shifted-by-one", "key[None, :] < limits[:, None]", "key[None, :] <= limits[:, None]"),
    ("split-dropped", "mask=piece < pieces,", "mask=piece < pieces - 1,"),
    ("table-rows-swapped", "block_tables + seq * table_stride", "block_tables + (seq ^ 1) * table_stride"),
    ("read-past-the-end", "tl.minimum(key, end - 1) if MASKED else key", "key"),
    ("old-sum-not-shrunk", "total = total * shrink + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
    ("piece-starts-late", "tl.store(item + 1, p * piece)", "tl.store(item + 1, p * piece + (p > 0))"),
    ("another-kv-head", "kv_head * head_stride", "0 * head_stride"),
    (
        "group-member-repeated",
        "head = kv_head * GROUP + tl.minimum(row, GROUP - 1)",
        "head = kv_head * GROUP + row * 0",
    ),
]


@pytest.mark.parametrize(("old", "new"), [m[1:] for m in DECODE], ids=[m[0] for m in DECODE])
def test_a_wrong_decode_kernel_is_found(tmp_path, old, new):
    batch = make_batch([300, 140], block_size=64, device=DEVICE)  # few enough to be cut into pieces
    want = dense_answer(batch)
    with pytest.raises(AssertionError, match=r"off by|NaN"):
        assert_close(decode(mutant(tmp_path, "paged_decode", old, new), batch), want, torch.float32)


PREFILL = [
    ("mlir-air#1427-mask-at-half-its-rate", "q_rows, cached + token + 1,", "q_rows, cached + token // 2 + 1,"),
    ("mask-one-key-short", "q_rows, cached + token + 1,", "q_rows, cached + token,"),
    ("mask-one-key-long", "q_rows, cached + token + 1,", "q_rows, cached + token + 2,"),
    ("unmasked-tiles-too-far", "diagonal = fewest // KEYS", "diagonal = end // KEYS"),
    ("last-tile-dropped", "tl.range(diagonal, end, KEYS", "tl.range(diagonal, end - KEYS, KEYS"),
    ("table-rows-swapped", "tl.cast(seq, tl.int64) * table_stride", "tl.cast(seq ^ 1, tl.int64) * table_stride"),
    ("another-query-head", "+ head * q_head_stride", "+ (head ^ 1) * q_head_stride"),
    ("cached-tokens-forgotten", "tl.load(context_lens + seq) - num_new", "0"),
]


@pytest.mark.parametrize(("old", "new"), [m[1:] for m in PREFILL], ids=[m[0] for m in PREFILL])
def test_a_wrong_prefill_kernel_is_found(tmp_path, old, new):
    batch = make_batch([150, 90, 70, 5], [150, 40, 1, 5], block_size=64, device=DEVICE)
    want = dense_answer(batch)
    with pytest.raises(AssertionError, match=r"off by|NaN"):
        assert_close(prefill(mutant(tmp_path, "paged_prefill", old, new), batch), want, torch.float32)


@pytest.mark.parametrize(
    ("old", "new"),
    [("if slot < 0:", "if slot < -1:"), ("slot % BLOCK_SIZE", "0"), ("head * k_head_stride", "head * HEAD_DIM")],
    ids=["vllm#43810-slot-minus-one", "place-forgotten", "stride-assumed"],
)
def test_a_wrong_store_kernel_is_found(tmp_path, old, new):
    assert not torch.equal(*stored(mutant(tmp_path, "store_kv", old, new)))
