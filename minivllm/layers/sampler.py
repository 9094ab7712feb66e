# Generated from notebooks/09_engine.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""From logits to tokens: all rows at once, each by its own rules, with random numbers that depend on nothing else."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from minivllm.core.sequence import Sequence
from minivllm.sampling_params import SamplingParams


def keep_likely(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor | None = None) -> Tensor:
    """Which of the logits [num_rows, num_tokens], in descending order, may be drawn: bool, the first always.

    top_k int64, top_p, min_p float32 [num_rows, 1]. As in transformers, one filter after the other: k, then p of what
    is left, then min_p (vLLM begins with min_p). Equal logits stay or go together, whatever order a sort gave them.
    total [num_rows, 1]: the logsumexp of the whole rows, where `ordered` is their beginning.
    """
    kth = ordered.gather(1, top_k.clamp(max=ordered.shape[1]) - 1)
    keep = ordered >= kth
    inside = ordered.masked_fill(~keep, float("-inf"))
    norm = inside.logsumexp(dim=-1, keepdim=True)
    if total is not None:  # where k rules out nothing, the rest of the row counts, too
        norm = torch.where(top_k > ordered.shape[1], total, norm)
    probs = (inside - norm).exp()
    before = probs.cumsum(dim=-1) - probs  # probability of all that is more likely
    keep &= ((before < top_p) | (top_p >= 1)) & (probs >= min_p * probs[:, :1])
    least = ordered.masked_fill(~keep, float("inf")).amin(dim=-1, keepdim=True)
    return ordered >= least  # and so also what is as likely as the last one kept


GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd: multiples of it are spread evenly over the 64 bits


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64 of any shape: zeros come in. PyTorch's own >> copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def scramble(x: Tensor) -> Tensor:
    """A one-to-one map of int64 to int64, of any shape; each input bit changes about half of the output bits. It is the
    finalizer of splitmix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195)."""
    x = (x ^ shift(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = x.bitwise_xor_(shift(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x.bitwise_xor_(shift(x, 31))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise from the Gumbel distribution for each (key, token): float32 [num_rows, num_tokens].
    keys int64 [num_rows]; token_ids int64 [num_rows or 1, num_tokens]. The trick: Maddison et al. 2014, section 2,
    https://arxiv.org/abs/1411.0030."""
    bits = shift(scramble(keys[:, None] + token_ids * GOLDEN), 41)  # 23 bits: with 24, float32 would round up to 1
    uniform = (bits.float() + 0.5) * 2.0**-23  # between 0 and 1, both excluded
    return -torch.log(-torch.log(uniform))


@dataclass(frozen=True)
class SamplingRow:
    """A sequence that is to get a token, what its request asks for, and the seed of its random numbers."""

    seq: Sequence
    params: SamplingParams
    seed: int

    @cached_property
    def needs_values(self) -> bool:
        """Whether the host has to know the values of all earlier tokens, or has to see or change the logits."""
        p = self.params
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty
        return bool(penalised or p.min_tokens or p.logprobs is not None)

    @cached_property
    def rules(self) -> tuple[float, int, float, float]:
        """Temperature (0: greedy), top_k (0: all tokens), top_p and min_p."""
        p = self.params
        return (0.0, 0, 1.0, 0.0) if p.is_greedy else (p.temperature, max(p.top_k, 0), p.top_p, p.min_p)

    @cached_property
    def is_filtered(self) -> bool:
        """Whether some tokens are ruled out before one is drawn."""
        return self.rules[1:] != (0, 1.0, 0.0)


class SamplingBatch:
    """The parameters of a step's rows as tensors [num_rows], on the device of the logits."""

    def __init__(self, rows: list[SamplingRow], device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.random_rows = [i for i, row in enumerate(rows) if not row.params.is_greedy]

    def column(self, values: list[int] | list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of some rows as a tensor [len(values)] on the device."""
        return torch.tensor(values, dtype=dtype).to(self.device)

    def of_random_rows(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One parameter of the rows that draw random numbers, [num_random_rows, 1]."""
        return self.column([getattr(self.rows[i].params, name) for i in self.random_rows], dtype)[:, None]

    def keys(self) -> Tensor:
        """One key for each random row: of its seed and its position, and of nothing else. int64 [num_random_rows]."""
        seeds = self.column([self.rows[i].seed for i in self.random_rows], torch.int64)
        positions = self.column([self.rows[i].seq.num_tokens for i in self.random_rows], torch.int64)
        return scramble(scramble(seeds) + positions * GOLDEN)

    def where(self, cells: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
        """(row, token ids) pairs as two int64 tensors [number of all ids], rows and ids, for logits[index] = …"""
        lengths = [len(ids) for _, ids in cells]
        row_index = np.repeat(np.array([row for row, _ in cells], np.int64), lengths)
        token_index = np.fromiter(chain.from_iterable(ids for _, ids in cells), np.int64, sum(lengths))
        return torch.from_numpy(row_index).to(self.device), torch.from_numpy(token_index).to(self.device)


def ban_stops(logits: Tensor, batch: SamplingBatch) -> None:
    """Rule out, in place, the stop tokens of answers that are shorter than their min_tokens.
    logits float32 [num_rows, vocab_size]."""
    early = [(i, r) for i, r in enumerate(batch.rows) if r.seq.num_completion_tokens < r.params.min_tokens]
    if cells := [(i, list(row.seq.stop_token_ids)) for i, row in early if row.seq.stop_token_ids]:
        logits[batch.where(cells)] = float("-inf")


def apply_repetition(logits: Tensor, batch: SamplingBatch) -> None:
    """In place: logits of tokens in prompt or answer are divided by the penalty where positive, else multiplied.
    logits float32 [num_rows, vocab_size]. After Keskar et al. 2019, https://arxiv.org/abs/1909.05858,
    who divide negative ones, too, which makes them more likely."""
    wanted = [i for i, row in enumerate(batch.rows) if row.params.repetition_penalty != 1.0]
    if not wanted:
        return
    where = batch.where([(i, sorted(set(batch.rows[i].seq.token_ids))) for i in wanted])
    penalty = batch.column([row.params.repetition_penalty for row in batch.rows])[where[0]]
    seen = logits[where]
    logits[where] = torch.where(seen > 0, seen / penalty, seen * penalty)


def apply_presence_and_frequency(logits: Tensor, batch: SamplingBatch) -> None:
    """In place: subtracts presence_penalty once, and frequency_penalty per occurrence, for tokens of the answer.
    logits float32 [num_rows, vocab_size]."""
    asking = [(i, r) for i, r in enumerate(batch.rows) if r.params.presence_penalty or r.params.frequency_penalty]
    if not asking:
        return
    where = batch.where([(i, row.seq.completion_token_ids) for i, row in asking])
    counts = torch.zeros_like(logits).index_put_(where, torch.ones((), device=logits.device), accumulate=True)
    presence = batch.column([row.params.presence_penalty for row in batch.rows])[:, None]
    frequency = batch.column([row.params.frequency_penalty for row in batch.rows])[:, None]
    logits -= presence * (counts > 0) + frequency * counts


CANDIDATES = 256  # so many are looked at first: a filter seldom leaves more, and a whole vocabulary is slow to sort


def filter_tokens(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """The likeliest logits of each random row, those that a filter rules out at −∞, and their token ids.

    logits [num_random_rows, vocab_size]; returns float32 and int64 [num_random_rows, num_candidates].
    """
    vocab_size = logits.shape[1]
    limits = [batch.rows[i].params.top_k for i in batch.random_rows]
    top_k = batch.column([k if k > 0 else vocab_size for k in limits], torch.int64)[:, None]
    bounds = (top_k, batch.of_random_rows("top_p"), batch.of_random_rows("min_p"))
    total = logits.logsumexp(dim=-1, keepdim=True)
    first = min(vocab_size, max(CANDIDATES, *limits))  # top_k is counted out in full
    for width in sorted({first, vocab_size}):
        ordered, ids = logits.topk(width, dim=-1)
        keep = keep_likely(ordered, *bounds, total)
        if not keep[:, -1].any():  # all that is kept lies within these
            break
    return ordered.masked_fill(~keep, float("-inf")), ids


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A token for each random row, by the Gumbel-max trick: [num_random_rows, vocab_size] → int64 [num_random_rows]."""
    logits = logits / batch.of_random_rows("temperature")
    ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    params = [batch.rows[i].params for i in batch.random_rows]
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        logits, ids = filter_tokens(logits, batch)
    best = (logits + gumbel_noise(batch.keys(), ids)).argmax(dim=-1, keepdim=True)
    return ids.gather(1, best)[:, 0]


@torch.inference_mode()
def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """The next token of each row. logits float32 [num_rows, vocab_size]; changed in place by bans and penalties."""
    batch = SamplingBatch(rows, logits.device)
    ban_stops(logits, batch)
    apply_repetition(logits, batch)
    apply_presence_and_frequency(logits, batch)
    tokens = logits.argmax(dim=-1)
    if batch.random_rows:
        chosen = torch.tensor(batch.random_rows, device=logits.device)
        tokens[chosen] = draw(logits[chosen], batch)
    return tokens.tolist()


@torch.inference_mode()
def top_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[dict[int, tuple[float, int]]]:
    """For each row {token id: (log probability, rank)}: of its token, then of its num_top most likely ones.

    logits float32 [num_rows, vocab_size], before any penalty; rank 1 is the most likely token.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    best = [
        {token: (value, place) for place, (token, value) in enumerate(zip(*top, strict=True), 1)}
        for top in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    chosen = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), strict=True)
    return [{token: (value, rank)} | top for (token, value, rank), top in zip(chosen, best, strict=True)]
