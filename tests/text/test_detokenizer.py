"""A stream's text is the whole text's, however characters straddle tokens and stop strings straddle both."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from server.text.detokenizer import IncrementalDetokenizer
from server.text.tokenizer import Tokenizer
from tests.text.hard_texts import HARD_TEXTS
from tests.tiny_tokenizer import byte_alphabet

KINDS = ("qwen2", "tiny", "sentencepiece")
texts = pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS.keys())


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def stream(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    return [*deltas, detokenizer.finish()]


@texts
def test_joined_stream_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@texts
def test_ids_pushed_together_are_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for prompt_end in range(len(token_ids) + 1):
        prompt_ids, answer_ids = token_ids[:prompt_end], token_ids[prompt_end:]
        together = IncrementalDetokenizer(tokenizer, prompt_ids)
        whole = together.push_all(answer_ids) + together.finish()
        assert whole == "".join(stream(IncrementalDetokenizer(tokenizer, prompt_ids), answer_ids))


@texts
def test_no_delta_holds_a_broken_character(qwen2: Tokenizer, text: str) -> None:
    deltas = stream(IncrementalDetokenizer(qwen2), qwen2.encode(text))
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@texts
def test_text_cut_at_every_token_is_the_decode_of_those_tokens(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(len(token_ids) + 1):
        joined = "".join(stream(IncrementalDetokenizer(tokenizer), token_ids[:end]))
        assert joined == tokenizer.decode(token_ids[:end])
        assert "\ufffd" not in joined[:-1] or "\ufffd" in text


def test_cut_character_is_one_replacement_character_at_the_end_only(qwen2: Tokenizer) -> None:
    token_ids = qwen2.encode("客单价")
    assert len(token_ids) == 3
    assert stream(IncrementalDetokenizer(qwen2), token_ids[:1]) == ["", "\ufffd"]
    assert stream(IncrementalDetokenizer(qwen2), token_ids) == ["", "客单", "价", ""]


@given(token_ids=st.lists(st.integers(0, 151_700), max_size=40))
def test_any_ids_stream_as_the_library_decodes_them(
    qwen2: Tokenizer, qwen2_library: tokenizers.Tokenizer, token_ids: list[int]
) -> None:
    expected = qwen2_library.decode(token_ids, skip_special_tokens=True)
    assert qwen2.decode(token_ids) == expected
    assert "".join(stream(IncrementalDetokenizer(qwen2), token_ids)) == expected


@given(data=st.binary(max_size=24))
def test_any_bytes_stream_as_they_decode(qwen2: Tokenizer, qwen2_library: tokenizers.Tokenizer, data: bytes) -> None:
    characters = byte_alphabet()
    byte_ids = [qwen2_library.token_to_id(characters[byte]) for byte in data]
    assert "".join(stream(IncrementalDetokenizer(qwen2), byte_ids)) == data.decode("utf-8", errors="replace")


def test_ids_without_text_add_nothing_between_the_bytes_of_a_character(qwen2: Tokenizer) -> None:
    first, second, third = qwen2.encode("客单价")
    strange: list[int] = [151_645, -1, 2**40, 151_900, None]  # type: ignore[list-item]
    token_ids = [first, *strange, second, *strange, third, *strange]
    assert "".join(stream(IncrementalDetokenizer(qwen2), token_ids)) == "客单价"


def test_special_tokens_are_shown_when_asked_for(qwen2: Tokenizer) -> None:
    token_ids = qwen2.encode("a<|im_end|>b")
    shown = stream(IncrementalDetokenizer(qwen2, skip_special_tokens=False), token_ids)
    assert shown == ["a", "<|im_end|>", "b", ""]
    assert stream(IncrementalDetokenizer(qwen2), token_ids) == ["a", "", "b", ""]


@texts
def test_answer_to_a_prompt_cut_anywhere_completes_it(tokenizer: Tokenizer, text: str) -> None:
    """The prompt's own text ends before a character that the answer completes."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(token_ids)):
        answer = "".join(stream(IncrementalDetokenizer(tokenizer, token_ids[:cut]), token_ids[cut:]))
        assert tokenizer.decode(token_ids).endswith(answer)
        assert (
            tokenizer.decode(token_ids[:cut]).rstrip("\ufffd") + answer == tokenizer.decode(token_ids)
            or "\ufffd" in text
        )


def test_answer_that_does_not_continue_the_prompts_cut_character_starts_clean(qwen2: Tokenizer) -> None:
    cut = qwen2.encode("客单价")[:1]
    assert stream(IncrementalDetokenizer(qwen2, cut), qwen2.encode("Hello")) == ["Hello", ""]
    assert stream(IncrementalDetokenizer(qwen2, cut), []) == [""]


def test_first_space_belongs_to_the_answer_only_behind_a_prompt(sentencepiece: Tokenizer) -> None:
    prompt, answer = sentencepiece.encode("the sea"), sentencepiece.encode("was", add_special_tokens=False)
    assert "".join(stream(IncrementalDetokenizer(sentencepiece, prompt), answer)) == " was"
    assert "".join(stream(IncrementalDetokenizer(sentencepiece), answer)) == "was"


PANGRAM = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize(
    ("stops", "text", "expected", "stopped"),
    [
        (["own fox"], PANGRAM, "The quick br", "own fox"),
        (["\n"], "Why?\nBecause", "Why?", "\n"),
        (["\n"], "Why?", "Why?", None),
        (["own foxes"], PANGRAM, PANGRAM, None),
        (["brown fox", "fox", "row"], PANGRAM, "The quick b", "row"),
        (["fox", "brown fox"], PANGRAM, "The quick ", "brown fox"),
        (["T"], PANGRAM, "", "T"),
        ([PANGRAM], PANGRAM, "", PANGRAM),
        (["aab"], "aaaab", "aa", "aab"),
        (["单价"], "客单价上", "客", "单价"),
        (["‍👩"], "👨‍👩‍👧", "👨", "‍👩"),
        (["dog.!"], PANGRAM, PANGRAM, None),
    ],
)
def test_text_ends_exactly_before_the_stop_string(
    tokenizer: Tokenizer, stops: list[str], text: str, expected: str, stopped: str | None
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, stop_strings=stops)
    assert "".join(stream(detokenizer, tokenizer.encode(text, add_special_tokens=False))) == expected
    assert detokenizer.stopped == stopped


def test_held_text_is_sent_as_soon_as_it_cannot_become_a_stop_string(qwen2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(qwen2, stop_strings=[" brown bear"])
    deltas = stream(detokenizer, qwen2.encode("The brown fox"))
    assert deltas == ["The", "", " brown fox", ""]


def test_stop_string_cut_by_the_last_token_is_flushed(qwen2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(qwen2, stop_strings=["brown fox"])
    assert stream(detokenizer, qwen2.encode("The brown")) == ["The", " ", "brown"]
    assert detokenizer.stopped is None


def test_nothing_follows_a_stop_string(qwen2: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(qwen2, stop_strings=["fox"])
    assert "".join(stream(detokenizer, qwen2.encode("a fox and a fox"))) == "a "
    assert detokenizer.push(qwen2.encode("more")[0]) == ""
    assert detokenizer.finish() == ""
