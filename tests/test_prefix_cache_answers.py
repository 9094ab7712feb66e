"""With real keys and values: a hit in the prefix cache gives the answer of a miss, however the prompts meet."""

import pytest

from minivllm import LLM, SamplingParams

B = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEXT = [0, *range(300, 500)]  # made-up tokens after the one that begins a text


def engine(*, caching: bool = True, budget: int = 256) -> LLM:
    return LLM(
        block_size=B, num_kvcache_blocks=256, max_num_seqs=8, max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )  # fmt: skip


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    llm.llm_engine.block_manager.check_integrity()
    return [out.outputs[0].token_ids for out in outputs]


@pytest.fixture(scope="module")
def without_cache() -> LLM:
    return engine(caching=False)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(B, id="nano-vllm#144-one-block"),
        pytest.param(2 * B, id="nano-vllm#114-two-blocks"),
        pytest.param(3 * B, id="nano-vllm#117-three-blocks"),
        pytest.param(B - 1, id="nano-vllm#199-one-token-less"),
        pytest.param(B + 1, id="MinivLLM#98-one-token-more"),
    ],
)
def test_a_prompt_that_is_cached_gets_the_same_answer(length: int, without_cache: LLM) -> None:
    llm, prompt = engine(), TEXT[:length]
    first, second = answers(llm, [prompt])[0], answers(llm, [prompt])[0]
    assert first == second == answers(without_cache, [prompt])[0]


def test_a_full_hit_does_not_break_the_chain(without_cache: LLM) -> None:
    """vLLM#11186: after a full hit recomputed its last token, a longer prompt still finds every block."""
    llm = engine()
    answers(llm, [TEXT[: 3 * B]])
    answers(llm, [TEXT[: 3 * B]])
    longer = {"prompt_token_ids": TEXT[: 4 * B]}
    out = llm.generate(longer, GREEDY, use_tqdm=False)[0]
    assert out.metrics.num_cached_tokens == 3 * B
    assert out.outputs[0].token_ids == answers(without_cache, [TEXT[: 4 * B]])[0]


@pytest.mark.parametrize("budget", [8, 256])
def test_twins_in_one_step_read_only_what_was_written(budget: int, without_cache: LLM) -> None:
    """nano-vllm#208: the second of two prompts with one beginning must not find blocks that are not written yet."""
    prompts = [[*TEXT[: 2 * B], 700], [*TEXT[: 2 * B], 701]]
    assert answers(engine(budget=budget), prompts) == answers(without_cache, prompts)


def test_the_same_prompt_twice_in_one_step(without_cache: LLM) -> None:
    """MinivLLM#88: a prompt of one block and a token, twice: positions and cached keys must be those of one."""
    prompt = TEXT[: B + 1]
    first, second = answers(engine(), [prompt, prompt])
    assert first == second == answers(without_cache, [prompt])[0]


def test_the_cache_changes_no_answer(without_cache: LLM) -> None:
    """tenstorrent/vllm#415: fifty prompts behind one system prompt, with the cache on and off."""
    prompts = [[*TEXT[: 4 * B], *range(1000 + 7 * k, 1000 + 7 * k + 1 + k % 9)] for k in range(50)]
    llm = engine()
    assert answers(llm, prompts) == answers(without_cache, prompts)
    assert llm.llm_engine.block_manager.stats.hit_tokens > 0
