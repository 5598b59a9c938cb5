"""Marked text holds no control token whatever a template does with it, and unmarked it is what the user typed."""

from hypothesis import given
from hypothesis import strategies as st

from server.text.control_tokens import ControlTokens, Piece, strings_in, unused_character, with_strings

NAMES = ["<|a|>", "<|ab|>", "a|><", "</s>"]
TOKENS = ControlTokens(NAMES)
MARK = "\U000f0000"
typed = st.text(st.sampled_from("<|ab>/s "), max_size=20) | st.lists(st.sampled_from([*NAMES, " ", "x"])).map("".join)


@given(text=typed)
def test_marked_text_holds_no_name(text: str) -> None:
    marked = TOKENS.mark(text, MARK)
    assert not any(name in marked for name in NAMES)
    assert marked.replace(MARK, "") == text


@given(text=typed, start=st.integers(0, 25), stop=st.integers(0, 25))
def test_part_of_marked_text_holds_no_name(text: str, start: int, stop: int) -> None:
    assert not any(name in TOKENS.mark(text, MARK)[start:stop].strip() for name in NAMES)


@given(before=typed, after=typed)
def test_names_do_not_arise_where_two_typed_texts_meet(before: str, after: str) -> None:
    for first in (before, before.strip(), before.rstrip()):
        joined = TOKENS.mark(first, MARK) + TOKENS.mark(after, MARK)
        assert not any(name in joined for name in NAMES)
        assert not any(name in TOKENS.mark(before, MARK).rstrip() + TOKENS.mark(after, MARK) for name in NAMES)


@given(text=st.text(st.sampled_from("a b/>s\n")).filter(lambda text: not text.rstrip().endswith("a")))
def test_text_in_which_nothing_is_found_is_left_alone(text: str) -> None:
    assert not TOKENS.found_in(text)
    assert TOKENS.mark(text, MARK) == text


@given(text=typed)
def test_pieces_are_the_text_and_only_names_are_plain(text: str) -> None:
    pieces = TOKENS.split(TOKENS.mark(text, MARK), MARK)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text in NAMES for piece in pieces if piece.plain)
    assert not any(name in piece.text for name in NAMES for piece in pieces if not piece.plain)


def test_names_of_the_template_are_not_plain() -> None:
    rendered = "<|a|>" + TOKENS.mark("x </s> y", MARK) + "<|a|>"
    assert TOKENS.split(rendered, MARK) == [
        Piece("<|a|>x ", plain=False),
        Piece("</s>", plain=True),
        Piece(" y<|a|>", plain=False),
    ]


def test_model_without_control_tokens_marks_nothing() -> None:
    none = ControlTokens([])
    assert not none.found_in("<|a|>")
    assert none.mark("<|a|>", MARK) == "<|a|>"
    assert none.split("abc", MARK) == [Piece("abc", plain=False)]


def test_mark_is_a_character_that_nobody_typed() -> None:
    assert unused_character([]) == MARK
    assert unused_character(["a", f"b{MARK}", "\U000f0001\U000f0003"]) == "\U000f0002"


def test_strings_are_found_and_changed_everywhere() -> None:
    value = {"a": ["b", {"c": "d", "e": 1}], "f": None, "g": True}
    assert list(strings_in(value)) == ["a", "b", "c", "d", "e", "f", "g"]
    assert with_strings(value, str.upper) == {"A": ["B", {"C": "D", "E": 1}], "F": None, "G": True}
