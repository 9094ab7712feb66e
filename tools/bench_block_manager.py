"""How fast is the bookkeeping? Admission, one append per token, registration and release, with no model.

    python tools/bench_block_manager.py [--sequences 256] [--tokens 1000] [--block-size 16] [--repeats 5]

Every sequence comes with one token and grows one token at a time, all in turn, as decoding does: the most calls that
this many tokens can cost. The last line is the best of `repeats` runs with prefix caching on.
"""

import argparse
import time
from collections.abc import Callable

from minivllm.core.block_manager import BlockManager, cdiv
from minivllm.core.sequence import Sequence

Work = Callable[[BlockManager, list[Sequence], int], None]


def one_by_one(manager: BlockManager, sequences: list[Sequence], num_tokens: int) -> None:
    """Admit all, grow all to `num_tokens` tokens one at a time, free all."""
    for seq in sequences:
        manager.allocate(seq, 1)
    for length in range(2, num_tokens + 1):
        for seq in sequences:
            seq.num_computed_tokens = length - 1
            manager.register(seq)
            manager.append(seq, length)
    for seq in sequences:
        manager.free(seq)


def all_at_once(manager: BlockManager, sequences: list[Sequence], num_tokens: int) -> None:
    """Admit all with their whole prompts, register, free all."""
    for seq in sequences:
        manager.allocate(seq, num_tokens)
        seq.num_computed_tokens = num_tokens
        manager.register(seq)
    for seq in sequences:
        manager.free(seq)


def measure(work: Work, options: argparse.Namespace, *, enable_prefix_caching: bool) -> float:
    """Seconds of the best run; the sequences are made outside the clock and share nothing."""
    best = float("inf")
    for _ in range(options.repeats):
        num_blocks = options.sequences * cdiv(options.tokens, options.block_size)
        manager = BlockManager(num_blocks, options.block_size, enable_prefix_caching=enable_prefix_caching)
        sequences = [
            Sequence(i, list(range(i * options.tokens, (i + 1) * options.tokens))) for i in range(options.sequences)
        ]
        start = time.perf_counter()
        work(manager, sequences, options.tokens)
        best = min(best, time.perf_counter() - start)
        manager.check_integrity()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("--sequences", 256), ("--tokens", 1000), ("--block-size", 16), ("--repeats", 5)]:
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    print(f"{options.sequences} sequences × {options.tokens} tokens, blocks of {options.block_size}")
    for caching in (False, True):
        for work in (all_at_once, one_by_one):
            seconds = measure(work, options, enable_prefix_caching=caching)
            calls = options.sequences * (options.tokens if work is one_by_one else 1)
            label = f"{work.__name__}, prefix caching {'on' if caching else 'off'}"
            print(f"{label:36} {seconds:7.3f} s   {seconds / calls * 1e6:7.2f} µs per sequence and step")


if __name__ == "__main__":
    main()
