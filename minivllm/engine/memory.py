# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""How many blocks fit: what the memory has left after weights and activations."""

import os

import torch

from minivllm.config import EngineConfig, num_blocks_that_fit
from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.block_manager import BlockManager, cdiv
from minivllm.core.kv_cache import PagedKVCache
from minivllm.core.sequence import Sequence
from minivllm.engine.model_runner import ModelRunner
from minivllm.layers.sampler import SamplingRow, sample
from minivllm.model.qwen3 import Qwen3
from minivllm.sampling_params import SamplingParams

CPU_SHARE = 0.1  # of the machine's memory, at most, for a cache on a CPU …
CPU_SEQUENCES = 32  # … and no more than so many sequences of full length need: other programs live there too


def cpu_budget() -> int:
    """Bytes for a cache on a CPU: a tenth of the machine's memory, or of 8 GiB where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        total = 8 * 2**30
    return int(CPU_SHARE * total)


def widest_batch(config: EngineConfig, max_model_len: int) -> tuple[Batch, int]:
    """The largest step that the scheduler may make, for measuring; and the number of blocks that it may use: one more
    for each sequence than the tokens need, as its last block may be half full. max_model_len: in tokens."""
    budget, manager_size = config.max_num_batched_tokens, cdiv(config.max_num_batched_tokens, config.block_size)
    lengths = [max_model_len] * (budget // max_model_len) + [budget % max_model_len]
    manager = BlockManager(manager_size + len(lengths), config.block_size, enable_prefix_caching=False)
    rows = []
    for number, length in enumerate(length for length in lengths if length):
        seq = Sequence(number, [0] * length)
        manager.allocate(seq, length)
        rows.append(ScheduledSequence(seq, length, manager.block_table(seq)))
    return Batch(rows), manager.num_blocks


def run_widest_step(model: Qwen3, runner: ModelRunner, batch: Batch, max_num_seqs: int) -> None:
    """The step that takes most memory in the model, then the one that takes most in the sampler: all rows draw."""
    runner.run(batch)
    rows = [SamplingRow(Sequence(i, [0]), SamplingParams(top_p=0.9), seed=i) for i in range(max_num_seqs)]
    sample(model.compute_logits(model.model.embed_tokens.weight[:1].expand(max_num_seqs, -1)), rows)


def measure_peak(model: Qwen3, config: EngineConfig, max_model_len: int, backend: str) -> tuple[int, int]:
    """Run the widest step on a CUDA device; returns (bytes of the weights, peak bytes beyond them)."""
    weight = model.lm_head.weight
    batch, num_blocks = widest_batch(config, max_model_len)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(weight.device)
    cache = PagedKVCache.for_model(
        model.config, num_blocks, config.block_size, device=weight.device, dtype=weight.dtype
    )
    torch.cuda.reset_peak_memory_stats(weight.device)
    with_cache = torch.cuda.memory_allocated(weight.device)
    run_widest_step(model, ModelRunner(model, cache, backend=backend), batch, config.max_num_seqs)
    peak = torch.cuda.max_memory_allocated(weight.device) - with_cache
    del cache
    torch.cuda.empty_cache()
    return before, peak


def gpu_budget(total: int, free: int, weights: int, utilization: float) -> int:
    """Bytes that this engine may use on a GPU: its share of the whole, but never more than it has and can still get.

    free: what no process holds now, with our weights loaded. Other processes may hold the rest of `total`.
    """
    return min(int(utilization * total), free + weights)


def count_blocks(model: Qwen3, config: EngineConfig, max_model_len: int, backend: str) -> int:
    """The number of blocks of the cache: as configured, or what fits, but no more than all sequences could ever need
    (on a CPU: than CPU_SEQUENCES could).

    Raises ConfigError, naming the sizes and what to change, when not a single block fits.
    """
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks
    weight = model.lm_head.weight
    one_block = PagedKVCache.for_model(model.config, 1, config.block_size, device="meta", dtype=weight.dtype)
    if weight.is_cuda:
        weights, peak = measure_peak(model, config, max_model_len, backend)
        free, total = torch.cuda.mem_get_info(weight.device)
        budget = gpu_budget(total, free, weights, config.gpu_memory_utilization)
        most = config.max_num_seqs
    else:
        weights, peak, budget = 0, 0, cpu_budget()
        most = min(config.max_num_seqs, CPU_SEQUENCES)
    fitting = num_blocks_that_fit(budget, model_bytes=weights, peak_bytes=peak, block_bytes=one_block.bytes_per_block)
    return min(fitting, most * cdiv(max_model_len, config.block_size))
