"""Checks of chapter 06: the online softmax, merging pieces, what a test can see, a soft cap."""

from collections.abc import Callable, Iterator
from math import isclose

import numpy as np

from minivllm.course.exercises import Case, exercise


@exercise("6.1")
def third_tile(top: float, total: float, acc: float) -> Iterator[Case]:
    yield top != 5, "top: the new tile holds a score larger than 5"
    yield top == 6, "top: the largest score of all three tiles"
    yield not isclose(total, 23 / 16 + 1 + 1 / 4), "total: what was summed before was measured against 5; shrink it"
    yield not isclose(total, 23 / 32), "total: the new tile's own two weights are missing"
    yield isclose(total, 23 / 32 + 5 / 4), "total: 23/16 shrinks by 2^(5 - 6), then the weights 2^0 and 2^-2 are added"
    yield not isclose(acc, 395 / 8 + 20), "acc: the old sum of values shrinks like the total"
    yield isclose(acc, 395 / 16 + 20), "acc: 395/8 shrinks by 2^(5 - 6), then each weight times its value is added"


@exercise("6.2")
def merging(merge: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=12) * 3, rng.normal(size=(12, 4))
    weights = np.exp2(scores)
    want = weights @ values / weights.sum()
    cuts = [slice(0, 3), slice(3, 4), slice(4, 12)]
    averages = np.array([weights[cut] @ values[cut] / weights[cut].sum() for cut in cuts])
    lse = np.array([np.log2(weights[cut].sum()) for cut in cuts])
    with np.errstate(all="ignore"):
        got = np.asarray(merge(averages.copy(), lse.copy()))
        yield got.shape == (4,), f"three pieces, values of 4 numbers: you returned the shape {got.shape}"
        yield not np.allclose(got, averages.mean(0)), "three pieces: they do not weigh the same"
        natural = np.exp(lse - lse.max())
        yield not np.allclose(got, natural @ averages / natural.sum()), "three pieces: lse is a logarithm to base 2"
        yield np.allclose(got, want), f"three pieces: the whole softmax gives {want.round(3)}, you gave {got.round(3)}"
        large = np.asarray(merge(averages.copy(), lse + 2000))
        yield np.allclose(large, want), "all lse 2,000 larger: the shares are the same, but 2^2000 overflows"
        with_empty = np.vstack([averages, np.full((1, 4), np.nan)]), np.append(lse, -np.inf)
        yield np.allclose(merge(*with_empty), want), "a fourth piece is empty, and its average is NaN: 0 × NaN is NaN"
        for held in (np.nan, 7.0):
            empty = np.asarray(merge(np.full((2, 4), held), np.full(2, -np.inf)))
            case = f"all pieces empty, averages of {held}"
            yield np.array_equal(empty, np.zeros(4)), f"{case}: zeros are wanted, you gave {empty}"


@exercise("6.3")
def what_a_test_sees(a: str, b: str, c: str, d: str) -> Iterator[Case]:
    kinds = {"nan", "ragged", "long", "none"}
    for name, answer in zip("abcd", (a, b, c, d), strict=True):
        yield answer in kinds, f"{name}: one of {', '.join(sorted(kinds))}, not {answer!r}"
    yield a != "none", "a: the scores are hidden, but what does a weight of 0 times V give?"
    yield a != "ragged", "a: as long as every slot is finite, the hidden keys change nothing"
    yield a != "long", "a: that test may catch it, but a test before it does; nothing needs to be cut"
    yield b == "long", "b: merge_kernel works on sequences that were cut, and on those alone"
    yield c == "none", "c: are there other programs than before? The order in which they start changes no answer"
    yield d != "none", "d: which key does a row see that it did not see before, and what was read there?"
    yield d == "ragged", "d: a test before that one catches it: what is read for the key at `end` counts now"


@exercise("6.4")
def soft_cap(fold_capped: Callable[..., tuple]) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    scores, values, cap = rng.normal(size=10) * 20, rng.normal(size=(10, 3)), 15.0
    state = (-np.inf, 0.0, np.zeros(3))
    for tile in (slice(0, 4), slice(4, 10)):
        state = fold_capped(state, scores[tile], values[tile], cap)
    top, total, acc = state
    capped = cap * np.tanh(scores / cap)
    weights = np.exp(capped - capped.max())
    plain = np.exp(scores - scores.max())
    late = np.exp2(cap * np.tanh(scores * np.log2(np.e) / cap) - cap)
    got = acc / total
    yield not np.allclose(got, plain @ values / plain.sum()), "scores of ±20 and a cap of 15: nothing was capped"
    base_two = np.exp2(capped - capped.max())
    yield not np.allclose(got, base_two @ values / base_two.sum()), "the scores are in units of e^x: where is log2 e?"
    yield not np.allclose(got, late @ values / late.sum()), "the cap is in units of e^x: cap first, then times log2 e"
    yield np.allclose(got, weights @ values / weights.sum()), "scores of ±20 and a cap of 15: the answer is off"
    yield isclose(top, capped.max() * np.log2(np.e)), "top: in units of 2^x it is the largest capped score × log2 e"
