"""The bytes that each token id stands for, whatever kind of tokenizer it belongs to.

A token is not text: a character's bytes may straddle tokens. Once every id is a fixed piece of bytes, decoding is
joining pieces and reading UTF-8, for a whole text and for a stream alike. Knows the `tokenizers` library's decoders.
"""

import json
import re
from collections.abc import Container
from functools import cached_property

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_TEXT = b""


class TokenPieces:
    """`pieces[token_id]` is the id's bytes, b"" for anything that has no text: padding ids, -1, 2**40.

    Pieces are those of a token inside a text; `strips_first_space` says that a text's first space is not its own
    (SentencePiece). Looked up once per id, then remembered. Read-only, so it is shared by all requests of a process.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Container[int], num_token_ids: int) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._num_token_ids = num_token_ids
        kinds = _decoder_kinds(backend)
        self._byte_of_character = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._look_up(token_id)
            # Only real ids are remembered: a client may ask for any number.
            if piece:
                self._cache[token_id] = piece
        return piece

    def text_piece(self, token_id: int) -> bytes:
        """The same, but special tokens have no text."""
        return _NO_TEXT if token_id in self._special_ids else self[token_id]

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether the library drops the space that the first token of a text brings with it."""
        return (
            self._byte_of_character is None
            and self._decode(self._anchor) != self._decode(self._anchor * 2)[len(self._decode(self._anchor)) :]
        )

    @cached_property
    def _anchor(self) -> list[int]:
        """One ordinary token to decode others behind; with a leading space where the vocabulary marks spaces."""
        for marked in (True, False):
            for token_id in range(self._num_token_ids):
                token = self._backend.id_to_token(token_id) or ""
                ordinary = token_id not in self._special_ids and not _BYTE_TOKEN.fullmatch(token)
                if ordinary and self._decode([token_id]).strip() and token.startswith("▁") == marked:
                    return [token_id]
        return []

    def _look_up(self, token_id: int) -> bytes:
        if not isinstance(token_id, int) or not 0 <= token_id < self._num_token_ids:
            return _NO_TEXT
        token = self._backend.id_to_token(token_id)
        if token is None:
            return _NO_TEXT
        if self._byte_of_character is not None:
            return self._byte_level_piece(token, self._byte_of_character)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        behind_anchor = self._decode([*self._anchor, token_id])
        return behind_anchor[len(self._decode(self._anchor)) :].encode()

    @staticmethod
    def _byte_level_piece(token: str, byte_of_character: dict[str, int]) -> bytes:
        try:
            return bytes([byte_of_character[character] for character in token])
        except KeyError:  # an added token that is plain text, such as one with a space
            return token.encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """The types of the decoder and its parts, e.g. {"ByteLevel"} or {"Sequence", "Replace", "ByteFallback", "Fuse"}."""
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    return {decoder["type"], *(part["type"] for part in decoder.get("decoders", []))}


def byte_level_alphabet() -> dict[str, int]:
    """The byte of each of GPT-2's characters: a printable byte is written as itself, the others as 256, 257, ..."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
