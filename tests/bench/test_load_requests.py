"""Prompts have the wished length, are drawn from ordinary tokens, and no two are alike beyond the shared prefix."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load_requests import (
    RequestMaker,
    Shape,
    longest_run,
    ordinary_token_ids,
    parse_numbers,
    parse_token_ids,
)
from server.errors import StartupError
from tests.tiny_tokenizer import write_tiny_tokenizer


def prompts_of(shape: Shape, count: int, seed: int = 1, is_stream: bool = False) -> list[list[int]]:
    maker = RequestMaker(shape, range(10, 1000), "", (seed,))
    return [json.loads(maker.next_body(is_stream))["prompt"] for _ in range(count)]


def test_a_body_wants_exactly_the_tokens_and_names_the_model() -> None:
    body = json.loads(RequestMaker(Shape(3, 7), range(10, 11), "m", (1,)).next_body(is_stream=True))
    assert body == {
        "prompt": [10, 10, 10],
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "model": "m",
        "stream_options": {"include_usage": True},
    }


def test_prompts_differ_and_come_again_with_the_same_seed_only() -> None:
    prompts = prompts_of(Shape(16, 1), 50)
    assert all(len(prompt) == 16 and set(prompt) <= set(range(10, 1000)) for prompt in prompts)
    assert len(set(map(tuple, prompts))) == 50
    assert prompts_of(Shape(16, 1), 50) == prompts
    assert not {tuple(prompt) for prompt in prompts_of(Shape(16, 1), 50, seed=2)} & set(map(tuple, prompts))


def test_a_shared_prefix_is_the_same_for_all_seeds() -> None:
    prompts = prompts_of(Shape(40, 1, num_shared=32), 3) + prompts_of(Shape(40, 1, num_shared=32), 3, seed=9)
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 6
    with pytest.raises(StartupError, match="--shared-prefix 40: must be less than the 40"):
        Shape(40, 1, num_shared=40)


def test_a_batch_is_a_list_of_prompts() -> None:
    shape = Shape(5, 7, batch=3)
    [prompts] = prompts_of(shape, 1)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert shape.expected_tokens == 21


def test_control_tokens_are_not_drawn(tmp_path: Path) -> None:
    control_ids = write_tiny_tokenizer(tmp_path, 300)
    (tmp_path / "config.json").write_text('{"vocab_size": 320}')
    assert ordinary_token_ids(tmp_path) == range(min(control_ids.values()))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match=r"name some: --token-ids 300:4000"):
        ordinary_token_ids(tmp_path)


@given(st.integers(1, 50), st.sets(st.integers(0, 60)))
def test_the_longest_run_holds_no_excluded_id(vocab_size: int, excluded: set[int]) -> None:
    run = longest_run(vocab_size, excluded)
    assert run.stop <= vocab_size
    assert not excluded & set(run)
    allowed = set(range(vocab_size)) - excluded
    assert not any(set(range(begin, begin + len(run) + 1)) <= allowed for begin in range(vocab_size))


@pytest.mark.parametrize("text", ["", "5", "5:5", "a:b", "-1:5"])
def test_ranges_without_ids_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="LOW:HIGH is expected"):
        parse_token_ids(text)
    assert parse_token_ids("1:5") == range(1, 5)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0.5", "nan"])
def test_numbers_without_sense_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"--users .*numbers of at least 1"):
        parse_numbers("--users", text, 1)
    assert parse_numbers("--users", "1,32", 1) == [1, 32]
