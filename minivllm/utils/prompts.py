# Generated from notebooks/01_qwen3_from_scratch.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""Prompts are checked at the door, where the message can still say what was wrong with them."""

from array import array
from numbers import Integral

import numpy as np


class PromptError(ValueError):
    """A prompt that cannot be run. The message names the value and the limit."""


def check_prompt(token_ids: list[int], vocab_size: int) -> None:
    """Raises PromptError for a prompt of no tokens, and for an id that is no integer or outside [0, vocab_size)."""
    if len(token_ids) == 0:
        raise PromptError("the prompt has no tokens: pass at least one (the beginning-of-text token will do)")
    if are_ids(token_ids, vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, Integral):
            raise PromptError(f"token {index} of the prompt is {token_id!r}: ids are integers")
        if not 0 <= token_id < vocab_size:
            raise PromptError(f"token {index} of the prompt is {token_id}: ids go from 0 to {vocab_size - 1}")


def are_ids(token_ids: list[int], vocab_size: int) -> bool:
    """Whether all, at least one, are integers in [0, vocab_size), without a word on which is not."""
    try:
        ids = np.frombuffer(array("q", token_ids), np.int64)
    except (TypeError, OverflowError):  # something that is no integer, or none of 64 bits
        return False
    return bool(ids.min() >= 0 and ids.max() < vocab_size)
