"""Keeps text that a user typed from becoming control tokens: it is marked before a template renders it.

A mark is a character that occurs nowhere in the messages, put behind the first character of a control token's name, so
that whatever the template does with the text, the name is no longer there. Where the user typed no such name, nothing
is marked and the prompt is exactly the template's. Knows strings; does not know ids or templates.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Piece(NamedTuple):
    """A run of rendered text; `plain`: the name of a control token that a user typed, to be read as ordinary text."""

    text: str
    plain: bool


class ControlTokens:
    """The names of one template's control tokens."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names, key=len, reverse=True)
        any_name = _any_of(self._names)
        self._any_name = re.compile(any_name)
        # Every place where a name begins, also inside another name; the first character is the match.
        self._any_start = re.compile(f"(?={any_name}).", re.DOTALL)
        self._beginnings = {name[:length] for name in self._names for length in range(1, len(name))}
        self._max_beginning = max(map(len, self._names), default=1) - 1

    def found_in(self, text: str) -> bool:
        """Whether `text` holds a name, or ends with the beginning of one, which the text behind it could complete."""
        return self._any_name.search(text) is not None or self._ends_with_beginning(text.rstrip())

    def mark(self, text: str, mark: str) -> str:
        """Break every name in `text`; close it behind a beginning at its end, whatever white space follows."""
        stripped = text.rstrip()
        if self._ends_with_beginning(stripped):
            text = stripped + mark + text[len(stripped) :]
        return self._any_start.sub(lambda match: match[0] + mark, text)

    def split(self, rendered: str, mark: str) -> list[Piece]:
        """Cut marked text at the names and at single marks, and leave the marks out."""
        broken_names = _any_of(name[0] + mark + name[1:] for name in self._names)
        parts = re.split(f"({broken_names})|{re.escape(mark)}", rendered)
        # Text and names alternate; in place of a name stands None for a single mark.
        pieces = [Piece((part or "").replace(mark, ""), plain=index % 2 == 1) for index, part in enumerate(parts)]
        return [piece for piece in pieces if piece.text]

    def _ends_with_beginning(self, text: str) -> bool:
        lengths = range(1, min(self._max_beginning, len(text)) + 1)
        return any(text[-length:] in self._beginnings for length in lengths)


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"  # which matches nothing


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its strings changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): with_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_strings(item, change) for item in value]
    return value


def unused_character(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`."""
    used = set().union(*texts)
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
