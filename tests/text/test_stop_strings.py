"""Stop strings are found as in the whole text, however it is cut, and no more is held back than must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop_strings import StopMatcher

words = st.text("ab", min_size=1, max_size=4)
pieces_of_text = st.lists(st.text("ab", max_size=5), max_size=12)


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself: first complete, then longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(stops=st.lists(words, max_size=3), pieces=pieces_of_text)
def test_result_is_that_of_a_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (sent, matcher.matched) == search("".join(pieces), stops)


@given(stops=st.lists(words, min_size=1, max_size=3), pieces=pieces_of_text)
def test_only_a_beginning_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher, text, num_sent = StopMatcher(stops), "", 0
    for piece in pieces:
        text += piece
        num_sent += len(matcher.push(piece))
        if matcher.matched is not None:
            return
        held = text[num_sent:]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert (matcher.flush(), matcher.matched) == ("", None)


def test_nothing_passes_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.push("ab"), matcher.push("cd"), matcher.flush()] == ["a", "", ""]


def test_long_stop_string_costs_no_more_per_character() -> None:
    """Quadratic work would take minutes here."""
    matcher = StopMatcher(["a" * 50_000 + "b"])
    assert "".join(matcher.push("a" * 10) for _ in range(10_000)) == "a" * 50_000
    assert matcher.flush() == "a" * 50_000


def test_empty_stop_string_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopMatcher([""])
