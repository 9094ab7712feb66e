# Generated from notebooks/10_gpu_performance.ipynb by tools/export.py; edit there.
"""A model runner that does not wait: fused kernels, recorded steps, tokens that stay on the device."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minivllm.config import SchedulerConfig
from minivllm.core.batch import Batch
from minivllm.core.block_manager import cdiv
from minivllm.core.kv_cache import PagedKVCache
from minivllm.engine.cuda_graphs import Recording, bucket_for, bucket_sizes, record_cuda_graph
from minivllm.engine.model_runner import ModelRunner, lay_out, pad_tables
from minivllm.engine.transfer import PendingTokens, StepBuffers
from minivllm.kernels import reference
from minivllm.layers.sampler import SamplingRow, sample
from minivllm.model.fused_qwen3 import FusedQwen3
from minivllm.model.qwen3 import Qwen3
from minivllm.utils.context import Context, forward_context

Recorder = Callable[[Callable[[], Tensor], object], Recording]


class FastRunner(ModelRunner):
    """Launches steps and returns at once; `launch(...).wait()` has the tokens.

    fused: run the model on packed weights and fused kernels. limits: the largest step that will be launched; they size
    the buffers, and the recorded steps after `record_steps`.
    """

    def __init__(
        self, model: Qwen3, kv_cache: PagedKVCache, limits: SchedulerConfig, *, backend: str = "torch",
        fused: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, kv_cache, backend=backend)
        self.limits, self.ops = limits, reference
        if backend == "triton":
            from minivllm.kernels import fused as kernels  # here, as Triton is not everywhere

            self.ops = kernels
        self.fused = FusedQwen3(model, self.ops) if fused else None
        # A multiple of 16 columns: Triton compiles a kernel anew for strides that are not.
        self.table_width = cdiv(cdiv(limits.max_model_len, kv_cache.block_size), 16) * 16
        # Three numbers of 8 bytes for each token; for each row a table, 44 bytes more, and room to align the arrays.
        num_bytes = 24 * limits.max_num_batched_tokens + (4 * self.table_width + 64) * (limits.max_num_seqs + 4)
        self.buffers = StepBuffers(num_bytes, self.device)
        self.sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=self.device)
        self.sizes: list[int] = []  # of the recorded steps
        self.recordings: dict[int, tuple[Recording, dict[str, Tensor]]] = {}

    def lay_out_step(self, batch: Batch, sampling: list[SamplingRow], num_rows: int) -> dict[str, np.ndarray]:
        """All inputs of a step as arrays; with fewer than num_rows rows, padded by rows that write nowhere."""
        rows, pad = batch.rows, num_rows - len(batch.rows)
        new = np.array([row.num_new_tokens for row in rows], np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        wanted = np.array([row.needs_logits for row in rows], np.bool_)
        tables = pad_tables([row.block_table for row in rows], num_rows, self.table_width)
        positions, slots = lay_out(starts, new, tables, self.kv_cache.block_size)
        ids = [token for row in rows for token in row.seq.input_ids(row.start, row.end)]
        lens, ends = starts + new, np.cumsum(new, dtype=np.int32)
        last = int(new.sum())
        return {
            "input_ids": padded(ids, np.int64, pad),
            "positions": padded(positions, np.int64, pad),
            "slot_mapping": padded(slots, np.int64, pad, fill=-1),
            "seeds": padded([row.seed for row in sampling], np.int64, pad),
            "last_rows": padded(ends[wanted] - 1, np.int64, pad),
            "context_lens": padded(lens, np.int32, pad),
            "cu_seqlens_q": np.concatenate([[0], ends, np.arange(last + 1, last + pad + 1)], dtype=np.int32),
            "drawn_at": padded(lens[wanted], np.int32, pad),
            "rules": padded(np.array([row.rules for row in sampling]).reshape(-1, 4), np.float32, pad),
            "block_tables": tables,
        }

    def context_of(self, inputs: dict[str, Tensor], max_seqlen_q: int, max_context_len: int) -> Context:
        """The Context of a step whose inputs are on the device."""
        names = ("slot_mapping", "block_tables", "context_lens", "cu_seqlens_q")
        fields = {name: inputs[name] for name in names}
        longest = {"max_seqlen_q": max_seqlen_q, "max_context_len": max_context_len}
        return Context(**fields, **longest, kv_cache=self.kv_cache, backend=self.backend)

    @torch.inference_mode()
    def forward(self, inputs: dict[str, Tensor], context: Context) -> Tensor:
        """Hidden states of the step's tokens, [num_tokens, hidden_size]."""
        ids, positions = inputs["input_ids"], inputs["positions"]
        with forward_context(context):
            if self.fused is not None:
                return self.fused(ids, positions, self.sampled)
            fed = self.sampled[(-1 - ids).clamp(min=0)]
            return self.model(torch.where(ids < 0, fed, ids), positions)

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → scores, [num_rows, vocab_size]."""
        return (self.fused or self.model).compute_logits(hidden)

    @property
    def samples_fast(self) -> bool:
        """Whether there is a kernel that chooses tokens."""
        return self.ops is not reference

    def sample_fast(self, logits: Tensor, inputs: dict[str, Tensor], num_rows: int, *, filtered: bool = False) -> None:
        """A token for each of the first rows of a step, into `sampled`. logits [num_rows, vocab_size]."""
        columns = (inputs[name][:num_rows] for name in ("rules", "seeds", "drawn_at"))
        if num_rows:
            self.ops.sample_plain(logits, *columns, self.sampled[:num_rows], filtered=filtered)

    def record_steps(self, record: Recorder = record_cuda_graph) -> None:
        """Record the decode step of every bucket, the largest first: the others find room in its memory."""
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.sizes = bucket_sizes(self.limits.max_num_seqs)
        for size in reversed(self.sizes):
            arrays = self.lay_out_step(Batch([]), [], size)
            self.buffers.send(arrays)
            inputs = self.buffers.views(arrays)
            self.recordings[size] = record(self.decode_step(inputs), pool), inputs

    def decode_step(self, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
        """The work of a step in which every row has one token and gets a next one; returns the logits.

        Tokens are drawn too, without filters: most steps want it so, and another launch would cost more.
        """

        def work() -> Tensor:
            # A new Context each time, so that the plan of the decode kernel is made (and recorded) each time.
            context = self.context_of(inputs, 1, self.limits.max_model_len)
            logits = self.logits_of(self.forward(inputs, context))
            if self.samples_fast:
                self.sample_fast(logits, inputs, len(logits))
            return logits

        return work

    def is_recorded(self, batch: Batch) -> bool:
        """Whether the step can be a replay: one token per row, and a next one for each."""
        return bool(self.sizes) and all(row.num_new_tokens == 1 and row.needs_logits for row in batch.rows)

    @torch.inference_mode()
    def launch(self, batch: Batch, sampling: list[SamplingRow]) -> PendingTokens:
        """Start one step; its tokens also stay on the device, for the next one.

        sampling: for each row that needs logits, in the order of the rows. Raises ValueError for no rows, and for
        more than the buffers or the recorded steps hold.
        """
        if not batch.rows:
            raise ValueError("the batch has no rows: there is nothing to run in this step")
        self.kv_cache.copy_blocks(batch.block_copies)
        recorded = self.is_recorded(batch)
        inputs, logits = (self._replay if recorded else self._run_eagerly)(batch, sampling)
        return self.choose(logits, sampling, inputs, drawn=recorded)

    def _replay(self, batch: Batch, sampling: list[SamplingRow]) -> tuple[dict[str, Tensor], Tensor]:
        size = bucket_for(len(batch.rows), self.sizes)
        self.buffers.send(self.lay_out_step(batch, sampling, size))
        recording, inputs = self.recordings[size]
        recording.replay()
        return inputs, recording.output[: len(batch.rows)]

    def _run_eagerly(self, batch: Batch, sampling: list[SamplingRow]) -> tuple[dict[str, Tensor], Tensor]:
        arrays = self.lay_out_step(batch, sampling, len(batch.rows))
        self.buffers.send(arrays)
        inputs = self.buffers.views(arrays)
        longest = max(row.num_new_tokens for row in batch.rows)
        context = self.context_of(inputs, longest, int(arrays["context_lens"].max()))
        hidden = self.forward(inputs, context)
        return inputs, self.logits_of(hidden[inputs["last_rows"]])

    def choose(
        self, logits: Tensor, sampling: list[SamplingRow], inputs: dict[str, Tensor], *, drawn: bool
    ) -> PendingTokens:
        """One token per row of the logits, into `sampled` and on its way to the host.

        logits [num_rows, vocab_size]; inputs: of the step, on the device. drawn: the step has drawn tokens already,
        without filters.
        """
        num_rows = len(sampling)
        tokens, asked = self.sampled[:num_rows], None
        if not self.samples_fast or any(row.needs_values for row in sampling):
            asked = logits.float()
            tokens.copy_(torch.tensor(sample(asked.clone(), sampling), dtype=torch.int64))
        elif (filtered := any(row.is_filtered for row in sampling)) or not drawn:
            self.sample_fast(logits, inputs, num_rows, filtered=filtered)
        pending = PendingTokens.fetch(tokens)
        pending.logits = asked if any(row.params.logprobs is not None for row in sampling) else None
        return pending


def padded(values: np.ndarray | list, dtype: type, pad: int, fill: int = 0) -> np.ndarray:
    """Values [n, …] with `pad` more rows of `fill` behind them, [n + pad, …]."""
    result = np.full((len(values) + pad, *np.shape(values)[1:]), fill, dtype)
    result[: len(values)] = values
    return result
