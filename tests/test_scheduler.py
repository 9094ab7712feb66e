"""Chapter 08: who runs next, in made-up tokens. Each case's source stands in its id."""

import pickle
from collections.abc import Callable

import pytest

from minivllm.config import ConfigError, SchedulerConfig, num_blocks_that_fit
from minivllm.core.batch import Batch
from minivllm.core.block_manager import BlockManager, UnknownSequenceError, cdiv
from minivllm.core.scheduler import RequestError, Scheduler, SchedulerError
from minivllm.core.sequence import Sequence, SequenceStatus
from minivllm.course.made_up_model import MadeUpModel, answer_alone


class House:
    """A scheduler, a block manager and a made-up model: an engine without tensors."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, prefix_caching: bool = True, **limits: int
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **limits}
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_caching)
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.blocks)
        self.model = MadeUpModel(num_blocks, block_size)

    def add(self, seq_id: int, prompt: list[int] | int, **wishes: object) -> Sequence:
        """Queue a prompt, given as tokens or as a length."""
        seq = Sequence(seq_id, list(range(seq_id, seq_id + prompt)) if isinstance(prompt, int) else prompt, **wishes)
        self.scheduler.add(seq)
        return seq

    def add_samples(self, seq_ids: range, prompt: list[int], **wishes: object) -> list[Sequence]:
        """Queue several samples of one prompt."""
        samples = [Sequence(seq_id, prompt, **wishes) for seq_id in seq_ids]
        self.scheduler.add(*samples)
        return samples

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> Batch:
        """One step of the engine; `meanwhile` happens while the model runs."""
        batch = self.scheduler.schedule()
        sampled = self.model.run(batch)
        meanwhile()
        self.scheduler.update(batch, sampled)
        self.blocks.check_integrity()
        return batch

    def finish_all(self, limit: int = 1000) -> int:
        """Step until nobody is left; returns the number of steps."""
        for steps in range(limit):
            if not self.scheduler.has_unfinished():
                assert self.blocks.num_free_blocks == self.blocks.num_blocks
                return steps
            assert self.step().rows, "an unfinished sequence, and an empty step"
        raise AssertionError(f"not finished after {limit} steps")

    def holds(self, seq: Sequence) -> int:
        """Blocks in the table of a sequence, 0 when it has none."""
        try:
            return len(self.blocks.block_table(seq))
        except UnknownSequenceError:
            return 0


def assert_right(seq: Sequence, num_tokens: int, reason: str = "length") -> None:
    """The sequence said what it says when it is alone, and that many tokens of it."""
    assert seq.completion_token_ids == answer_alone(seq.prompt_token_ids, num_tokens, seq.seq_id)
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, reason)


def work_of(batch: Batch) -> dict[int, int]:
    """Tokens per sequence in one step."""
    return {row.seq.seq_id: row.num_new_tokens for row in batch.rows}


# --- the budget ---


def test_prompts_of_12_5_and_3_tokens_under_a_budget_of_8() -> None:
    house = House(max_num_batched_tokens=8, max_num_seqs=4)
    for seq_id, length in enumerate([12, 5, 3]):
        house.add(100 * seq_id, length, max_tokens=4)
    steps = [work_of(house.step()) for _ in range(4)]
    assert steps == [{0: 8}, {0: 4, 100: 4}, {0: 1, 100: 1, 200: 3}, {0: 1, 100: 1, 200: 1}]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 64], ids=lambda b: f"nano-vllm PR#213-budget{b}")
def test_answers_do_not_depend_on_the_chunk_size(budget: int) -> None:
    house = House(max_num_batched_tokens=budget, max_num_seqs=min(budget, 4))
    seqs = [house.add(100 * i, 23 - 7 * i, max_tokens=6) for i in range(4 if budget > 3 else 2)]
    widths = []
    while house.scheduler.has_unfinished():
        batch = house.step()
        widths.append(batch.num_tokens)
        for row in batch.rows:  # context of a chunk = what is computed after it, not the whole prompt
            assert len(row.block_table) == cdiv(row.end, 4) or row.seq.status is SequenceStatus.FINISHED
    assert max(widths) <= budget
    for seq in seqs:
        assert_right(seq, 6)


def test_budget_is_used_up_while_there_is_work() -> None:
    house = House(max_num_batched_tokens=10, max_num_seqs=4)
    for seq_id in range(3):
        house.add(100 * seq_id, 17, max_tokens=2)
    assert [house.step().num_tokens for _ in range(5)] == [10] * 5


@pytest.mark.parametrize("case", ["nano-vllm PR#39"])
def test_model_len_may_exceed_the_token_budget(case: str) -> None:
    house = House(num_blocks=300, block_size=16, max_model_len=4096, max_num_batched_tokens=512)
    seq = house.add(0, 4000, max_tokens=3)
    assert house.finish_all() == 8 + 2  # cdiv(4000, 512) chunks, the last one samples
    assert_right(seq, 3)


@pytest.mark.parametrize("case", ["nano-vllm HEAD running grows beyond max_num_seqs"])
def test_running_never_exceeds_max_num_seqs(case: str) -> None:
    house = House(max_num_seqs=2)
    for seq_id in range(3):
        house.add(seq_id, 5, max_tokens=3)
    sizes = []
    while house.scheduler.has_unfinished():
        sizes.append(len(house.step().rows))
    assert sizes == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("budget", [8, 16, 32], ids=lambda b: f"nano-vllm#73,PR#276,SGLang#32549-budget{b}")
def test_decode_is_never_starved_by_long_prompts(budget: int) -> None:
    house = House(num_blocks=200, max_num_batched_tokens=budget)
    speaker = house.add(0, 5, max_tokens=40)
    house.step()
    for seq_id in range(1, 6):
        house.add(1000 * seq_id, 90, max_tokens=1)
    while not speaker.finish_reason:
        batch = house.step()
        assert work_of(batch)[0] == 1
        assert batch.num_tokens <= budget  # so no gap is longer than a step of `budget` tokens


# --- blocks ---


@pytest.mark.parametrize("case", ["nano-vllm#30,#91,#150,#240,PR#65;MinivLLM#75"])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_blocks_held_equal_blocks_needed_at_each_step(length: int, case: str) -> None:
    house = House(block_size=4)
    seq = house.add(0, length, max_tokens=10)
    while not seq.finish_reason:
        batch = house.scheduler.schedule()
        assert house.holds(seq) == cdiv(batch.rows[0].end, 4)  # neither early nor late
        house.scheduler.update(batch, house.model.run(batch))
    assert_right(seq, 10)


@pytest.mark.parametrize("case", ["nano-vllm PR#66"])
def test_prompt_of_exactly_one_block(case: str) -> None:
    house = House(block_size=4)
    seq = house.add(0, 4, max_tokens=3)
    held = []
    while not seq.finish_reason:
        held.append(house.holds(house.scheduler.schedule().rows[0].seq))
        house.step()
    assert held == [1, 2, 2]
    assert_right(seq, 3)


def test_scheduling_again_without_running_takes_nothing_twice() -> None:
    house = House(block_size=4)
    seq = house.add(0, 9, max_tokens=3)
    house.scheduler.schedule()  # the model never ran: interrupted
    assert seq.num_computed_tokens == 0
    house.finish_all()
    assert_right(seq, 3)


@pytest.mark.parametrize("case", ["MinivLLM#94"])
def test_lone_sequence_larger_than_the_pool_ends_with_length(case: str) -> None:
    house = House(num_blocks=2, block_size=4)
    seq = house.add(0, 7, max_tokens=8)
    other = house.add(10, 3, max_tokens=2)
    house.finish_all()
    assert_right(seq, 1)  # 7 + 1 tokens are all the slots there are
    assert_right(other, 2)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("case", ["vllm-gaudi PR#524,#541;transformers PR#43150"])
def test_preemption_changes_no_token(case: str, prefix_caching: bool) -> None:
    house = House(num_blocks=9, block_size=4, prefix_caching=prefix_caching)
    seqs = [house.add(100 * i, 6 + i, max_tokens=14) for i in range(4)]
    house.finish_all()
    assert house.scheduler.num_preemptions >= 3
    assert house.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs)
    for seq in seqs:
        assert_right(seq, 14)


def test_the_last_admitted_is_preempted_and_is_the_first_to_return() -> None:
    house = House(num_blocks=6, block_size=4)
    first, _, third = (house.add(100 * i, 7, max_tokens=9) for i in range(3))
    while not house.scheduler.num_preemptions:
        house.step()
    assert third.status is SequenceStatus.WAITING and house.holds(third) == 0
    late = house.add(999, 3, max_tokens=2)
    assert list(house.scheduler.waiting) == [third, late]
    house.finish_all()
    assert (first.num_preemptions, third.num_preemptions) == (0, 1)
    assert third.num_completion_tokens == 9


@pytest.mark.parametrize("case", ["SGLang#26265,PR#26266"])
def test_pool_that_fills_up_between_two_chunks_preempts(case: str) -> None:
    house = House(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    speakers = [house.add(100 * i, 3, max_tokens=12) for i in range(3)]
    house.step()
    late = house.add(900, 25, max_tokens=2)  # 7 blocks: would fit now, not after the others have grown
    while not late.num_preemptions:
        house.step()
    assert late.num_tokens > 0 and late.num_computed_tokens == 0
    house.finish_all()
    for seq in speakers:
        assert_right(seq, 12)
    assert_right(late, 2)


@pytest.mark.parametrize("case", ["nano-vllm#144,PR#103"])
def test_a_preempted_sequence_survives_pickling_whole(case: str) -> None:
    house = House(num_blocks=6, block_size=4)
    seqs = [house.add(100 * i, 7, max_tokens=9) for i in range(3)]
    while not house.scheduler.num_preemptions:
        house.step()
    copy = pickle.loads(pickle.dumps(seqs[-1]))
    assert vars(copy) == vars(seqs[-1])
    assert copy.num_completion_tokens > 0 and copy.status is SequenceStatus.WAITING


# --- the prefix cache ---


def test_prefix_is_looked_up_when_a_sequence_is_scheduled_not_when_it_arrives() -> None:
    house = House(max_num_seqs=1)
    prompt = list(range(50, 63))
    first, second = house.add(0, prompt, max_tokens=2), house.add(1, prompt, max_tokens=2)
    house.finish_all()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
    assert_right(second, 2)


@pytest.mark.parametrize("budget", [64, 6], ids=["nano-vllm#208-one step", "nano-vllm#208-chunked"])
def test_same_prompts_in_one_step_share_no_unwritten_block(budget: int) -> None:
    house = House(max_num_batched_tokens=budget, max_num_seqs=6)
    seqs = [house.add(i, [1, 2, 3, 4, 5, 6, 7, 8, 9 + i], max_tokens=3) for i in range(4)]
    house.step()
    tables = [set(house.blocks.block_table(seq)) for seq in house.scheduler.running]
    assert sum(map(len, tables)) == len(set().union(*tables))
    house.finish_all()
    for seq in seqs:
        assert_right(seq, 3)


@pytest.mark.parametrize("case", ["vLLM#25780"])
def test_recompute_is_no_prefix_hit_in_the_figures(case: str) -> None:
    house = House(num_blocks=9, block_size=4)
    seqs = [house.add(100 * i, 6 + i, max_tokens=14) for i in range(4)]
    house.finish_all()
    assert house.scheduler.num_preemptions >= 3
    assert [seq.num_cached_tokens for seq in seqs] == [0] * 4
    assert house.blocks.stats.hit_tokens == 0


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    house = House(num_blocks=8, block_size=4)
    first, second = house.add(0, 15, max_tokens=6), house.add(100, 13, max_tokens=9)
    house.step()
    house.step()
    batch = house.step()  # the first needs a fifth block
    assert work_of(batch) == {0: 1} and second.status is SequenceStatus.WAITING
    house.scheduler.abort(first.seq_id)
    (row,) = house.step().rows
    assert (row.seq, row.start) == (second, 12)
    assert second.num_cached_tokens == 0


# --- samples of one prompt ---


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 9])
def test_samples_compute_their_prompt_once(length: int, prefix_caching: bool) -> None:
    house = House(prefix_caching=prefix_caching)
    samples = house.add_samples(range(4), list(range(length)), max_tokens=5)
    assert work_of(house.step()) == {0: length}
    assert work_of(house.step()) == {0: 1, 1: 1, 2: 1, 3: 1}
    house.finish_all()
    for seq in samples:
        assert_right(seq, 5)


def test_samples_share_the_blocks_of_their_prompt() -> None:
    house = House(block_size=4)
    samples = house.add_samples(range(4), list(range(10)), max_tokens=5)
    house.step()
    assert house.blocks.num_blocks - house.blocks.num_free_blocks == 3
    house.step()
    tables = [house.blocks.block_table(seq) for seq in samples]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4  # the third is written to: each has its own


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("case", ["vLLM#417,#4422,#8844"])
def test_samples_in_a_tiny_pool(case: str, prefix_caching: bool) -> None:
    house = House(num_blocks=7, block_size=4, prefix_caching=prefix_caching)
    samples = house.add_samples(range(4), list(range(10)), max_tokens=9)
    house.finish_all()
    assert house.scheduler.num_preemptions >= 3
    for seq in samples:
        assert_right(seq, 9)


def test_samples_beyond_max_num_seqs_wait_and_find_the_prompt() -> None:
    house = House(max_num_seqs=2)
    samples = house.add_samples(range(5), list(range(9)), max_tokens=3)
    late = house.add(99, 3, max_tokens=3)
    house.step()
    assert list(house.scheduler.waiting) == [*samples[2:], late]
    house.finish_all()
    assert [seq.num_cached_tokens for seq in samples] == [0, 0, 8, 8, 8]
    for seq in [*samples, late]:
        assert_right(seq, 3)


def test_one_sample_that_ends_with_its_first_token_leaves_the_others() -> None:
    house = House()
    samples = house.add_samples(range(3), list(range(9)), max_tokens=4)
    samples[0].max_tokens = 1
    house.finish_all()
    assert [seq.num_completion_tokens for seq in samples] == [1, 4, 4]


# --- the end of a sequence ---


def test_stop_token_ends_a_sequence_but_not_before_min_tokens() -> None:
    spoken = answer_alone([1, 2, 3], 12, salt=0)
    repeated = next(token for token in spoken if spoken.count(token) > 1)
    stop = frozenset({repeated})
    first = spoken.index(repeated) + 1
    again = spoken.index(repeated, first) + 1
    house = House()
    soon = house.add(0, [1, 2, 3], max_tokens=50, stop_token_ids=stop)
    house.finish_all()
    later = house.add(0, [1, 2, 3], max_tokens=50, stop_token_ids=stop, min_tokens=first + 1)
    house.finish_all()
    assert_right(soon, first, "stop")
    assert_right(later, again, "stop")


def test_any_stop_token_ends_a_sequence() -> None:
    house = House()
    seq = house.add(0, [1, 2, 3], max_tokens=50, stop_token_ids=frozenset(range(7)))
    house.finish_all()
    assert_right(seq, 1, "stop")


def test_max_model_len_ends_a_sequence() -> None:
    house = House(max_model_len=10)
    seq = house.add(0, 6, max_tokens=50)
    house.finish_all()
    assert_right(seq, 4)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("moment", ["waiting", "mid-chunk", "running", "during the step"])
def test_abort_at_any_moment(moment: str, prefix_caching: bool) -> None:
    house = House(max_num_batched_tokens=8, max_num_seqs=4, prefix_caching=prefix_caching)
    other, seq = house.add(0, 5, max_tokens=9), house.add(100, 12, max_tokens=9)
    for _ in range({"waiting": 0, "mid-chunk": 1}.get(moment, 4)):
        house.step()
    if moment == "during the step":
        house.step(meanwhile=lambda: house.scheduler.abort(100))
    else:
        assert house.scheduler.abort(100) is seq
    assert (seq.finish_reason, house.holds(seq)) == ("abort", 0)
    assert house.scheduler.abort(100) is None
    spoken = seq.num_completion_tokens
    house.finish_all()
    assert_right(other, 9)
    assert_right(seq, spoken, "abort")


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("steps", range(5))
def test_abort_of_any_sample_leaves_the_others(victim: int, steps: int) -> None:
    house = House(max_num_batched_tokens=8, max_num_seqs=4)
    samples = house.add_samples(range(4), list(range(13)), max_tokens=5)
    for _ in range(steps):
        house.step()
    house.scheduler.abort(victim)
    house.finish_all()
    for seq in samples:
        if seq.seq_id != victim:
            assert_right(seq, 5)


def test_abort_of_a_waiting_parent_keeps_its_samples_in_line() -> None:
    house = House(max_num_seqs=1)
    house.add(0, 5, max_tokens=9)
    house.step()
    _, *others = house.add_samples(range(10, 13), list(range(7)), max_tokens=2)
    late = house.add(20, 3, max_tokens=2)
    house.scheduler.abort(10)
    assert list(house.scheduler.waiting) == [others[0], late]
    house.finish_all()
    for seq in [*others, late]:
        assert_right(seq, 2)


def test_finish_from_outside_keeps_the_reason() -> None:
    house = House()
    seq = house.add(0, 5, max_tokens=9)
    house.step()
    house.scheduler.finish(0, "stop")
    assert seq.finish_reason == "stop" and not house.scheduler.has_unfinished()
    house.finish_all()


# --- what is refused ---


@pytest.mark.parametrize(
    ("length", "numbers"),
    [(8, ("8", "2 blocks")), (9, ("9", "2 blocks")), (400, ("400", "max_model_len"))],
    ids=["vLLM#904 as long as the pool", "vLLM#40302 longer than the pool", "vLLM#29496 longer than max_model_len"],
)
def test_prompt_that_can_never_fit_is_refused(length: int, numbers: tuple[str, ...]) -> None:
    house = House(num_blocks=2, block_size=4)
    with pytest.raises(RequestError) as error:
        house.add(0, length)
    assert all(number in str(error.value) for number in numbers)
    other = house.add(1, 3, max_tokens=2)
    house.finish_all()
    assert_right(other, 2)


@pytest.mark.parametrize(("length", "fits"), [(9, True), (10, False), (11, False)])
def test_prompt_against_max_model_len(length: int, fits: bool) -> None:
    house = House(max_model_len=10)
    if fits:
        seq = house.add(0, length, max_tokens=5)
        house.finish_all()
        assert seq.num_completion_tokens == 1
    else:
        with pytest.raises(RequestError, match=f"{length} tokens.*max_model_len is 10"):
            house.add(0, length)


@pytest.mark.parametrize("case", ["vLLM#7283,#7632,PR#7746"])
def test_empty_prompt_is_refused_and_others_go_on(case: str) -> None:
    house = House()
    other = house.add(1, 3, max_tokens=2)
    with pytest.raises(ValueError, match="sequence 0 has an empty prompt"):
        house.add(0, [])
    house.finish_all()
    assert_right(other, 2)


@pytest.mark.parametrize("max_tokens", [0, -1], ids=["vLLM#6521", "vLLM#10432"])
def test_max_tokens_below_one_is_refused(max_tokens: int) -> None:
    house = House()
    with pytest.raises(RequestError, match=f"max_tokens must be at least 1, not {max_tokens}"):
        house.add(0, 5, max_tokens=max_tokens)
    assert not house.scheduler.has_unfinished()


def test_seq_id_in_use_and_strange_forks_are_refused() -> None:
    house = House()
    house.add(0, 5)
    with pytest.raises(RequestError, match="seq_id 0 is in use"):
        house.add(0, 5)
    with pytest.raises(RequestError, match="another prompt"):
        house.scheduler.add(Sequence(1, [1, 2]), Sequence(2, [1, 3]))
    with pytest.raises(RequestError, match="seq_ids of their own"):
        house.scheduler.add(Sequence(1, [1, 2]), Sequence(1, [1, 2]))
    assert list(house.scheduler.waiting)[1:] == []


def test_update_with_too_few_tokens_changes_nothing() -> None:
    house = House()
    seq = house.add(0, 5)
    batch = house.scheduler.schedule()
    with pytest.raises(SchedulerError, match="1 rows of this step need a token, but 0 were sampled"):
        house.scheduler.update(batch, [])
    assert seq.num_computed_tokens == 0


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_config_refuses_limits_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        SchedulerConfig(**{name: 0})


def test_config_refuses_a_budget_that_starves_decodes() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=7 cannot give each of max_num_seqs=8"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)


# --- how many blocks ---


def test_blocks_fill_what_the_model_and_the_largest_step_leave() -> None:
    sizes = {"model_bytes": 600, "peak_bytes": 100, "block_bytes": 32}
    assert [num_blocks_that_fit(budget, **sizes) for budget in (732, 763, 764, 1000)] == [1, 1, 2, 9]


@pytest.mark.parametrize("budget", [731, 700, 500], ids=lambda budget: f"vLLM#2248,#31418-{budget}")
def test_no_memory_for_a_block_names_the_sizes_and_the_knobs(budget: int) -> None:
    gib = 2**30
    with pytest.raises(ConfigError) as error:
        num_blocks_that_fit(budget * gib, model_bytes=600 * gib, peak_bytes=100 * gib, block_bytes=32 * gib)
    for part in (f"{budget}.00 GiB", "600.00 GiB", "100.00 GiB", "32.0000 GiB", "gpu_memory_utilization"):
        assert part in str(error.value)
    assert "max_num_batched_tokens" in str(error.value)
