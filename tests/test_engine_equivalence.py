"""Same answers whatever the schedule: random workloads through the whole engine, against transformers one by one.

MINIVLLM_LONG_TESTS=1 runs ten times as many.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engines import assert_all_free, make_engine, ties_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_runs import LONG

from minivllm.core.block_manager import cdiv
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.request import Request
from minivllm.sampling_params import SamplingParams

RUNS = 2000 if LONG else 200
LONGEST_ANSWER = 6
# Few prompts that share beginnings: transformers computes each once, and the prefix cache has something to find.
SHARED = (0, 641, 585, 259, 448, 12, 420, 296, 259, 392, 594, 680)
PROMPTS = [
    SHARED[:1],
    SHARED[:4],
    SHARED[:5],
    SHARED[:8],
    SHARED,
    (0, 438, 1678),
    SHARED[:8] + (1678,),
    (0, 7, 7, 7, 7),
]
PROMPTS += [SHARED + (300, 301, 302, 303)]
counts = {"runs": 0, "answers": 0, "ties": 0, "preemptions": 0, "hits": 0, "aborts": 0}


@dataclass(frozen=True)
class Arrival:
    """A request: which prompt, how long an answer, at which step it comes, and at which it is aborted (or never)."""

    prompt: int
    length: int
    step: int
    abort_after: int | None
    n: int


arrivals = st.builds(
    Arrival,
    prompt=st.integers(0, len(PROMPTS) - 1),
    length=st.integers(1, LONGEST_ANSWER),
    step=st.integers(0, 3),
    abort_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 6)),
    n=st.sampled_from([1, 1, 1, 2]),
)


def draw_engine(draw: st.DrawFn, workload: list[Arrival]) -> dict[str, int | bool]:
    """Options of an engine: often one whose pool just holds the longest request, so that it must preempt."""
    block_size, max_num_seqs = draw(st.sampled_from([1, 2, 4, 5, 16])), draw(st.integers(1, 6))
    longest = max(len(PROMPTS[arrival.prompt]) + arrival.length for arrival in workload)
    return {
        "block_size": block_size,
        "num_kvcache_blocks": cdiv(longest, block_size) + draw(st.sampled_from([0, 0, 1, 2, 100])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.sampled_from([0, 1, 3, 7, 64])),
        "enable_prefix_caching": draw(st.booleans()),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Arrival], dict[str, int | bool]]:
    """A workload, and an engine that can serve it."""
    workload = draw(st.lists(arrivals, min_size=1, max_size=5))
    return workload, draw_engine(draw, workload)


def serve(engine: LLMEngine, workload: list[Arrival]) -> Iterator[tuple[Arrival, Request]]:
    """Let the requests arrive and be aborted at their steps; yields them when all are over."""
    requests: dict[int, Request] = {}
    step = 0
    while len(requests) < len(workload) or engine.has_unfinished_requests():
        for number, arrival in enumerate(workload):
            if arrival.step == step:
                params = SamplingParams(temperature=0, max_tokens=arrival.length, ignore_eos=True, n=arrival.n)
                requests[number] = engine.add_request(list(PROMPTS[arrival.prompt]), params)
            elif arrival.abort_after is not None and arrival.step + arrival.abort_after + 1 == step:
                engine.abort(requests[number])
        engine.step()
        engine.block_manager.check_integrity()
        step += 1
        assert step < 2000, "the engine makes no progress"
    yield from ((workload[number], request) for number, request in requests.items())


@settings(max_examples=RUNS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_every_answer_is_that_of_transformers(case: tuple[list[Arrival], dict[str, int | bool]]) -> None:
    workload, options = case
    engine = make_engine(**options)
    for arrival, request in serve(engine, workload):
        for output in request.output().outputs:
            if output.finish_reason == "abort":
                counts["aborts"] += 1
            else:
                assert output.finish_reason == "length" and len(output.token_ids) == arrival.length
            counts["ties"] += ties_in(output.token_ids, PROMPTS[arrival.prompt], LONGEST_ANSWER)
            counts["answers"] += 1
        counts["preemptions"] += request.metrics.num_preemptions
        counts["hits"] += request.metrics.num_cached_tokens > 0
    assert_all_free(engine)
    counts["runs"] += 1


def test_the_runs_above_were_not_idle() -> None:
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if counts["runs"] < 100:
        pytest.skip("the test above was not run in this process")
    assert counts["preemptions"] > 20 and counts["hits"] > 20 and counts["aborts"] > 10
    assert counts["ties"] <= counts["answers"] / 50
