# Generated from notebooks/05_context.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""From a batch of sequences to tensors, through the model, to the logits of those that need a next token."""

from array import array
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from minivllm.core.batch import Batch
from minivllm.core.block_manager import slot_of
from minivllm.core.kv_cache import PagedKVCache
from minivllm.kernels.backends import load_backend
from minivllm.layers.attention import number_layers
from minivllm.model.qwen3 import Qwen3
from minivllm.utils.context import Context, forward_context


def pad_tables(tables: list[array], num_rows: int | None = None, width: int | None = None) -> np.ndarray:
    """Block tables of different lengths as one int32 [num_rows, width]; cells behind a table's end are 0.

    None: as many rows as tables, as wide as the longest.
    """
    lengths = np.fromiter(map(len, tables), np.int64, len(tables))
    width = lengths.max() if width is None else width
    padded = np.zeros((len(tables) if num_rows is None else num_rows, width), np.int32)
    # Cell i of the concatenated tables goes to its row's beginning, plus its place in the row.
    shift = np.arange(len(tables)) * width - (np.cumsum(lengths) - lengths)
    cells = np.frombuffer(b"".join(tables), np.int32)
    padded.reshape(-1)[np.arange(len(cells)) + np.repeat(shift, lengths)] = cells
    return padded


class ModelRunner:
    """Runs batches of sequences through a model over a paged cache.

    backend: the name of the attention backend. Raises BackendError for an unknown one.
    """

    def __init__(self, model: Qwen3, kv_cache: PagedKVCache, *, backend: str = "torch") -> None:
        self.model, self.kv_cache = model, kv_cache
        self.backend = load_backend(backend)
        self.device = kv_cache.k_cache.device
        number_layers(model)

    def to_device(self, values: np.ndarray) -> Tensor:
        """A NumPy array of any shape as a tensor on the cache's device."""
        return torch.from_numpy(values).to(self.device)

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Context]:
        """The step's token ids and positions, int64 [num_tokens], and its Context. Raises ValueError for no rows."""
        rows = batch.rows
        if not rows:
            raise ValueError("the batch has no rows: there is nothing to run in this step")
        new = np.fromiter((row.num_new_tokens for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
        tables = pad_tables([row.block_table for row in rows])
        positions, slots = lay_out(starts, new, tables, self.kv_cache.block_size)
        ids = chain.from_iterable(row.seq.token_ids[row.start : row.end] for row in rows)
        token_ids = np.fromiter(ids, np.int64, len(positions))
        context = self.make_context(slots, tables, starts + new, new)
        return self.to_device(token_ids), self.to_device(positions), context

    def make_context(self, slots: np.ndarray, tables: np.ndarray, lens: np.ndarray, new: np.ndarray) -> Context:
        """The Context of a step. slots [num_tokens]; tables [num_rows, max_blocks]; lens, new [num_rows]."""
        return Context(
            slot_mapping=self.to_device(slots),
            block_tables=self.to_device(tables),
            context_lens=self.to_device(lens),
            cu_seqlens_q=self.to_device(np.cumsum(np.append(0, new), dtype=np.int32)),
            max_seqlen_q=int(new.max()),
            max_context_len=int(lens.max()),
            kv_cache=self.kv_cache,
            backend=self.backend,
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """One step: float32 logits [rows with needs_logits, vocab_size], in the batch's order.

        Writes the K and V of every new token. The sequences' counters are the caller's to move on. Raises ValueError
        for a batch of no rows.
        """
        input_ids, positions, context = self.prepare(batch)
        self.kv_cache.copy_blocks(batch.block_copies)
        with forward_context(context):
            hidden = self.model(input_ids, positions)
        wanted = [s for s, row in enumerate(batch.rows) if row.needs_logits]
        last_rows = context.cu_seqlens_q[1:][wanted].long() - 1
        return self.model.compute_logits(hidden[last_rows])


def lay_out(starts: np.ndarray, new: np.ndarray, tables: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Position and slot of each new token, int64 [num_tokens], rows one behind the other.

    starts, new [num_rows]: tokens cached before, tokens to compute; tables [num_rows, max_blocks], padded.
    """
    row_of = np.repeat(np.arange(len(new)), new)  # [num_tokens]: which row a token belongs to
    before = np.cumsum(new) - new  # tokens of the rows in front
    positions = np.arange(len(row_of)) - before[row_of] + starts[row_of]
    row_length = tables.shape[1] * block_size
    slots = slot_of(positions + row_of * row_length, tables.ravel().astype(np.int64), block_size)
    return positions, slots
