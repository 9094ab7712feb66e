"""Text that grows token by token: whole characters only, and nothing that a stop string takes back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import minivllm
from minivllm.engine.detokenizer import Detokenizer, TextStream, find_stop, held_back

TOKENIZER = Tokenizer.from_file(str(minivllm.STORYTELLER / "tokenizer.json"))
SAMPLES = [
    "Once upon a time",
    "naïve café — “quoted”",
    "漢字かな混じり",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "a\u0301e\u0302",
    "\n\n  tabs\tand spaces  ",
]


def decode(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids)


def stream(token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """The pieces that a detokenizer gives out, the last one with `last`."""
    detokenizer = Detokenizer(decode, prompt or [0])
    pieces = [detokenizer.add([token]) for token in token_ids]
    return [*pieces, detokenizer.add([], last=True)]


@pytest.mark.parametrize(
    "text", SAMPLES, ids=["ascii", "accents", "cjk[djl-serving#3085]", "emoji[vllm-mlx#109]", "marks", "spaces"]
)
def test_no_character_is_ever_split(text: str) -> None:  # dynamo#12630
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = stream(token_ids)
    assert "".join(pieces) == decode(token_ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_samples_do_split_characters_over_tokens() -> None:
    token_ids = TOKENIZER.encode("👩", add_special_tokens=False).ids
    assert len(token_ids) > 1 and "\ufffd" in decode(token_ids[:1]), "else the test above shows nothing"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.data())
def test_any_text_in_any_pieces(text: str, data: st.DataObject) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    detokenizer, shown = Detokenizer(decode, [0]), ""
    while token_ids:
        count = data.draw(st.integers(1, len(token_ids)))
        shown += detokenizer.add(token_ids[:count])
        assert text.startswith(shown)
        token_ids = token_ids[count:]
    shown += detokenizer.add([], last=True)
    assert shown == detokenizer.text == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=30))
def test_tokens_that_are_no_text_at_all(token_ids: list[int]) -> None:
    """Bytes that no character begins with: what is shown never changes, and in the end it is the whole decoding."""
    assert "".join(stream(token_ids)) == decode(token_ids)


def test_special_tokens_are_no_text() -> None:
    assert "".join(stream([0, *TOKENIZER.encode("The fox").ids, 0])) == "The fox"  # encode puts another 0 in front


def test_a_half_character_at_the_end_is_shown_at_the_end() -> None:
    token_ids = TOKENIZER.encode("ok 👩", add_special_tokens=False).ids[:-1]
    pieces = stream(token_ids)
    assert "".join(pieces[:-1]) == "ok " and pieces[-1] == "\ufffd"


def test_decoding_is_incremental() -> None:
    """The longest piece that is decoded does not grow with the answer."""
    lengths = []

    def watched(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(watched, list(range(300, 320)))
    for token in TOKENIZER.encode("The quick brown fox jumps over the lazy dog. " * 20, add_special_tokens=False).ids:
        detokenizer.add([token])
    assert max(lengths) <= 8


def letters(text_tokens: list[str], stops: list[str]) -> tuple[list[str], TextStream]:
    """Feed tokens that are strings; returns the text after each, up to the end or the stop."""
    whole = TextStream(Detokenizer(lambda ids: "".join(text_tokens[i] for i in ids)), stops)
    shown = []
    for index in range(len(text_tokens)):
        whole.add([index], last=False)
        shown.append(whole.text)
        if whole.stopped_by is not None:
            return shown, whole
    whole.add([], last=True)
    return [*shown, whole.text], whole


def test_a_stop_string_across_tokens_is_never_shown_half() -> None:  # vLLM#3574
    shown, whole = letters(["AB", "CDE", "FG"], ["DEF"])
    assert shown == ["AB", "ABC", "ABC"] and whole.stopped_by == "DEF"


def test_what_only_looked_like_a_stop_string_is_shown_later() -> None:  # vLLM#2577
    shown, whole = letters(["AB", "CDE", "X"], ["DEF"])
    assert shown == ["AB", "ABC", "ABCDEX", "ABCDEX"] and whole.stopped_by is None


def test_the_beginning_of_a_stop_string_at_the_very_end_is_text() -> None:
    assert letters(["AB", "CDE"], ["DEF"])[0][-1] == "ABCDE"


@pytest.mark.parametrize(
    ("stops", "text", "by"), [(["C", "B"], "A", "B"), (["CD", "BC"], "A", "BC"), (["BCD", "BC"], "A", "BCD")], ids=str
)
def test_the_first_of_several_stop_strings_ends_it(stops: list[str], text: str, by: str) -> None:
    _, whole = letters(["ABCDE"], stops)
    assert (whole.text, whole.stopped_by) == (text, by)


def test_nothing_is_taken_in_after_the_stop() -> None:
    whole = TextStream(Detokenizer(lambda ids: "ABCD"[ids[0] : ids[-1] + 1] if ids else ""), ["B"])
    for index in range(4):
        whole.add([index], last=index == 3)
    assert (whole.text, whole.stopped_by) == ("A", "B")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=0, max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@example(["aab", "a", "ab"], ["abab"])
@example(["a", "a", "b"], ["aab"])
def test_stop_strings_against_a_search_of_the_whole_text(tokens: list[str], stops: list[str]) -> None:
    shown, whole = letters(tokens, stops)
    text = "".join(tokens)
    # A stop string ends the answer with the token that completes it, so an earlier one wins over a longer one.
    for end in range(len(tokens) + 1):
        prefix = "".join(tokens[:end])
        if found := find_stop(prefix, stops, 0):
            text = prefix[: found[0]]
            break
    assert whole.text == text
    assert all(text.startswith(piece) for piece in shown), "what was shown is never taken back"


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    held = held_back(text, stops)
    begins = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    assert held == max(begins, default=0)
