"""Chat messages to prompt ids: the template's turn markers are control tokens, a user's text never is.

Joins template, control tokens and tokenizer. Does not know HTTP; `messages` is the JSON value of a request.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

from server.errors import InvalidRequest
from server.text.chat_template import ChatTemplate, Message, check_messages
from server.text.control_tokens import ControlTokens, Piece, strings_in, unused_character, with_strings
from server.text.tokenizer import Tokenizer


class ChatPrompt:
    """One per process, beside its tokenizer. Rendering runs in one thread of its own, so that a template which uses up
    its time delays other chats, and nothing else.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.template = ChatTemplate(tokenizer.config.chat_template, tokenizer.config.special_tokens)
        self._tokenizer = tokenizer

    async def encode_async(self, messages: object, add_generation_prompt: bool = True) -> list[int]:
        """`encode`, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.encode, messages, add_generation_prompt)

    def encode(self, messages: object, add_generation_prompt: bool = True) -> list[int]:
        """The prompt's ids: those of transformers' apply_chat_template, except that names of control tokens in messages
        are ordinary text.

        Raises InvalidRequest: messages that are wrong, that the template refuses, or that are no text.
        """
        checked = check_messages(messages)
        if not any(self._names_for(message).found_in(text) for message in checked for text in strings_in(message)):
            return self._encode_rendered(self.template.render(checked, add_generation_prompt))
        mark = unused_character(text for message in checked for text in strings_in(message))
        marked = [with_strings(message, partial(self._names_for(message).mark, mark=mark)) for message in checked]
        return self._encode_pieces(self._control_names.split(self.template.render(marked, add_generation_prompt), mark))

    def _names_for(self, message: Message) -> ControlTokens:
        """What a model itself writes into its turns beside text ("</think>", "<tool_call>") stays as it is in them."""
        return self._special_names if message["role"] == "assistant" else self._control_names

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        token_ids: list[int] = []
        for piece in pieces:
            encode = self._tokenizer.encode_plain if piece.plain else self._encode_rendered
            piece_ids = _encode_behind_newline(encode, piece.text) if token_ids else encode(piece.text)
            if piece.plain and not self._added_ids.isdisjoint(piece_ids):
                raise InvalidRequest(f"this model cannot read {piece.text!r} as plain text", "messages")
            token_ids += piece_ids
        return token_ids

    def _encode_rendered(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _special_names(self) -> ControlTokens:
        added = self._tokenizer.added_tokens.items()
        return ControlTokens(name for name, token_id in added if token_id in self._tokenizer.special_ids)

    @cached_property
    def _control_names(self) -> ControlTokens:
        """Special tokens, and the others that the template writes by itself, such as "<tool_response>"."""
        added, written = self._tokenizer.added_tokens.items(), self.template.literal_text
        special_ids = self._tokenizer.special_ids
        return ControlTokens(
            name for name, token_id in added if token_id in special_ids or (name in written and not name.isspace())
        )

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens.values())

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="chat-template")


def _encode_behind_newline(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of text that goes on: SentencePiece puts a space before the start of a text, so it must not be one."""
    newline_ids = encode("\n")
    token_ids = encode("\n" + text)
    return token_ids[len(newline_ids) :] if token_ids[: len(newline_ids)] == newline_ids else encode(text)
