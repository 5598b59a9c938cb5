"""The tokenizer of the tiny models does what its users rely on."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tiny_tokenizer import MIN_VOCAB_SIZE, SPECIAL_TOKENS, write_tiny_tokenizer


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 300, 320, 4096])
def test_every_text_survives_a_round_trip_with_ids_inside_the_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    write_tiny_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "the sea was\n客单价 👨‍👩‍👧 ไทย <|im_start|>"
    ids = tokenizer.encode(text).ids
    assert max(ids) < vocab_size
    assert tokenizer.get_vocab_size() <= vocab_size
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_common_words_are_one_token(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, 512)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(" the sea").tokens == ["Ġthe", "Ġsea"]


def test_special_ids_agree_with_the_generation_config(tmp_path: Path) -> None:
    ids = write_tiny_tokenizer(tmp_path / "model", 320)
    config = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert set(ids) == set(SPECIAL_TOKENS)
    assert config["eos_token_id"] == [ids["<|im_end|>"], ids["<|endoftext|>"]]
