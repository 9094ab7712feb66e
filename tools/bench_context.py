#!/usr/bin/env python3
"""How long the host needs to turn a decode step into a Context: tools/bench_context.py [--requests 256].

Prints the median over many builds, for contexts of 100, 1,000 and 4,000 tokens in blocks of 16.
"""

import argparse
from array import array

import torch

from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.block_manager import cdiv
from minivllm.core.kv_cache import PagedKVCache
from minivllm.core.sequence import Sequence
from minivllm.course.timing import median_ms
from minivllm.engine.model_runner import ModelRunner


def decode_batch(num_requests: int, context_len: int, block_size: int) -> Batch:
    """So many requests, each about to compute one token behind context_len - 1 cached ones."""
    rows = []
    for number in range(num_requests):
        seq = Sequence(number, list(range(context_len)))
        seq.num_computed_tokens = context_len - 1
        rows.append(ScheduledSequence(seq, 1, array("i", range(number, number + cdiv(context_len, block_size)))))
    return Batch(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    requests = parser.parse_args().requests
    runner = ModelRunner(torch.nn.Identity(), PagedKVCache(1, 1, 16, 1, 2))
    for context_len in (100, 1000, 4000):
        batch = decode_batch(requests, context_len, 16)
        median = median_ms(lambda batch=batch: runner.prepare(batch), repeats=101)
        print(f"{requests} requests, {context_len:5,} tokens each: {median:.3f} ms")


if __name__ == "__main__":
    main()
