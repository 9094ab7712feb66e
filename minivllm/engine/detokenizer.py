# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""Text from tokens, one at a time: no half characters, and nothing that a stop string would take back."""

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what a decoder puts where bytes are no character (yet)
CONTEXT = 6  # tokens of the prompt that are decoded along: some tokenizers treat a text's first word otherwise


class Detokenizer:
    """The text of one answer, as it grows.

    decode: token ids → text. Each call of `add` decodes the tokens since the last complete character, and a few
    before them, so the cost of a token does not grow with the length of the answer. The two offsets are those of
    text-generation-inference (`decode_token` in server/text_generation_server/models/model.py,
    https://github.com/huggingface/text-generation-inference).
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(prompt_token_ids[-CONTEXT:])  # prefix_offset ≤ read_offset ≤ number of tokens
        self._prefix_offset, self._read_offset = 0, len(self._token_ids)
        self.text = ""

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Take tokens in; returns the text that is complete now. With `last` also what will never be completed."""
        self._token_ids += token_ids
        known = self._decode(self._token_ids[self._prefix_offset : self._read_offset])
        longer = self._decode(self._token_ids[self._prefix_offset :])
        if (longer.endswith(HALF) and not last) or len(longer) <= len(known):
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._token_ids)
        self.text += longer[len(known) :]
        return longer[len(known) :]


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string, and so must not be shown yet."""
    longest = max((len(stop) for stop in stops), default=1)
    candidates = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in candidates if any(stop[:-1].startswith(text[-n:]) for stop in stops)), 0)


def find_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """The stop string that begins first in text[start:], as (its index in text, itself), the longest if several begin
    there; None if there is none."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop, max(0, start))) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


class TextStream:
    """What of an answer's text may be shown: up to its stop string, and never the beginning of one.

    After `add`, `text` is the answer so far, `stopped_by` the stop string that ended it, or None.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._stops = detokenizer, tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self.text, self.stopped_by = "", None

    def add(self, token_ids: Sequence[int], *, last: bool = False, ignore_stops: bool = False) -> None:
        """Take tokens in. `last`: the answer has ended. `ignore_stops`: it may not end yet (min_tokens)."""
        if self.stopped_by is not None:
            return
        new = self._detokenizer.add(token_ids, last=last)
        whole = self._detokenizer.text
        start = len(whole) - len(new) - self._longest + 1  # a stop string may have begun in the text before
        found = None if ignore_stops else find_stop(whole, self._stops, start)
        if found:
            self.text, self.stopped_by = whole[: found[0]], found[1]
        else:
            self.text = whole if last else whole[: len(whole) - held_back(whole, self._stops)]
