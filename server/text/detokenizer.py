"""The text of one answer as it grows, token by token, up to a stop string.

Knows ids and text; does not know why an answer ends, nor how text is sent.

One rule for bytes that are no character, streamed or not: a character whose bytes are incomplete waits for the next
token; when the answer ends or other bytes follow, it becomes one U+FFFD, as in `Tokenizer.decode`.
"""

import codecs
from collections.abc import Iterable, Sequence

from server.text.stop_strings import StopMatcher
from server.text.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """push() every output token, then finish() once. The deltas joined are the answer's text: `decode` of the ids, cut
    before the stop string, if one was found (`stopped`).

    A delta is also the `token.text` of stream events: empty while a character or a possible stop string is
    incomplete, and then in the delta of the token that completes it. `prompt_tail_ids`: the prompt's last ids (four are
    looked at). If they end inside a character that the answer completes, the character belongs to the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._piece = tokenizer.pieces.text_piece if skip_special_tokens else tokenizer.pieces.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop_strings)
        prompt_tail = b"".join(map(self._piece, prompt_tail_ids[-_MAX_CHARACTER_BYTES:]))
        self._begun_in_prompt = _unfinished_character(prompt_tail)
        self._at_start = True
        self._drop_first_space = tokenizer.pieces.strips_first_space and not prompt_tail

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; from then on push() returns nothing and the request can be aborted."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is safe to send now, maybe "". Never raises, whatever the id."""
        return self._push(self._piece(token_id))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """The same as the joined texts of a push for each id, at a fifth of the price."""
        return self._push(b"".join(map(self._piece, token_ids)))

    def finish(self) -> str:
        """The answer is over: return what was held back, a cut-off character as one U+FFFD."""
        return self._matcher.push(self._decoder.decode(b"", final=True)) + self._matcher.flush()

    def _push(self, piece: bytes) -> str:
        if not piece:
            return ""
        if self._at_start:
            piece = self._first_piece(piece)
        return self._matcher.push(self._decoder.decode(piece))

    def _first_piece(self, piece: bytes) -> bytes:
        self._at_start = False
        if self._drop_first_space:
            return piece.removeprefix(b" ")
        continues_character = 0x80 <= piece[0] < 0xC0
        return self._begun_in_prompt + piece if continues_character else piece


def _unfinished_character(text: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    unfinished, _ = decoder.getstate()
    return unfinished
