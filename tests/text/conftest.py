"""The tokenizers of the text tests, loaded once: the real Qwen2 vocabulary, a tiny one, and a SentencePiece kind."""

from pathlib import Path

import pytest
import tokenizers

from server.text.tokenizer import Tokenizer
from tests.text.qwen2_vocabulary import qwen2_folder
from tests.text.sentencepiece_tokenizer import write_sentencepiece_tokenizer
from tests.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def qwen2() -> Tokenizer:
    return Tokenizer.from_folder(qwen2_folder())


@pytest.fixture(scope="session")
def qwen2_library() -> tokenizers.Tokenizer:
    """The library's own object on the same file, to judge ours."""
    return tokenizers.Tokenizer.from_file(str(qwen2_folder() / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder, 512)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    write_sentencepiece_tokenizer(folder)
    return Tokenizer.from_folder(folder)
