"""The engine's idea of the vocabulary must be the tokenizer's."""

import json

import pytest

from server.errors import StartupError
from server.models.vocabulary import Vocabulary, read_vocabulary
from server.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import write_tiny_tokenizer


def test_engine_and_web_workers_agree(tmp_path):
    write_tiny_tokenizer(tmp_path, 300)
    vocabulary, tokenizer = read_vocabulary(tmp_path), Tokenizer.from_folder(tmp_path)
    assert vocabulary.num_token_ids == tokenizer.num_token_ids
    assert set(vocabulary.eos_token_ids) == set(tokenizer.eos_token_ids)


def test_the_generation_config_wins_over_the_model_config(tmp_path):
    write_tiny_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4]}))
    assert read_vocabulary(tmp_path).eos_token_ids == (4, 5)
    (tmp_path / "generation_config.json").unlink()
    assert read_vocabulary(tmp_path).eos_token_ids == (3,)


def test_an_added_token_above_the_vocabulary_counts(tmp_path):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert read_vocabulary(tmp_path) == Vocabulary(10, (9,))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing"):
        read_vocabulary(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        read_vocabulary(tmp_path)
