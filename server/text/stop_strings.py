"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one.

Knows characters; does not know tokens. The result is the same however the text is cut into pieces.
"""

from collections.abc import Sequence


class StopMatcher:
    """`matched` is the stop string found, None before. The match that is complete first wins; of two that are complete
    with the same character, the longer one. Time per character does not depend on the length of the stop strings.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "an empty stop string would stop everything"
        # Longest first: of two that end together, the longer is found first.
        self._automata = [_Automaton(stop) for stop in sorted(stop_strings, key=len, reverse=True)]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return what can be sent now. After a match everything is dropped."""
        if not self._automata:
            return text
        if self.matched is not None:
            return ""
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                if automaton.advance(character):
                    self.matched, self._held = automaton.stop, ""
                    return pending[: position - len(automaton.stop)]
        num_sendable = len(pending) - max(automaton.num_matched for automaton in self._automata)
        self._held = pending[num_sendable:]
        return pending[:num_sendable]

    def flush(self) -> str:
        """The text is over: return what was held back."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: `num_matched` is the length of the longest prefix of `stop` that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallback_table(stop)

    def advance(self, character: str) -> bool:
        """Read one character; true if `stop` is now complete."""
        self.num_matched = _next_length(self.stop, self._fallback, self.num_matched, character)
        return self.num_matched == len(self.stop)


def _next_length(stop: str, fallback: Sequence[int], length: int, character: str) -> int:
    while length and stop[length] != character:
        length = fallback[length]
    return length + 1 if stop[length] == character else 0


def _fallback_table(stop: str) -> list[int]:
    """fallback[n]: the length of the longest proper prefix of `stop` that stop[:n] ends with."""
    fallback = [0, 0]
    for length in range(1, len(stop)):
        fallback.append(_next_length(stop, fallback, fallback[length], stop[length]))
    return fallback
