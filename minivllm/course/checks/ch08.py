"""Checks of chapter 08: a plan under a budget, the budget for a promise, who waits, another order of admission."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from minivllm.course.exercises import Case, exercise

if TYPE_CHECKING:
    from minivllm.core.scheduler import Scheduler

LENGTHS = (12, 5, 3)  # the prompts of A, B and C


@exercise("8.1")
def plan_under_a_budget_of_six(plan: list[tuple[int, int, int]]) -> Iterator[Case]:
    rows_of_three = all(isinstance(step, tuple | list) and len(step) == 3 for step in plan)
    yield len(plan) == 5 and rows_of_three, "five steps, and in each a number for A, B and C"
    steps = [tuple(step) for step in plan]
    for number, step in enumerate(steps):
        yield sum(step) <= 6, f"step {number}: {sum(step)} tokens, and the budget is 6"
    yield steps[0] == (6, 0, 0), "step 0: A arrived first and is behind by 12, so it takes the whole budget"
    yield steps[1][0] == 6, "step 1: A is still behind by 6"
    yield all(step[0] == 1 for step in steps[2:]), "steps 2 to 4: A decodes, and it is served first"
    yield steps[2] == (1, 5, 0), "step 2: what A leaves of the budget goes to B, as far as B is behind"
    yield steps[3][1] == 1, "step 3: B has computed its whole prompt in step 2, so it is behind by one token"
    yield steps[3] == (1, 1, 3), "step 3: C is admitted, with a prompt of 3 tokens"
    yield steps[4] == (1, 1, 1), "step 4: everybody has caught up and is behind by one"


@exercise("8.2")
def budget_for_a_promise(budget_for: Callable[[float, int, Callable[[int, int], float]], int]) -> Iterator[Case]:
    def roofline(num_tokens: int, context: int) -> float:
        return max(0.25 + 1e-5 * context, num_tokens / 512)

    def stairs(num_tokens: int, context: int) -> float:
        return 1.0 + num_tokens // 64

    def in_turn(num_tokens: int, context: int) -> float:
        return num_tokens / 512 + 1e-5 * context

    cases = [
        ("a step of n tokens takes n / 512 ms, limit 1.0 ms", roofline, 1.0, 0, 512),
        ("a step of n tokens takes n / 512 ms, limit 2.5 ms", roofline, 2.5, 0, 1280),
        ("reading 100,000 tokens of context takes 1.25 ms, limit 1.0 ms", roofline, 1.0, 100_000, 0),
        ("reading 100,000 tokens of context takes 1.25 ms, limit 1.5 ms", roofline, 1.5, 100_000, 768),
        ("even a step of one token takes 1 ms, limit 0.9 ms", stairs, 0.9, 0, 0),
        ("every 64th token adds 1 ms, limit 1.0 ms", stairs, 1.0, 0, 63),
        ("every 64th token adds 1 ms, limit 3.5 ms", stairs, 3.5, 0, 191),
        ("a step of n tokens takes n / 512 ms, limit 200 ms", roofline, 200.0, 0, 102_400),
        ("n / 512 ms, and 1 ms more for 100,000 tokens of context, limit 2.0 ms", in_turn, 2.0, 100_000, 512),
    ]
    for what, clock, limit, context, budget in cases:
        found = budget_for(limit, context, clock)
        yield isinstance(found, int), f"{what}: a budget is a whole number of tokens, and you return {found!r}"
        yield found == 0 or clock(found, context) <= limit, f"{what}: a step of {found} tokens breaks the promise"
        yield budget == 0 or found > 0, f"{what}: a step of one token would keep the promise, you allow none"
        yield clock(found + 1, context) > limit, f"{what}: {found} keeps the promise, and so does {found + 1}"


@exercise("8.3")
def a_short_prompt_that_waits(requests: list[tuple[int, int]]) -> Iterator[Case]:
    from minivllm.config import SchedulerConfig
    from minivllm.core.block_manager import BlockManager
    from minivllm.core.scheduler import Scheduler
    from minivllm.core.sequence import Sequence

    yield 1 <= len(requests) <= 4, f"{len(requests)} requests, and 1 to 4 are allowed"
    total = sum(prompt + answer for prompt, answer in requests)
    yield total <= 500, f"{total} tokens in all, and 500 are allowed"
    yield 1 <= requests[-1][0] <= 3, f"the last prompt has {requests[-1][0]} tokens, and 1 to 3 are allowed"
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler = Scheduler(limits, BlockManager(512, 4, enable_prefix_caching=False))
    seqs = [Sequence(i, [7] * prompt, max_tokens=answer) for i, (prompt, answer) in enumerate(requests)]
    for seq in seqs:
        scheduler.add(seq)
    waited = 0
    while not seqs[-1].num_completion_tokens:
        batch = scheduler.schedule()
        scheduler.update(batch, [7] * sum(row.needs_logits for row in batch.rows))
        waited += not seqs[-1].num_completion_tokens
    yield waited >= 50, f"the last request waited {waited} steps before the one that gave it its first token"


@exercise("8.4")
def shortest_first(policy: type) -> Iterator[Case]:
    for places in (1, 3):
        order = _order_of_admission(policy, [12, 5, 3, 9], [0, 1, 2, 3], places)
        yield order == [2, 1, 3, 0], f"prompts of 12, 5, 3 and 9 tokens, {places} place(s): admitted as {order}"
    order = _order_of_admission(policy, [6, 4, 6, 4, 6], [20, 30, 40, 10, 0], places=1)
    yield (
        order == [1, 3, 0, 2, 4],
        f"prompts of 6, 4, 6, 4 and 6 tokens, seq_ids 20, 30, 40, 10 and 0, ties by arrival: admitted as {order}",
    )
    order = _order_after_a_known_prompt(policy)
    yield order == [2, 1], "a prompt of 12 tokens with 8 of them in the prefix cache came before one of 6 tokens"
    yield from _thrown_out_in_mid_prompt(policy)
    yield from _answers_in_a_tiny_pool(policy)


def _order_of_admission(policy: type, lengths: list[int], seq_ids: list[int], places: int) -> list[int]:
    """Who is admitted first, second, …, by order of arrival, when `places` may run at a time."""
    from minivllm.config import SchedulerConfig
    from minivllm.core.block_manager import BlockManager
    from minivllm.core.sequence import Sequence

    scheduler = policy(SchedulerConfig(places, 16, 64), BlockManager(64, 4))
    for seq_id, length in zip(seq_ids, lengths, strict=True):
        scheduler.add(Sequence(seq_id, [seq_id] * length, max_tokens=13 - length))  # a long prompt, a short answer
    return [seq_ids.index(seq_id) for seq_id in _admissions(scheduler)]


def _order_after_a_known_prompt(policy: type) -> list[int]:
    """Sequence 1 is longer than sequence 2, but the cache knows most of it, from sequence 0."""
    from minivllm.config import SchedulerConfig
    from minivllm.core.block_manager import BlockManager
    from minivllm.core.sequence import Sequence

    scheduler = policy(SchedulerConfig(1, 16, 64), BlockManager(64, 4))
    scheduler.add(Sequence(0, list(range(12)), max_tokens=1))
    _admissions(scheduler)
    scheduler.add(Sequence(1, list(range(12)), max_tokens=1))
    scheduler.add(Sequence(2, [50] * 6, max_tokens=1))
    return _admissions(scheduler)


def _admissions(scheduler: "Scheduler") -> list[int]:
    """seq_ids in the order in which they are first given a row; 100 steps at most, as nobody may ever be admitted."""
    order: list[int] = []
    for _ in range(100):
        if not scheduler.has_unfinished():
            break
        batch = scheduler.schedule()
        order += [row.seq.seq_id for row in batch.rows if row.seq.seq_id not in order]
        scheduler.update(batch, [7] * sum(row.needs_logits for row in batch.rows))
    return order


def _thrown_out_in_mid_prompt(policy: type) -> Iterator[Case]:
    """B is preempted before it has generated anything; C, shorter, arrives after that."""
    from minivllm.config import SchedulerConfig
    from minivllm.core.block_manager import BlockManager
    from minivllm.core.sequence import Sequence
    from minivllm.course.made_up_model import MadeUpModel

    scheduler, model = policy(SchedulerConfig(3, 4, 64), BlockManager(8, 4)), MadeUpModel(8, 4)
    a, b, c = Sequence(0, [1] * 4, max_tokens=24), Sequence(1, [2] * 24, max_tokens=2), Sequence(2, [3] * 3)
    seen = []
    for step in range(100):
        if step < 2:
            scheduler.add((a, b)[step])
        elif b.num_preemptions and c not in seen:
            scheduler.add(c)
            seen.append(c)
        waited, batch = b in scheduler.waiting, scheduler.schedule()
        rows = [row.seq for row in batch.rows]
        yield step != 1 or b in rows, "a place, budget and blocks were free, and the first in line was not admitted"
        early = c in rows and not b.num_completion_tokens and b not in rows
        yield not early, "a sequence that was thrown out in mid-prompt still waited, and a newcomer was admitted"
        if waited and b in rows:
            missing = -(-b.num_tokens // 4) - len(batch.rows[rows.index(b)].block_table)
            fits = missing <= scheduler.block_manager.num_free_blocks
            yield fits, "a sequence was admitted although the pool had no room for all of its tokens"
        scheduler.update(batch, model.run(batch))
        if not scheduler.has_unfinished():
            break
    yield not scheduler.has_unfinished(), "after 100 steps some requests have not finished"


def _answers_in_a_tiny_pool(policy: type) -> Iterator[Case]:
    """Under pressure: limits, preempted ones first, and the answers of lone requests."""
    from minivllm.config import SchedulerConfig
    from minivllm.core.block_manager import BlockManager
    from minivllm.core.sequence import Sequence
    from minivllm.course.made_up_model import MadeUpModel, answer_alone

    scheduler, model = policy(SchedulerConfig(3, 8, 64), BlockManager(9, 4)), MadeUpModel(9, 4)
    seqs = [Sequence(i, [i] * length, max_tokens=10) for i, length in enumerate([9, 11, 7, 2, 5, 3])]
    for seq in seqs:
        scheduler.add(seq)
    admitted: list[Sequence] = []  # those that run, in order of admission
    for _ in range(400):
        if not scheduler.has_unfinished():
            break
        thrown_out = [seq for seq in scheduler.waiting if seq.num_preemptions]
        batch = scheduler.schedule()
        yield batch.num_tokens <= 8, f"a step of {batch.num_tokens} tokens, and the budget is 8"
        yield len(scheduler.running) <= 3, f"{len(scheduler.running)} sequences run, and 3 are allowed"
        joined = [row for row in batch.rows if row.seq not in admitted]
        admitted = [seq for seq in admitted if seq in scheduler.running] + [row.seq for row in joined]
        yield scheduler.running == admitted, "`running` is not in order of admission, and preemption takes its last one"
        newcomers = [row.seq for row in batch.rows if row.start == 0 and not row.seq.num_preemptions]
        passed = newcomers and any(seq in scheduler.waiting for seq in thrown_out)
        yield not passed, "a new sequence was admitted while a preempted one still waited"
        scheduler.update(batch, model.run(batch))
    yield not scheduler.has_unfinished(), "after 400 steps some requests have not finished"
    yield (
        scheduler.num_preemptions > 0,
        "the pool of 9 blocks forced no preemption: did you change more than the order?",
    )
    for seq in seqs:
        right = answer_alone(seq.prompt_token_ids, 10, seq.seq_id)
        yield seq.completion_token_ids == right, f"request {seq.seq_id} answers otherwise than it does alone"
