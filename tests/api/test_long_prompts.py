"""Prompts of any length delay nobody else: /health and other prompts are answered while a huge one is tokenised."""

import threading

import pytest

from server.text.tokenizer import Tokenizer
from tests.api.service import MAX_MODEL_LEN, wait_until

HUGE = "the sea " * 130_000  # 1 MB
ROUTES = [
    ("/generate", {"inputs": HUGE}, 422),
    ("/generate", {"inputs": HUGE, "parameters": {"truncate": 8, "max_new_tokens": 2}}, 200),
    ("/v1/completions", {"prompt": HUGE}, 400),
    ("/tokenize", {"inputs": HUGE}, 200),
]


@pytest.fixture
def gate(monkeypatch):
    """Tokenising of a huge text begins, and ends when the gate is opened."""
    is_open, begun = threading.Event(), threading.Event()

    def held(encode):
        def wait_and_encode(tokenizer, text, *args):
            if len(text) == len(HUGE):
                begun.set()
                assert is_open.wait(20)
            return encode(tokenizer, text, *args)

        return wait_and_encode

    for name in ("encode", "encode_with_offsets"):
        monkeypatch.setattr(Tokenizer, name, held(getattr(Tokenizer, name)))
    is_open.begun = begun
    yield is_open
    is_open.set()


@pytest.mark.parametrize(("path", "body", "status"), ROUTES)
def test_others_are_answered_while_a_huge_prompt_is_tokenised(service, gate, path, body, status):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(service.post(path, body).status_code)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert gate.begun.wait(10)
    assert service.client.get("/health").status_code == 200
    for prompt in ("short", "the sea " * 400):  # the second is tokenised in a thread too
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 2, "truncate": MAX_MODEL_LEN - 2}}
        assert service.post("/generate", body).status_code == 200
    assert not answers
    gate.set()
    wait_until(lambda: len(answers) == 3)
    assert answers == [status] * 3
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 20 * MAX_MODEL_LEN])
def test_a_prompt_that_is_too_long_is_refused_with_its_length(service, num_tokens):
    native = service.post("/generate", {"inputs": "x" * num_tokens})
    assert native.status_code == 422
    assert f"the prompt has {num_tokens} tokens" in native.json()["error"]
    for prompt in ("x" * num_tokens, [5] * num_tokens, ["a", "x" * num_tokens], [[5], [5] * num_tokens]):
        openai = service.post("/v1/completions", {"prompt": prompt})
        assert openai.status_code == 400
        error = openai.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"you requested {num_tokens} tokens" in error["message"]
