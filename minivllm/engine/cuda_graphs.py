# Generated from notebooks/10_gpu_performance.ipynb by tools/export.py; edit there.
"""Decode steps recorded once per batch size, and replayed with a single launch."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that are recorded: 1, 2, 4, 8, then every sixteenth, and the largest batch itself.

    In the manner of vLLM's `cudagraph_capture_sizes`. max_num_seqs is at least 1.
    """
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def bucket_for(num_rows: int, sizes: list[int]) -> int:
    """The smallest recorded size that holds num_rows. Raises ValueError for more than the largest."""
    if num_rows > sizes[-1]:
        raise ValueError(f"a batch of {num_rows} rows is larger than the largest recorded step, {sizes[-1]}")
    return sizes[bisect_left(sizes, num_rows)]


@dataclass(frozen=True)
class Recording:
    """A piece of work that can be repeated: `replay` reads the same memory again and fills `output` anew."""

    replay: Callable[[], object]
    output: Tensor


def record_cuda_graph(work: Callable[[], Tensor], pool: object) -> Recording:
    """Run `work` once to compile its kernels and warm its libraries, then record it as a CUDA graph.

    pool: a `torch.cuda.graph_pool_handle()`; graphs that never run at the same time share their memory through it.
    What may be recorded: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = work()
    return Recording(graph.replay, output)
