"""What a folder says about its text is found wherever the published checkpoints put it."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import StartupError
from server.text.config import read_text_config


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def test_folder_without_files_says_nothing(tmp_path: Path) -> None:
    config = read_text_config(tmp_path)
    assert (config.special_tokens, config.add_bos_token, config.add_eos_token) == ({}, None, None)
    assert config.chat_template is None


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    write(tmp_path, {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None})
    assert read_text_config(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "old"})
    assert read_text_config(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new é")
    assert read_text_config(tmp_path).chat_template == "new é"


def test_default_is_taken_of_several_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, {"chat_template": named})
    assert read_text_config(tmp_path).chat_template == "plain"
    write(tmp_path, {"chat_template": named[:1]})
    assert read_text_config(tmp_path).chat_template is None


@pytest.mark.parametrize("content", ["{", '{"bos_token": 7}', '{"chat_template": {}}', "[]"])
def test_unreadable_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer_config\.json"):
        read_text_config(tmp_path)


def test_unreadable_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"cannot read .*chat_template\.jinja"):
        read_text_config(tmp_path)


def test_config_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").mkdir()
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer_config\.json"):
        read_text_config(tmp_path)
