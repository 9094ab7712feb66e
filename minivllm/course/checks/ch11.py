"""Checks of chapter 11: counting a run by hand, what a table can notice, a test for a fault, judging a trace."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

from minivllm.course.exercises import Case, exercise


@exercise("11.1")
def counted_by_hand(num_steps: int, num_stores: int, num_blocks: int) -> Iterator[Case]:
    yield num_steps != 6, "the steps: the step that reads the prompts already gives each request its first new token"
    yield num_steps == 5, "the steps: five new tokens each, the first of them from the step that reads the prompts"
    yield num_stores == num_steps * 6, "the stores: each of the 6 layers stores once per step, for all requests at once"
    yield num_blocks != 5 + 3 + 2, "the blocks: the last sampled token is never computed, so it needs no slot"
    yield num_blocks == 9, "the blocks: prompt + 4 tokens each, in blocks of 4, rounded up"


@exercise("11.2")
def what_the_table_can_notice(value: str, pair: set) -> Iterator[Case]:
    yield value == "on", "the switch: with which value is a block looked up by its hash at all?"
    yield isinstance(pair, set), "the texts: answer with a set, such as {0, 1}, or set() for none"
    yield pair != {1, 3}, "the texts: 1 and 3 begin alike, so what is found there was computed after the same beginning"
    yield pair == set(), f"the texts: {pair} have no four equal tokens behind different beginnings on a block border"


@exercise("11.3")
def a_test_for_the_fault(reveal: Callable[[int], tuple[list[int], list[int]]]) -> Iterator[Case]:
    from minivllm.core import block_manager
    from minivllm.core.block_manager import BlockManager, CachedBlock
    from minivllm.core.sequence import Sequence

    def tokens_found(first: list[int], second: list[int], block_size: int) -> int:
        manager = BlockManager(64, block_size)
        seq = Sequence(0, first)
        manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.register(seq)
        return manager.get_num_cached_tokens(Sequence(1, second))

    for block_size in (2, 4, 16):
        first, second = reveal(block_size)
        long_enough = min(len(first), len(second)) > 2 * block_size
        yield long_enough, f"block size {block_size}: both prompts need at least {2 * block_size + 1} tokens"
        ids = [*first, *second]
        yield min(ids) >= 1 and max(ids) <= 4000, f"block size {block_size}: an id is outside 1 to 4000"
        right = tokens_found(list(first), list(second), block_size)
        forget_hash = patch.object(block_manager, "hash_block", lambda parent, tokens: hash(tokens))
        forget_check = patch.object(CachedBlock, "holds", lambda self, parent, tokens: self.token_ids == tokens)
        with forget_hash, forget_check:
            wrong = tokens_found(list(first), list(second), block_size)
        yield (
            wrong > right,
            f"block size {block_size}: of the second prompt a correct hash finds {right} tokens and the forgetful one "
            f"{wrong}, which must be more",
        )


@exercise("11.4")
def judge_of_traces(honest_run: Callable[..., bool]) -> Iterator[Case]:
    from minivllm.audit_trace import Trace

    def made(
        backend: str = "triton",
        layers: int = 2,
        fields: tuple = ("block_tables", "slot_mapping"),
        stores: int = 6,
        decodes: int = 6,
        taken: int = 4,
        back: int = 4,
        idle: int | None = None,
    ) -> Trace:
        trace = Trace(set_context_calls=3, blocks_taken=taken, blocks_given_back=back)
        for layer in range(layers):
            trace.fields_read[layer] = {"context_lens", *(() if layer == idle else fields)}
        trace.kernel_launches.update({f"{backend}.store_kv": stores, f"{backend}.paged_decode": decodes})
        return trace

    for backend in ("triton", "torch"):
        what = f"a run of 3 steps and 2 layers with the backend {backend!r} in which everything was read is honest"
        yield honest_run(made(backend), 2), what
    broken = {
        "layer 1 read nothing at all": made(layers=1),
        "layer 0 read neither block_tables nor slot_mapping": made(idle=0),
        "layer 1 read neither block_tables nor slot_mapping": made(idle=1),
        "no layer read block_tables": made(fields=("slot_mapping",)),
        "no layer read slot_mapping": made(fields=("block_tables",)),
        "one layer did not store in one step": made(stores=5),
        "one layer stored twice in one step": made(stores=7),
        "no layer stored, and each attended twice": made(stores=0, decodes=12),
        "a block did not come back": made(back=3),
        "no block was taken": made(taken=0, back=0),
        "nothing ran": Trace(),
    }
    for name, trace in broken.items():
        yield not honest_run(trace, 2), f"you call this run honest: {name}"
