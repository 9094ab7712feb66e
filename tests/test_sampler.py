"""The sampler: hand-made logits, the filters of transformers as oracle, and noise that depends on nothing else."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minivllm.core.sequence import Sequence
from minivllm.layers.sampler import (
    SamplingBatch,
    SamplingRow,
    apply_presence_and_frequency,
    apply_repetition,
    filter_tokens,
    gumbel_noise,
    keep_likely,
    sample,
    scramble,
    top_logprobs,
)
from minivllm.sampling_params import SamplingParams, SamplingParamsError

VOCAB = 50


def row(
    prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = (), seed: int = 0, stops: tuple[int, ...] = (), **params
) -> SamplingRow:
    """A row whose sequence has this prompt and has generated this answer."""
    seq = Sequence(0, list(prompt), stop_token_ids=frozenset(stops))
    for token in answer:
        seq.append_token(token)
    return SamplingRow(seq, SamplingParams(**params), seed)


def some_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 1e-9], ids=["vLLM#6719", "nano-vllm#249", "vLLM#2754", "tiny"])
def test_temperature_zero_is_argmax(temperature: float) -> None:
    logits = some_logits(20)
    rows = [row(temperature=temperature, seed=i) for i in range(20)]
    assert sample(logits.clone(), rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["usual", "large"])
def test_small_temperatures_stay_finite(scale: float) -> None:  # vLLM#2754, vLLM#13311
    logits = some_logits(8) * scale
    rows = [row(temperature=t, seed=i, top_p=0.9) for i, t in enumerate([1e-5, 1e-4, 1e-3, 0.01] * 2)]
    chosen = sample(logits.clone(), rows)
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    assert (gaps <= 0.2).all(), "nothing but the most likely token, or one as likely"


def test_greedy_and_random_rows_mix() -> None:  # nano-vllm#249: temperature 0 in a batch of others
    logits = some_logits(6)
    rows = [row(temperature=0.0 if i % 2 else 1.0, seed=i) for i in range(6)]
    chosen = sample(logits.clone(), rows)
    assert [chosen[i] for i in (1, 3, 5)] == logits.argmax(-1)[1::2].tolist()
    assert [chosen[i] for i in (0, 2, 4)] == [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in (0, 2, 4)]


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("top_k", -2),
    ("min_p", 1.5),
    ("min_p", -0.1),
    ("n", 0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("presence_penalty", math.inf),
    ("logprobs", -1),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("temperature", "hot"),
    ("temperature", None),
    ("n", None),
    *((name, 2.5) for name in ("n", "top_k", "max_tokens", "min_tokens", "logprobs", "seed")),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda value: str(value))  # vLLM#14181, vLLM#10432
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SamplingParamsError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert name == "stop" or repr(value) in str(caught.value)


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(SamplingParamsError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, 10**6], ids=["-1", "0", "vocab", "beyond[vLLM#14181]"])
def test_top_k_that_filters_nothing(top_k: int) -> None:
    logits = some_logits(5)
    plain = sample(logits.clone(), [row(seed=i) for i in range(5)])
    assert sample(logits.clone(), [row(seed=i, top_k=top_k) for i in range(5)]) == plain


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_most_likely_token_is_always_kept(params: dict) -> None:  # lmms-eval#1265
    logits = some_logits(30)
    assert sample(logits.clone(), [row(seed=i, **params) for i in range(30)]) == logits.argmax(-1).tolist()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_filters_keep_what_transformers_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = some_logits(4, seed)
    theirs = TopKLogitsWarper(top_k)(None, logits.clone())
    theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
    theirs = MinPLogitsWarper(min_p)(None, theirs) if min_p > 0 else theirs
    ordered, ids = logits.sort(dim=-1, descending=True)
    column = [torch.tensor([[value]] * 4) for value in (top_k, top_p, min_p)]
    ours = torch.zeros(4, VOCAB, dtype=torch.bool).scatter_(1, ids, keep_likely(ordered, *column))
    # A token whose cumulative probability is the bound to the last bit may fall on either side.
    assert ((theirs > float("-inf")) != ours).sum() == 0 or is_on_the_edge(ordered, top_k, top_p, min_p)


def is_on_the_edge(ordered: torch.Tensor, top_k: int, top_p: float, min_p: float) -> bool:
    probs = ordered.masked_fill(torch.arange(VOCAB) >= top_k, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    close_p, close_min = (before - top_p).abs().min(), (probs - min_p * probs[:, :1]).abs().min()
    return bool(min(close_p, close_min) < 1e-6)


@pytest.mark.parametrize("spread", [3.0, 0.1], ids=["few-left", "more-left-than-looked-at-first"])
@pytest.mark.parametrize("top_k", [0, 20, 300, 900])
def test_filters_of_a_large_vocabulary(spread: float, top_k: int) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(5)) * spread
    rows = [row(seed=i, top_k=top_k, top_p=0.9, min_p=0.01) for i in range(3)]
    kept, ids = filter_tokens(logits, SamplingBatch(rows, logits.device))
    theirs = TopKLogitsWarper(top_k)(None, logits.clone()) if top_k else logits
    theirs = MinPLogitsWarper(0.01)(None, TopPLogitsWarper(0.9)(None, theirs))
    ours = torch.full_like(logits, float("-inf")).scatter_(1, ids, kept)
    assert torch.equal(ours, theirs)
    assert (ids.shape[1] == 1000) == (spread == 0.1 and top_k == 0), "no more than needed is sorted"


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_tokens_come_as_often_as_the_filtered_softmax_says(params: dict) -> None:
    logits, draws = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5]]), 4000
    wanted = SamplingParams(**params)
    drawn = Counter(sample(logits.repeat(draws, 1), [row(seed=i, **params) for i in range(draws)]))
    ordered, ids = (logits / wanted.temperature).sort(dim=-1, descending=True)
    column = [torch.tensor([[v]]) for v in (wanted.top_k or 6, wanted.top_p, wanted.min_p)]
    probs = ordered.masked_fill(~keep_likely(ordered, *column), float("-inf")).softmax(-1)
    expected = {int(token): float(p) * draws for token, p in zip(ids[0], probs[0], strict=True)}
    assert all(drawn[token] == 0 for token, count in expected.items() if count == 0)
    chi_square = sum((drawn[t] - e) ** 2 / e for t, e in expected.items() if e > 0)
    assert chi_square < 25, "with at most 5 degrees of freedom, 99.98 % of honest samples lie below"


def test_noise_is_gumbel_distributed() -> None:
    keys = scramble(torch.arange(200))
    noise = gumbel_noise(keys, torch.arange(1000)[None]).flatten()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.03
    below = torch.exp(-torch.exp(-noise))  # its distribution function makes it uniform
    counts = torch.histc(below, bins=20, min=0, max=1)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 50, "19 degrees of freedom"


def test_noise_of_neighbours_is_uncorrelated() -> None:
    noise = gumbel_noise(scramble(torch.arange(2000)), torch.arange(100)[None])
    for shifted, kept in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):
        correlation = torch.corrcoef(torch.stack([shifted.flatten(), kept.flatten()]))[0, 1]
        assert abs(correlation) < 0.01


def test_scramble_is_one_to_one_and_flips_half_of_the_bits() -> None:
    x = torch.arange(100_000)
    assert len(scramble(x).unique()) == len(x)
    changed = scramble(x) ^ scramble(x ^ 1)
    ones = torch.stack([(changed >> bit) & 1 for bit in range(64)]).float().mean()
    assert abs(ones - 0.5) < 0.01


def test_a_row_gets_the_same_token_in_any_batch() -> None:  # vLLM#51226, vLLM#2514: one stream for the whole batch
    logits = some_logits(9)
    rows = [row(seed=i, temperature=0.5 + 0.2 * i, top_k=i, top_p=1 - 0.05 * i) for i in range(9)]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(9)]
    assert sample(logits.clone(), rows) == alone
    assert sample(logits.flip(0).clone(), rows[::-1]) == alone[::-1]


def test_the_position_changes_the_draw() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = [sample(logits.clone(), [row(answer=(1,) * length, seed=7)])[0] for length in range(40)]
    assert len(set(drawn)) > 15, "the same seed must not repeat the same token for ever"


def test_repetition_penalty_counts_prompt_and_answer() -> None:  # TGI#1765, vLLM#1424, vLLM#28307
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0, 1.0]] * 2)
    rows = [row((0, 1, 1), (3,), repetition_penalty=2.0), row((0,), (2,))]
    apply_repetition(logits, SamplingBatch(rows, logits.device))
    assert logits.tolist() == [[1.0, -4.0, 4.0, -8.0, 1.0], [2.0, -2.0, 4.0, -4.0, 1.0]]


def test_presence_and_frequency_count_the_answer_alone() -> None:  # vllm-metal#69: prompt and answer mixed up
    logits = torch.zeros(2, 5)
    rows = [row((0, 1), (3, 3, 4), presence_penalty=0.5, frequency_penalty=0.25), row((0,), (2,))]
    apply_presence_and_frequency(logits, SamplingBatch(rows, logits.device))
    assert logits.tolist() == [[0.0, 0.0, 0.0, -1.0, -0.75], [0.0] * 5]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.floats(0.5, 2.0))
def test_repetition_penalty_is_that_of_transformers(tokens: list[int], penalty: float) -> None:
    logits = some_logits(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    batch = SamplingBatch([row(tuple(tokens), repetition_penalty=penalty)], logits.device)
    apply_repetition(logits, batch)
    assert torch.allclose(logits, theirs)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 7])
def test_equal_logits_stay_or_go_together(top_k: int) -> None:
    """16-bit logits have many equals. transformers' top_k keeps all that are as likely as the k-th."""
    ordered = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.0]])
    warped = TopKLogitsWarper(top_k)(None, ordered.clone())
    kept = keep_likely(ordered, torch.tensor([[top_k]]), torch.ones(1, 1), torch.zeros(1, 1))
    assert torch.equal(kept, warped.isfinite())
    for top_p in (0.4, 0.7, 0.9):
        kept = keep_likely(ordered, torch.tensor([[7]]), torch.full((1, 1), top_p), torch.zeros(1, 1))[0]
        assert kept[1] == kept[2] == kept[3] and kept[4] == kept[5]


def test_penalties_change_greedy_choices_too() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert sample(logits.clone(), [row((1,), (0,), temperature=0, presence_penalty=0.5)]) == [1]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]] * 3)
    rows = [row(answer=(2,) * n, temperature=0, min_tokens=2, stops=(0, 1)) for n in range(3)]
    assert sample(logits, rows) == [2, 2, 0]


def test_random_sampling_is_random() -> None:  # aprender#2027, transformers#40692: the batched path was greedy
    drawn = sample(torch.zeros(100, VOCAB), [row(seed=i) for i in range(100)])
    assert len(set(drawn)) > 30


def test_logprobs_are_of_the_untouched_softmax() -> None:
    logits = some_logits(3)
    expected = logits.log_softmax(-1)
    for i, found in enumerate(top_logprobs(logits, [4, 5, int(logits[2].argmax())], 3)):
        token = [4, 5, int(logits[2].argmax())][i]
        assert next(iter(found)) == token, "the token that was chosen comes first"
        assert found[token] == (pytest.approx(float(expected[i, token])), 1 + int((logits[i] > logits[i, token]).sum()))
        best = expected[i].topk(3).indices.tolist()
        assert set(found) == {token, *best} and [found[t][1] for t in best] == [1, 2, 3]
