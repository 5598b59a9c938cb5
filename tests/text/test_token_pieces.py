"""Pieces joined are the library's text, for kinds of tokenizers other than byte-level ones too."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from server.text.token_pieces import TokenPieces

VOCAB = {"<s>": 0, "the": 1, "▁the": 2, "▁sea": 3, "##s": 4, "<0xE5>": 5, "▁": 6, "é": 7}


def make(decoder: decoders.Decoder | None) -> tuple[tokenizers.Tokenizer, TokenPieces]:
    library = tokenizers.Tokenizer(models.WordLevel(VOCAB, unk_token="<s>"))
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.add_tokens(["a b", "naïve"])
    if decoder is not None:
        library.decoder = decoder
    return library, TokenPieces(library, {0}, 10)


def joined(pieces: TokenPieces, token_ids: list[int]) -> str:
    text = b"".join(map(pieces.text_piece, token_ids)).decode("utf-8", errors="replace")
    return text.removeprefix(" ") if pieces.strips_first_space else text


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.ByteLevel(),
        decoders.Metaspace(),
        decoders.WordPiece(prefix="##", cleanup=False),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    ],
    ids=["none", "ByteLevel", "Metaspace", "WordPiece", "Llama", "Gemma"],
)
@pytest.mark.parametrize("token_ids", [[2, 3], [1, 4, 3], [0, 3, 0, 2], [2, 7, 8, 9, 2], [3], [9], []])
def test_joined_pieces_are_the_librarys_text(decoder: decoders.Decoder | None, token_ids: list[int]) -> None:
    library, pieces = make(decoder)
    assert joined(pieces, token_ids) == library.decode(token_ids, skip_special_tokens=True)


def test_byte_tokens_are_bytes_only_where_the_decoder_says_so() -> None:
    _, with_bytes = make(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    _, without = make(decoders.Fuse())
    assert with_bytes[5] == b"\xe5"
    assert without[5] == b"<0xE5>"


def test_what_has_no_text_is_empty() -> None:
    _, pieces = make(decoders.Fuse())
    assert [pieces[token_id] for token_id in (-1, 10, 2**40)] == [b"", b"", b""]
    assert pieces.text_piece(0) == b""
    assert pieces[0] == b"<s>"


def test_vocabulary_of_special_tokens_only_has_no_text_but_theirs() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    library.add_special_tokens([AddedToken("<s>", special=True)])
    pieces = TokenPieces(library, {0}, 1)
    assert not pieces.strips_first_space
    assert (pieces[0], pieces.text_piece(0)) == (b"<s>", b"")
