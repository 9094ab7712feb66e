# Generated from notebooks/01_qwen3_from_scratch.ipynb by tools/export.py; edit there.
"""Prompts are checked at the door, where the message can still say what was wrong with them."""

from collections.abc import Sequence
from numbers import Integral


class PromptError(ValueError):
    """A prompt that cannot be run. The message names the value and the limit."""


def check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises PromptError for a prompt of no tokens, and for an id that is no integer or outside [0, vocab_size)."""
    if len(token_ids) == 0:
        raise PromptError("the prompt has no tokens: pass at least one (the beginning-of-text token will do)")
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, Integral):
            raise PromptError(f"token {index} of the prompt is {token_id!r}: ids are integers")
        if not 0 <= token_id < vocab_size:
            raise PromptError(f"token {index} of the prompt is {token_id}: ids go from 0 to {vocab_size - 1}")
