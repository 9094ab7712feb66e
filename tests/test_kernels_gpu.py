"""What only a GPU can show: replayed graphs, and caches of more than 2^31 numbers. Skipped elsewhere."""

import pytest
import torch
from kernel_cases import assert_close, dense_answer, make_batch

import minivllm  # noqa: F401  (first: it chooses Triton's interpreter where there is no GPU)
from minivllm.kernels import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_replayed_graph_follows_the_contexts():
    """[nano-vllm#106] plan, decode and merge recorded once; contexts grow, shrink and vanish between the replays."""
    from minivllm.kernels.paged_decode import DecodePlan, paged_decode

    first = make_batch([700, 3, 0, 64], device="cuda", dtype=torch.bfloat16, block_size=16)
    q, lens, tables = first.q.clone(), first.context_lens, torch.zeros(4, 64, dtype=torch.int32, device="cuda")
    k_cache, v_cache = torch.randn(2, 256, 16, 2, 16, dtype=torch.bfloat16, device="cuda")
    tables.copy_(torch.randperm(256).view(4, 64))
    plan = DecodePlan(4, 2, 16, torch.device("cuda"), max_num_seqs=4)

    def step() -> torch.Tensor:
        plan.update(lens, 1024)
        return paged_decode(q, k_cache, v_cache, tables, lens, 0.25, plan=plan)

    step()  # compiles, which a recording must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for contexts in ([700, 3, 0, 64], [701, 4, 0, 65], [1, 1024, 1024, 1024], [0, 0, 5, 0], [1024, 1, 1, 1]):
        lens.copy_(torch.tensor(contexts))
        out.fill_(float("nan"))
        graph.replay()
        want = reference.paged_decode(q, k_cache, v_cache, tables, lens, 0.25)
        assert_close(out, want.double().cpu(), torch.bfloat16)


@pytest.mark.parametrize("kernel", ["paged_decode", "paged_prefill"], ids=lambda k: f"vllm#47671-{k}")
def test_a_cache_of_more_than_2_to_the_31_numbers(kernel):
    """The last blocks of a cache whose offsets need more than 31 bits."""
    import importlib

    from minivllm.kernels.store_kv import store_kv

    attend = getattr(importlib.import_module(f"minivllm.kernels.{kernel}"), kernel)
    small = make_batch([40], [1 if kernel == "paged_decode" else 40], head_dim=128, num_kv_heads=8, block_size=16,
                       dtype=torch.bfloat16, device="cuda")  # fmt: skip
    num_blocks = 2**31 // (16 * 8 * 128) + 4
    k_cache, v_cache = torch.full((2, num_blocks, 16, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[num_blocks - 1, num_blocks - 3, num_blocks - 2]], dtype=torch.int32, device="cuda")
    slots = torch.tensor([int(table[0, p // 16]) * 16 + p % 16 for p in range(40)], device="cuda")
    assert int(slots.min()) * 8 * 128 > 2**31
    store_kv(small.keys[0].cuda(), small.values[0].cuda(), k_cache, v_cache, slots)
    args = [small.q, k_cache, v_cache, table, small.context_lens]
    out = attend(*args, *([] if kernel == "paged_decode" else [small.cu_seqlens_q]), small.scale)
    assert_close(out, dense_answer(small), torch.bfloat16)
