"""Checks of chapter 02: counting rows and bytes, gaps in a cache, chunks of a prompt."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from minivllm.course.exercises import Case, exercise


@exercise("2.1")
def work_with_a_cache(passed: int, keys_seen: int, tokens_held: int) -> Iterator[Case]:
    yield passed != 12 + 16, "(a) the last of the 16 is produced by the last step; which step would run it?"
    yield passed == 27, "(a) add the tokens of the prefill and of the decode steps, one each"
    yield keys_seen == 27, "(b) a query sees the keys of all tokens up to its own, its own included"
    yield tokens_held == 27, "(c) what passed through the model is in the cache, and nothing else is"


@exercise("2.2")
def one_position_too_far(row_written: int, row_empty: int, keys_seen: int, keys_right: int) -> Iterator[Case]:
    yield row_written == 6, "(a) the loop appends first: how long is the text when it asks for len(ids)?"
    yield row_empty == 5, "(b) the prompt filled rows 0 to 4; the new token skipped one"
    yield keys_seen == 7, "(c) the attention reads from row 0 to the row just written, the empty one included"
    yield keys_right == 6, "(d) the prompt's tokens and its own"


class Tried:
    """A cache, and what it says to a write: an error's name, or "" where it wrote."""

    def __init__(self, cache: nn.Module) -> None:
        self.cache = cache

    def write(self, layer_idx: int, *positions: int, value: float | None = None, head_dim: int = 2) -> str:
        k = torch.full((len(positions), 1, head_dim), 1.0 + positions[0] if value is None else value)
        try:
            self.cache.write(layer_idx, torch.tensor(positions), k, -k)
        except NotImplementedError:
            raise
        except Exception as error:
            return type(error).__name__
        return ""


@exercise("2.3")
def no_gaps(guarded: Callable[..., nn.Module]) -> Iterator[Case]:
    cache = guarded(2, 8, 1, 2)
    tried = Tried(cache)
    yield tried.write(0, 0, 1, 2) == "", "an empty cache refuses rows 0, 1, 2 of layer 0: nothing is skipped there"
    k, v = cache.read(0, 3)
    yield bool((k == 1).all() and (v == -1).all()), "rows 0, 1, 2 were accepted, but are not in the cache"
    yield tried.write(0, 4) == "ValueError", "rows 0 to 2 are written; a write to row 4 must raise ValueError"
    yield not cache.read(0, 5)[0][4].any(), "the write to row 4 was refused, and yet row 4 has changed"
    yield tried.write(1, 3) == "ValueError", "layer 1 is empty, whatever layer 0 holds: its row 3 must be refused"
    yield tried.write(0, 3) == "", "rows 0 to 2 are written; row 3 is next and must be accepted"
    yield tried.write(0, 1) == "", "row 1 is written already; writing it again must be accepted"
    yield tried.write(0, 4) == "", "rows 0 to 3 are written, row 1 twice; row 4 is next and must be accepted"
    yield tried.write(0, 6, 5) == "", "rows 5 and 6 in one write leave no gap, in whatever order they come"
    yield tried.write(0, 0, 2) == "", "rows 0 and 2 are written already; writing both again in one write leaves no gap"
    yield tried.write(1, 0, 2) == "ValueError", "rows 0 and 2 in one write leave row 1 empty: ValueError"
    refused = "the write of rows 0 and 2 was refused, so row 0 of layer 1 is still unwritten, and row 1 not the next"
    yield tried.write(1, 1) == "ValueError", refused
    yield tried.write(1, 0) == "", "row 0 of layer 1 is next and must be accepted"
    yield tried.write(1, 0, 2) == "ValueError", "row 0 is written; rows 0 and 2 in one write still leave row 1 empty"
    mixed = "row 0 of layer 1 is written and row 1 is next: both in one write must be accepted"
    yield tried.write(1, 0, 1) == "", mixed
    second = Tried(guarded(1, 8, 1, 2))
    yield second.write(0, 1) == "ValueError", "a second cache is empty, whatever the first one holds: refuse its row 1"
    yield tried.write(0, 7) == "", "row 7 is next in the first cache, although a second one was made meanwhile"
    yield second.write(0, 0, head_dim=3) == "ValueError", "KVCache refuses vectors of a wrong size: so must yours"
    wrong_shape = "row 0 was refused for its shape, so it is still unwritten: row 1 must be refused"
    yield second.write(0, 1) == "ValueError", wrong_shape
    yield second.write(0, 0, value=0.0) == "", "row 0 must be accepted, whatever numbers are written"
    yield second.write(0, 1) == "", "row 0 was written, with zeros; that counts, so row 1 is next"
    yield tried.write(0, 8) == "IndexError", "row 8 is outside a cache of 8 rows: IndexError, as in KVCache"
    cache.reset()
    yield not cache.read(0, 8)[0].any(), "reset() must also do what KVCache.reset does: zeros in every row"
    yield tried.write(0, 1) == "ValueError", "after reset() nothing is written: row 1 must be refused"
    yield tried.write(0, 0) == "", "after reset() row 0 must be accepted"


@exercise("2.4")
def bytes_of_llama(token_bytes: int, conversations: int, without_sharing: int) -> Iterator[Case]:
    yield token_bytes != 2 * 32 * 32 * 128 * 2, "(a) the cache keeps key/value heads, not query heads"
    yield token_bytes not in (32 * 8 * 128 * 2, 2 * 32 * 8 * 128), "(a) a factor of 2 is missing: K and V, or 2 bytes"
    yield token_bytes != 128, "(a) that is right in KiB: how many bytes?"
    yield token_bytes == 131_072, "(a) multiply 2, layers, key/value heads, head_dim and bytes per number"
    yield conversations == 20, "(b) what does one conversation of 8,192 tokens take, in GiB?"
    yield without_sharing == 5, "(c) 32 key/value heads instead of 8: how much larger is each conversation?"


class Recorder(nn.Module):
    """Stands for a model with a cache: notes what it is handed; the hidden state of a token is [id, position]."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[list[int], list[int]]] = []

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if len(input_ids) != len(positions):
            raise ValueError(f"{len(input_ids)} tokens came with {len(positions)} positions")
        self.calls.append((input_ids.tolist(), positions.tolist()))
        return torch.stack([input_ids, positions], dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise TypeError("return the last token's hidden state; no logits are asked for")


@exercise("2.5")
def prefill_by_chunks(prefill: Callable[[nn.Module, list[int], int], Tensor]) -> Iterator[Case]:
    for length, chunk in ((6, 2), (7, 3), (5, 8), (1, 1)):
        model, ids = Recorder(), list(range(100, 100 + length))
        case = f"{length} tokens in chunks of {chunk}"
        try:
            last = prefill(model, ids, chunk)
        except ValueError as error:  # use_kv_cache finds no attention in the recorder
            yield "the model needs" not in str(error), f"{case}: a cache is attached already: do not attach one"
            raise
        sizes = [len(tokens) for tokens, _ in model.calls]
        yield bool(sizes), f"{case}: the model was never run"
        yield max(sizes) <= chunk, f"{case}: a chunk had {max(sizes)} tokens"
        yield 0 not in sizes, f"{case}: the model was run on no tokens"
        tokens, positions = (list(chain.from_iterable(parts)) for parts in zip(*model.calls, strict=True))
        yield tokens == ids, f"{case}: the model was handed other tokens, {tokens}"
        yield positions == list(range(length)), f"{case}: the positions were {positions}"
        yield len(sizes) == -(-length // chunk), f"{case}: {len(sizes)} runs, fewer would do"
        yield tuple(last.shape) == (1, 2), f"{case}: return one row, [1, hidden_size]; you returned {list(last.shape)}"
        yield last[0, 1] == length - 1, f"{case}: you returned the hidden state of another token than the last"
