"""Scheduler and block manager under any order of requests, steps, aborts and forks, in made-up tokens."""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.config import SchedulerConfig
from minivllm.core.batch import Batch
from minivllm.core.block_manager import BlockManager, BlockManagerError, cdiv
from minivllm.core.scheduler import RequestError, Scheduler
from minivllm.core.sequence import FinishReason, Sequence, SequenceStatus
from minivllm.course.made_up_model import MadeUpModel, answer_alone

# Prompts are cut from two texts, so that they share prefixes more often than not.
TEXTS = [[1, 2, 3, 4] * 5, [1, 2, 3, 4, 1, 2, 9, 9, 5, 6] * 2]


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens: limits kept, no block shared too early or lost, every answer the answer of a lone request."""

    scheduler_class = Scheduler

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(2, 14),
        max_num_seqs=st.integers(1, 5),
        more_budget=st.integers(0, 12),
        max_model_len=st.sampled_from([12, 100]),
        prefix_caching=st.booleans(),
    )
    def build(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        more_budget: int,
        max_model_len: int,
        prefix_caching: bool,
    ) -> None:
        self.config = SchedulerConfig(max_num_seqs, max_num_seqs + more_budget, max_model_len)
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
        self.scheduler = self.scheduler_class(self.config, self.blocks)
        self.model = MadeUpModel(num_blocks, block_size)
        self.seqs: list[Sequence] = []
        self.arrival: dict[int, int] = {}

    # --- what may happen ---

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 18),
        num_samples=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(1, 9),
        stop=st.sampled_from([(), (), (3,), (0, 5)]),
        min_tokens=st.integers(0, 4),
    )
    def add(
        self, text: list[int], length: int, num_samples: int, max_tokens: int, stop: tuple[int, ...], min_tokens: int
    ) -> None:
        first = len(self.seqs)
        family = [
            Sequence(
                first + i, text[:length], max_tokens=max_tokens, stop_token_ids=frozenset(stop), min_tokens=min_tokens
            )
            for i in range(num_samples)
        ]
        try:
            self.scheduler.add(*family)
        except RequestError:
            assert length >= self.scheduler.max_seq_len
        else:
            assert length < self.scheduler.max_seq_len
            self.seqs += family
            self.arrival.update((seq.seq_id, first) for seq in family)

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(victims=st.lists(st.integers(0, 100), max_size=2))
    def step(self, victims: list[int]) -> None:
        """One step of the engine; the victims are aborted while the model runs."""
        decoding = [seq for seq in self.scheduler.running if seq.num_computed_tokens == seq.num_tokens - 1]
        batch = self.scheduler.schedule()
        self.check_batch(batch, decoding)
        sampled = self.model.run(batch)
        for victim in victims:
            self.abort(victim)
        finished = self.scheduler.update(batch, sampled)
        assert all(seq.status is SequenceStatus.FINISHED for seq in finished)

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule()
    def step_that_never_runs(self) -> None:
        """An exception between schedule and update: no copy was made, so the engine gives up what was in the step."""
        for row in self.scheduler.schedule().rows:
            self.scheduler.abort(row.seq.seq_id)

    @precondition(lambda self: self.seqs)
    @rule(victim=st.integers(0, 100))
    def abort(self, victim: int) -> None:
        if self.seqs:
            self.scheduler.abort(self.seqs[victim % len(self.seqs)].seq_id)

    # --- what must hold ---

    def check_batch(self, batch: Batch, decoding: list[Sequence]) -> None:
        assert batch.rows, "an unfinished sequence, and an empty step"
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert all(row.num_new_tokens >= 1 for row in batch.rows)
        assert all(len(row.block_table) * self.blocks.block_size >= row.end for row in batch.rows)
        # Only the last row can be cut short by the budget, so no decode is ever left out for a prompt.
        assert all(row.needs_logits for row in batch.rows[:-1])
        rows = {row.seq.seq_id for row in batch.rows}
        for seq in decoding:
            assert seq.seq_id in rows or seq.status is SequenceStatus.WAITING

    @invariant()
    def queues_and_blocks_agree(self) -> None:
        self.blocks.check_integrity()
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert len(running) <= self.config.max_num_seqs
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert all(seq.status is SequenceStatus.WAITING and not seq.num_computed_tokens for seq in waiting)
        # Where the first sample of a family was aborted, another leads it, perhaps behind later arrivals.
        whole = [seq for seq in running + waiting if self.seqs[self.arrival[seq.seq_id]].finish_reason != "abort"]
        arrivals = [self.arrival[seq.seq_id] for seq in whole]
        assert arrivals == sorted(arrivals), "first come first served"
        for seq in running:  # a fork starts one token back, in blocks that cover that token too
            size, held = self.blocks.block_size, len(self.blocks.block_table(seq))
            assert cdiv(seq.num_computed_tokens, size) <= held <= cdiv(seq.num_computed_tokens + 1, size)
        if not running:
            assert self.blocks.num_free_blocks == self.blocks.num_blocks

    @invariant()
    def answers_are_those_of_a_lone_request(self) -> None:
        for seq in self.seqs:
            count = seq.num_completion_tokens
            assert seq.completion_token_ids == answer_alone(seq.prompt_token_ids, count, seq.seq_id)
            self.check_end(seq)

    def check_end(self, seq: Sequence) -> None:
        """A sequence ends at its first reason to end, and not before."""
        spoken = seq.completion_token_ids
        limit = min(seq.max_tokens, self.scheduler.max_seq_len - seq.num_prompt_tokens)
        stops = [i + 1 for i, token in enumerate(spoken) if token in seq.stop_token_ids and i + 1 >= seq.min_tokens]
        assert stops in ([], [len(spoken)]) and len(spoken) <= limit
        if seq.finish_reason in ("stop", "length"):
            assert seq.finish_reason == ("stop" if stops else "length") and (stops or len(spoken) == limit)
        elif seq.finish_reason is None:
            assert not stops and len(spoken) < limit

    def teardown(self) -> None:
        """Everybody left finishes, in a bounded number of steps, and every block comes back."""
        if not hasattr(self, "scheduler"):
            return
        bound = 50 + 40 * sum(seq.num_prompt_tokens + seq.max_tokens for seq in self.seqs)
        while self.scheduler.has_unfinished() and bound:
            self.step(victims=[])
            self.queues_and_blocks_agree()
            bound -= 1
        assert not self.scheduler.has_unfinished(), "a livelock"
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        self.answers_are_those_of_a_lone_request()
        assert all(seq.finish_reason for seq in self.seqs)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("MINIVLLM_EXAMPLES", "150")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- would it notice? ---


class DropsCopies(Scheduler):
    """Forgets that a shared block must be copied before it is written to."""

    def schedule(self) -> Batch:
        return Batch(super().schedule().rows, [])


class RegistersTooEarly(Scheduler):
    """Makes blocks findable when they are scheduled, not when they are written."""

    def _add_row(self, batch: Batch, seq: Sequence, end: int) -> int:
        cost = super()._add_row(batch, seq, end)
        computed, seq.num_computed_tokens = seq.num_computed_tokens, end
        self.block_manager.register(seq)
        seq.num_computed_tokens = computed
        return cost


class PreemptsTheFirst(Scheduler):
    """Takes the blocks of the oldest sequence."""

    def _preempt_last(self) -> Sequence:
        self.running.append(self.running.pop(0))
        return super()._preempt_last()


class ForgetsToStartOver(Scheduler):
    """Believes that a preempted sequence's K and V are still there."""

    def _preempt_last(self) -> Sequence:
        computed = self.running[-1].num_computed_tokens
        seq = super()._preempt_last()
        seq.num_computed_tokens = computed
        return seq


class PutsThePreemptedLast(Scheduler):
    """Sends a preempted sequence to the end of the queue."""

    def _preempt_last(self) -> Sequence:
        seq = super()._preempt_last()
        self.waiting.rotate(-1)
        return seq


class KeepsNoPlaces(Scheduler):
    """Admits later requests into the places of forks."""

    @property
    def _num_places(self) -> int:
        return self.config.max_num_seqs - len(self.running)


class MissesTheLimit(Scheduler):
    """Runs one sequence too many."""

    @property
    def _num_places(self) -> int:
        return super()._num_places + 1


class ChargesNothing(Scheduler):
    """Gives waiting prompts the whole budget, whatever the running ones took."""

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        super()._admit_waiting(batch, self.config.max_num_batched_tokens if budget else 0)


class StopsTooEarly(Scheduler):
    """Ignores min_tokens."""

    def _reason_to_finish(self, seq: Sequence) -> FinishReason | None:
        return "stop" if seq.token_ids[-1] in seq.stop_token_ids else super()._reason_to_finish(seq)


class LeaksOnAbort(Scheduler):
    """Forgets an aborted sequence without freeing its blocks."""

    def finish(self, seq_id: int, reason: FinishReason) -> Sequence | None:
        if seq_id in self._unfinished:
            self._unfinished[seq_id].status = SequenceStatus.WAITING
        return super().finish(seq_id, reason)


MUTANTS = Scheduler.__subclasses__()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_scheduler_is_noticed(mutant: type[Scheduler]) -> None:
    machine = type("Machine", (SchedulerMachine,), {"scheduler_class": mutant})
    few = settings(TestScheduler.settings, max_examples=400, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, BlockManagerError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=few)
