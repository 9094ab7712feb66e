# Generated from notebooks/08_scheduler.ipynb, 09_engine.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""Who runs next: one token budget per step, first come first served, preemption by recomputation."""

from collections import deque

from minivllm.config import SchedulerConfig
from minivllm.core.batch import Batch, ScheduledSequence
from minivllm.core.block_manager import BlockManager, NoFreeBlocksError
from minivllm.core.sequence import FinishReason, Sequence, SequenceStatus


class RequestError(ValueError):
    """A request that this engine can never serve. The message names the sizes and the knob."""


class SchedulerError(RuntimeError):
    """The results that were handed back do not belong to the step."""


class Scheduler:
    """Decides for each step which sequences compute how many tokens.

    There is no prefill phase and no decode phase. A sequence has `num_tokens` tokens, of which `num_computed_tokens`
    are in the cache, and a step lets it catch up by as many as the step's token budget has left. A decoding sequence
    lacks one token, a new prompt lacks what the prefix cache does not hold, a preempted sequence lacks what was
    thrown away.

                  add                schedule: all its blocks would fit
        request ───────► WAITING ─────────────────────────────────► RUNNING ───────► FINISHED
                            ▲                                          │   update: stop, length
                            └──────────────────────────────────────────┘   finish: abort, stop string
                              schedule: preempted, its blocks are freed

    A waiting sequence holds no block, a running one those that cover its computed tokens and the tokens of this
    step, a finished one none. `running` followed by `waiting` is in order of arrival: admission takes from the front
    of `waiting`, preemption puts the last of `running` back there.

    One step is `batch = schedule()`, then the model, then `update(batch, sampled)`. `num_computed_tokens` advances in
    `update`, so it never counts a token whose K and V are not in the cache. An engine that launches a step before
    it knows the tokens of the last one has its two halves instead, `advance` and `settle` (chapter 10).

    Sources: iteration-level scheduling is Orca's (OSDI 2022), the budget that bounds a step is Sarathi-Serve's (OSDI
    2024), tokens to catch up with instead of phases are vLLM's (vllm/v1/core/sched/scheduler.py).
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._unfinished: dict[int, Sequence] = {}
        self._forks: dict[int, list[Sequence]] = {}  # parent's seq_id → forks that wait for its prompt

    @property
    def max_seq_len(self) -> int:
        """Tokens that one sequence may have: the model's limit, or the whole pool where that is smaller."""
        pool = self.block_manager.num_blocks * self.block_manager.block_size
        return min(self.config.max_model_len, pool)

    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._unfinished)

    def _validate(self, seq: Sequence) -> None:
        if seq.seq_id in self._unfinished:
            raise RequestError(f"seq_id {seq.seq_id} is in use by an unfinished sequence")
        if seq.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {seq.max_tokens} (sequence {seq.seq_id})")
        if seq.num_tokens >= self.max_seq_len:
            pool, block_size = self.block_manager.num_blocks, self.block_manager.block_size
            raise RequestError(
                f"a prompt of {seq.num_tokens} tokens leaves no room for an answer: max_model_len is "
                f"{self.config.max_model_len} tokens, and the cache has {pool} blocks of {block_size} "
                f"({pool * block_size} tokens). Shorten the prompt, or raise the smaller of the two."
            )

    def add(self, seq: Sequence, *forks: Sequence) -> None:
        """Queue a sequence. `forks` are further samples of the same prompt, which is computed once for all of them.

        Raises RequestError for a request that can never be served: a prompt that leaves no room for a generated
        token, max_tokens below 1, a fork with another prompt, a seq_id that is in use.
        """
        family = (seq, *forks)
        for member in family:
            self._validate(member)
            if member.token_ids != seq.token_ids:
                raise RequestError(f"sequence {member.seq_id} is a fork of {seq.seq_id} but has another prompt")
        if len({member.seq_id for member in family}) < len(family):
            raise RequestError(f"the samples of sequence {seq.seq_id} need seq_ids of their own")
        self._unfinished.update((member.seq_id, member) for member in family)
        self.waiting.append(seq)
        if forks:
            self._forks[seq.seq_id] = list(forks)

    def _add_row(self, batch: Batch, seq: Sequence, end: int) -> int:
        """Let `seq` catch up to `end` tokens in this step; returns the number of tokens that this costs."""
        num_new_tokens = end - seq.num_computed_tokens
        batch.rows.append(ScheduledSequence(seq, num_new_tokens, self.block_manager.block_table(seq)))
        return num_new_tokens

    def _preempt_last(self) -> Sequence:
        """Take the blocks of the sequence that was admitted last. It keeps its tokens and computes them again later."""
        seq = self.running.pop()
        self.block_manager.free(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq

    def _grow(self, seq: Sequence, end: int) -> list[tuple[int, int]] | None:
        """Blocks for `end` tokens, preempting from the back as needed; returns the copies to make.

        None when `seq` was the last one itself, and had to go.
        """
        if self.block_manager.is_ready(seq, end):
            return []
        while True:
            try:
                return self.block_manager.append(seq, end)
            except NoFreeBlocksError:
                if self._preempt_last() is seq:
                    return None

    def _continue_running(self, batch: Batch, budget: int) -> int:
        """Add the running sequences' rows; returns the budget left, 0 when the pool was too small for all of them."""
        preemptions_before = self.num_preemptions
        for seq in self.running:  # may lose its tail on the way: a list is walked by index, so that is safe
            if not budget:
                break
            end = min(seq.num_tokens, seq.num_computed_tokens + budget)
            copies = self._grow(seq, end)
            if copies is not None:
                batch.block_copies.extend(copies)
                budget -= self._add_row(batch, seq, end)
        # Whoever was preempted would be first in line to be admitted again, into blocks that were too few just now.
        return budget if self.num_preemptions == preemptions_before else 0

    @property
    def _num_places(self) -> int:
        """Sequences that may still be admitted. A running parent's forks have their places kept: they came first."""
        parents = [seq_id for seq_id in self._forks if self._unfinished[seq_id].status is SequenceStatus.RUNNING]
        kept = sum(len(self._forks[seq_id]) for seq_id in parents)
        return self.config.max_num_seqs - len(self.running) - kept

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        while budget and self.waiting and self._num_places > 0:
            seq = self.waiting[0]
            # Blocks are taken chunk by chunk, but only once all would fit: else a long prompt that meets a full
            # pool half-way is thrown out and starts again, step after step.
            if not self.block_manager.can_allocate(seq, seq.num_tokens):
                break
            self.running.append(self.waiting.popleft())
            end = min(seq.num_tokens, self.block_manager.get_num_cached_tokens(seq) + budget)
            seq.num_computed_tokens = self.block_manager.allocate(seq, end)
            if not seq.num_preemptions:
                seq.num_cached_tokens = seq.num_computed_tokens
            seq.status = SequenceStatus.RUNNING
            budget -= self._add_row(batch, seq, end)

    def schedule(self) -> Batch:
        """Choose the rows of the next step, and take the blocks that they need.

        Running sequences come first, in order of arrival, so a decode never waits for a prompt. What is left of the
        budget goes to waiting ones. While any sequence is unfinished the batch has at least one row: the first
        sequence can always take the blocks of all later ones. A batch that cannot be run has to be given up by
        aborting its sequences, for their tables count on its block copies.
        """
        batch = Batch(rows=[], block_copies=[])
        budget = self._continue_running(batch, self.config.max_num_batched_tokens)
        self._admit_waiting(batch, budget)
        return batch

    def _reason_to_finish(self, seq: Sequence) -> FinishReason | None:
        num_generated = seq.num_completion_tokens  # those that are pending belong to a later step
        if seq.token_ids[-1] in seq.stop_token_ids and num_generated >= seq.min_tokens:
            return "stop"
        ended = num_generated >= seq.max_tokens or len(seq.token_ids) >= self.max_seq_len
        return "length" if ended else None

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.free(seq)
        seq.num_pending_tokens = 0
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self._unfinished[seq.seq_id]

    def _advance(self, row: ScheduledSequence, place: int, longest: int) -> bool:
        """Move a sequence to the end of its row; True when its length ends it there."""
        seq = row.seq
        seq.num_computed_tokens = row.end
        if seq.seq_id in self._forks and row.end >= seq.num_prompt_tokens:
            self._start_forks(seq)
        if not row.needs_logits:
            return False
        seq.num_pending_tokens += 1
        seq.pending_place = place
        num_tokens = row.end + 1
        return num_tokens - seq.num_prompt_tokens >= seq.max_tokens or num_tokens >= longest

    def update(self, batch: Batch, sampled: list[int]) -> list[Sequence]:
        """Take in the results of a step that ran alone: `advance` and `settle` in one. Returns who finished.

        Raises SchedulerError unless `sampled` has a token for each row that needs one.
        """
        expected = sum(row.needs_logits for row in batch.rows)
        if len(sampled) != expected:
            raise SchedulerError(f"{expected} rows of this step need a token, but {len(sampled)} were sampled")
        self.advance(batch)
        return self.settle(batch, sampled)

    def _start_forks(self, parent: Sequence) -> None:
        """The prompt is in the cache: as many forks as there are places share its blocks, the others queue first."""
        forks = self._forks.pop(parent.seq_id)
        places = self.config.max_num_seqs - len(self.running)
        for fork in forks[:places]:
            fork.num_computed_tokens = parent.num_computed_tokens
            self.block_manager.fork(parent, fork)
            # Then one back: only who computes a token may sample one, and writing it gives the fork its own block.
            fork.num_computed_tokens -= 1
            fork.status = SequenceStatus.RUNNING
        behind_parent = self.running.index(parent) + 1  # they arrived with it
        self.running[behind_parent:behind_parent] = forks[:places]
        self.waiting.extendleft(reversed(forks[places:]))

    def abort(self, seq_id: int) -> Sequence | None:
        """Finish a sequence with the reason "abort", at any moment; None when no such sequence is unfinished."""
        return self.finish(seq_id, "abort")

    def finish(self, seq_id: int, reason: FinishReason) -> Sequence | None:
        """End a sequence from outside and free its blocks; None when no such sequence is unfinished.

        The engine calls this when a stop string has appeared. If a step with the sequence is under way, `settle`
        skips its row; and whoever gets its blocks writes into them in a later step.
        """
        seq = self._unfinished.get(seq_id)
        if seq is None:
            return None
        self._pass_on_forks(seq)
        self._leave_queues(seq)
        self._end(seq, reason)
        return seq

    def _pass_on_forks(self, parent: Sequence) -> None:
        """`parent` may not live to compute the prompt: the first of its forks takes its place, and leads the others."""
        forks = self._forks.pop(parent.seq_id, [])
        if forks:
            self.waiting.insert(self.waiting.index(parent) if parent in self.waiting else 0, forks[0])
            self._forks[forks[0].seq_id] = forks[1:]

    def retreat(self) -> None:
        """Send all running sequences back to `waiting`, after a step that failed half-way: their blocks may hold
        anything. They keep their tokens and compute them again, so no answer changes."""
        while self.running:
            self._preempt_last()

    def advance(self, batch: Batch) -> None:
        """The step was launched: move its sequences on, each with a pending token where it needs one.

        Whoever reaches its length with that token is not scheduled again, and keeps its blocks until `settle`.
        The idea is that of vLLM's async scheduling (vllm/v1/core/sched/async_scheduler.py).
        """
        place, longest, ending = 0, self.max_seq_len, set()
        for row in batch.rows:
            if row.seq.status is SequenceStatus.RUNNING and self._advance(row, place, longest):
                ending.add(row.seq.seq_id)
            place += row.needs_logits
        if ending:
            self.running = [seq for seq in self.running if seq.seq_id not in ending]

    def settle(self, batch: Batch, sampled: list[int]) -> list[Sequence]:
        """The tokens of a launched step have arrived: append, register full blocks, finish, free. Returns who finished.

        `sampled` holds one token for each row that needs logits, in the order of the rows. Rows whose sequence has
        finished meanwhile are skipped. Raises SchedulerError when the number of tokens does not match.
        """
        expected = sum(row.needs_logits for row in batch.rows)
        if len(sampled) != expected:
            raise SchedulerError(f"{expected} rows of this step need a token, but {len(sampled)} were sampled")
        tokens = iter(sampled)
        finished = []
        for row in batch.rows:
            token = next(tokens) if row.needs_logits else None
            if row.seq.status is not SequenceStatus.FINISHED and self._take_in(row, token):
                finished.append(row.seq)
        return finished

    def _take_in(self, row: ScheduledSequence, token: int | None) -> bool:
        """Append a token that was pending; True when it was the last."""
        seq = row.seq
        if token is not None:
            seq.append_token(token)
            seq.num_pending_tokens -= 1
        # The K and V are written, or will be before any later step runs: others may find the blocks that are full. A
        # token alone fills one only now and then, and the sequence may be a token further than this row.
        may_be_full = row.num_new_tokens > 1 or seq.num_computed_tokens % self.block_manager.block_size <= 1
        if may_be_full and seq.status is SequenceStatus.RUNNING:
            self.block_manager.register(seq)
        reason = None if token is None else self._reason_to_finish(seq)
        if reason is not None:
            self._leave_queues(seq)
            self._end(seq, reason)
        return reason is not None

    def _leave_queues(self, seq: Sequence) -> None:
        for queue in (self.running, self.waiting, *self._forks.values()):
            if seq in queue:
                queue.remove(seq)
