"""The native routes: what they answer."""

import json
import math

import pytest

from server.api.native_schema import GenerateParameters
from tests.api.service import MAX_MODEL_LEN, events_of


def generate(service, inputs, path="/generate", **parameters):
    response = service.post(path, {"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response


def stream(service, inputs, path="/generate_stream", **parameters):
    response = generate(service, inputs, path, **parameters)
    return [json.loads(event) for event in events_of(response.text)]


def test_generate_answers_with_the_text(service):
    assert generate(service, "ahoy ", max_new_tokens=7).json() == {"generated_text": "ahoy ah"}


def test_without_a_limit_the_context_is_filled(service):
    answer = generate(service, "xyzw", details=True).json()
    assert answer["details"]["generated_tokens"] == MAX_MODEL_LEN - 4
    assert answer["details"]["finish_reason"] == "length"


def test_absent_and_null_parameters_are_defaults(service):
    nulls = dict.fromkeys(GenerateParameters.model_fields)
    bodies = [{"inputs": "abc"}, {"inputs": "abc", "parameters": None}, {"inputs": "abc", "parameters": nulls}]
    texts = {service.post("/generate", body).json()["generated_text"] for body in bodies}
    assert len(texts) == 1


def test_unknown_keys_are_ignored(service):
    body = {"inputs": "abc", "options": {"wait": 1}, "parameters": {"max_new_tokens": 3, "mood": "good"}}
    assert service.post("/generate", body).json() == {"generated_text": "abc"}


def test_details_name_every_token(service):
    answer = generate(service, "abc", max_new_tokens=3, details=True).json()
    assert answer["details"]["finish_reason"] == "length"
    assert answer["details"]["prefill"] == []
    assert answer["details"]["seed"] is None
    ids = service.encode("abc")
    assert answer["details"]["tokens"] == [
        {"id": token_id, "text": text, "logprob": -0.5, "special": False}
        for token_id, text in zip(ids, "abc", strict=True)
    ]


def test_end_of_text_token_is_counted_but_has_no_text(service):
    answer = generate(service, "abc<|im_end|>", details=True).json()
    assert answer["generated_text"] == "abc"
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["generated_tokens"] == 4
    assert answer["details"]["tokens"][-1]["special"]


@pytest.mark.parametrize("text", ["客单价 😀 ไทย 한국 🇫🇷", "é \x00 \u202e", "👨‍👩‍👧‍👦"])
def test_stream_equals_whole_answer_at_every_length(service, text):
    num_tokens = len(service.encode(text))
    for length in range(1, num_tokens + 1):
        whole = generate(service, text, max_new_tokens=length).json()["generated_text"]
        events = stream(service, text, max_new_tokens=length)
        assert "".join(event["token"]["text"] for event in events) == whole == events[-1]["generated_text"]
        assert [event["index"] for event in events] == list(range(1, length + 1))
    assert whole == text


def test_only_the_last_event_has_text_and_details(service):
    events = stream(service, "abc", max_new_tokens=3)
    assert [event["generated_text"] for event in events] == [None, None, "abc"]
    assert [event["details"] for event in events[:2]] == [None, None]
    assert events[2]["details"] == {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 3}


@pytest.mark.parametrize("stop", ["own fox", ["own fox"], ["zzz", "own fox"], ["own fox", "fox", "x"]])
def test_text_ends_before_the_stop_string_streamed_or_not(service, stop):
    whole = generate(service, "brown fox jumps", stop=stop, details=True).json()
    assert whole["generated_text"] == "br"
    assert whole["details"]["finish_reason"] == "stop_sequence"
    events = stream(service, "brown fox jumps", stop=stop)
    assert events[-1]["generated_text"] == "".join(event["token"]["text"] for event in events) == "br"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"


def test_text_held_for_a_possible_stop_string_is_not_lost(service):
    length = len(service.encode("is it?"))
    for answer in (
        generate(service, "is it?", max_new_tokens=length, stop="?!").json()["generated_text"],
        stream(service, "is it?", max_new_tokens=length, stop="?!")[-1]["generated_text"],
        generate(service, "is it?<|im_end|>", stop=["?!", "t?i"]).json()["generated_text"],
    ):
        assert answer == "is it?"


def test_truncate_keeps_the_right_end(service):
    assert generate(service, "abcdef", truncate=2, max_new_tokens=4).json()["generated_text"] == "efef"
    assert generate(service, "abcdef", truncate=99, max_new_tokens=4).json()["generated_text"] == "abcd"


def test_return_full_text_puts_the_prompt_first(service):
    assert generate(service, "ab", max_new_tokens=1, return_full_text=True).json()["generated_text"] == "aba"
    assert stream(service, "ab", max_new_tokens=1, return_full_text=True)[-1]["generated_text"] == "aba"


def test_compat_route_answers_a_list_with_the_full_text(service):
    assert service.post("/", {"inputs": "ab", "parameters": {"max_new_tokens": 2}}).json() == [
        {"generated_text": "abab"}
    ]
    body = {"inputs": "ab", "parameters": {"max_new_tokens": 2, "return_full_text": False}, "stream": None}
    assert service.post("/", body).json() == [{"generated_text": "ab"}]


def test_compat_route_streams_when_asked(service):
    body = {"inputs": "ab", "parameters": {"max_new_tokens": 2}, "stream": True}
    response = service.post("/", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events_of(response.text)[-1])["generated_text"] == "abab"


def test_sampling_happens_only_when_something_of_it_is_set(service):
    def seed_of(**parameters):
        return generate(service, "abc", max_new_tokens=1, details=True, **parameters).json()["details"]["seed"]

    assert seed_of() is None
    assert seed_of(seed=7) is None
    assert seed_of(do_sample=False) is None
    assert seed_of(temperature=0, top_k=5) is None
    assert seed_of(do_sample=True, seed=7) == 7
    for parameters in ({"do_sample": True}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}):
        seeds = {seed_of(**parameters) for _ in range(3)}
        assert len(seeds) == 3
        assert all(0 <= seed < 2**64 for seed in seeds)


def test_headers_give_times_and_counts(service):
    headers = generate(service, "abcd", max_new_tokens=3).headers
    assert headers["x-prompt-tokens"] == "4"
    assert headers["x-generated-tokens"] == "3"
    assert headers["x-compute-type"] == "cpu+torch"
    for name in ("compute", "total", "validation", "queue", "inference"):
        assert float(headers[f"x-{name}-time"]) >= 0
    assert float(headers["x-time-per-token"]) <= float(headers["x-total-time"])


def test_stream_headers_keep_proxies_from_buffering(service):
    headers = service.post("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}}).headers
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-prompt-tokens"] == "1"


def test_info_tells_the_limits(service):
    info = service.client.get("/info").json()
    assert info["model_id"] == "echo"
    assert info["max_total_tokens"] == MAX_MODEL_LEN
    assert info["max_input_tokens"] == MAX_MODEL_LEN - 1
    assert info["model_dtype"] == "float32"
    assert info["model_device_type"] == "cpu"
    assert info["max_stop_sequences"] == 4
    assert info["model_sha"] is None


def test_tokenize_and_detokenize_are_inverse(service):
    tokens = service.post("/tokenize", {"inputs": "the sea"}).json()
    assert "".join("the sea"[token["start"] : token["stop"]] for token in tokens) == "the sea"
    ids = [token["id"] for token in tokens]
    assert service.post("/detokenize", {"ids": ids}).json() == {"text": "the sea"}
    assert service.post("/detokenize", {"ids": []}).json() == {"text": ""}


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan])
def test_logprob_that_json_does_not_know_is_null(service, logprob):
    service.runner.logprob = logprob
    try:
        details = generate(service, "abc", max_new_tokens=1, details=True).json()["details"]
        events = stream(service, "abc", max_new_tokens=1)
    finally:
        service.runner.logprob = -0.5
    assert details["tokens"][0]["logprob"] is None
    assert events[0]["token"]["logprob"] is None


def test_request_that_fails_alone_says_so(service):
    service.runner.broken_ids = set(service.encode("!"))
    response = service.post("/generate", {"inputs": "ab!", "parameters": {"max_new_tokens": 9}})
    assert response.status_code == 424
    assert response.json()["error_type"] == "generation"


def test_stream_that_fails_ends_with_one_error_event(service):
    service.runner.broken_ids = set(service.encode("!"))
    events = stream(service, "ab!", max_new_tokens=9)
    assert [event.get("token", {}).get("text") for event in events] == ["a", "b", None]
    assert events[2]["error_type"] == "generation"
