"""/v1/completions and /v1/models: what they answer."""

import json

import pytest

from tests.api.service import MAX_MODEL_LEN, events_of


def complete(service, prompt, **fields):
    response = service.post("/v1/completions", {"model": "echo", "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response


def chunks(service, prompt, **fields):
    events = events_of(complete(service, prompt, stream=True, **fields).text)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_completion_has_text_reason_and_usage(service):
    answer = complete(service, "abc", max_tokens=5).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "echo"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 8


def test_default_is_sixteen_tokens(service):
    assert complete(service, "a").json()["choices"][0]["text"] == "a" * 16


def test_max_tokens_above_the_context_is_clamped(service):
    for wish in (MAX_MODEL_LEN, 10**30):
        assert complete(service, "abcd", max_tokens=wish).json()["usage"]["total_tokens"] == MAX_MODEL_LEN


def test_prompt_may_be_ids_or_lists(service):
    ids = service.encode("xyz")
    for prompt in (ids, [ids], ["xyz"]):
        assert complete(service, prompt, max_tokens=3).json()["choices"][0]["text"] == "xyz"


def test_each_prompt_of_a_list_has_its_choice(service):
    answer = complete(service, ["ab", "xyz", "q"], max_tokens=3).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "aba"), (1, "xyz"), (2, "qqq")]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 9
    texts, reasons = ["", "", ""], [[], [], []]
    for chunk in chunks(service, [service.encode(text) for text in ("ab", "xyz", "q<|im_end|>")], max_tokens=3):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["aba", "xyz", "q"]
    assert reasons == [[None, None, "length"], [None, None, "length"], [None, "stop"]]


def test_stream_ends_with_reason_usage_and_done(service):
    received = chunks(service, "abc", max_tokens=3, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["text"] for chunk in received[:-1]] == ["a", "b", "c"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in received[:-1]] == [None, None, "length"]
    assert all(chunk["usage"] is None for chunk in received[:-1])
    assert received[-1]["choices"] == []
    assert received[-1]["usage"]["total_tokens"] == 6
    assert len({chunk["id"] for chunk in received}) == 1


def test_usage_is_absent_unless_asked_for(service):
    assert all("usage" not in chunk for chunk in chunks(service, "abc", max_tokens=2))


def test_continuous_usage_counts_up(service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = chunks(service, "abc", max_tokens=2, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in received] == [1, 2, 2]


def test_ignore_eos_goes_on(service):
    assert complete(service, "a<|im_end|>").json()["choices"][0] == {
        "index": 0,
        "text": "a",
        "logprobs": None,
        "finish_reason": "stop",
    }
    answer = complete(service, "a<|im_end|>", ignore_eos=True, max_tokens=6).json()
    assert answer["choices"][0]["text"] == "aaa"
    assert answer["usage"]["completion_tokens"] == 6


def test_stop_token_ids_and_stop_strings_end_the_text(service):
    stop_id = service.encode("c")
    for fields in ({"stop_token_ids": stop_id}, {"stop": "c"}, {"stop": ["zz", "c"]}):
        answer = complete(service, "abcd", max_tokens=9, **fields).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == ("ab", "stop")


def test_second_identical_prompt_reports_cached_tokens(service):
    prompt = "cache me if you can, " * 4
    first, second = (complete(service, prompt, max_tokens=2).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_extreme_but_legal_sampling_is_served(service):
    for fields in (
        {"temperature": 1e-300},
        {"temperature": -0.0},
        {"temperature": 2, "seed": -(2**63)},
        {"top_p": 0},
        {"top_p": 1e-9, "top_k": 10**30},
        {"top_k": -1, "min_p": 1},
        {"repetition_penalty": 1e38},
        {"repetition_penalty": 1e-38},
        {"priority": -5, "min_tokens": 2, "seed": 2**64 - 1},
        {"n": 1, "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "presence_penalty": 0},
    ):
        assert complete(service, "abc", max_tokens=3, **fields).json()["choices"][0]["text"] == "abc", fields


def test_failing_stream_ends_with_an_error_event_and_without_done(service):
    service.runner.broken_ids = set(service.encode("!"))
    events = events_of(complete(service, "ab!", max_tokens=9, stream=True).text)
    assert [json.loads(event)["choices"][0]["text"] for event in events[:-1]] == ["a", "b"]
    assert json.loads(events[-1])["error"]["type"] == "server_error"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_failing_prompt_ends_its_call_and_no_other(service, is_streamed):
    service.runner.broken_ids = set(service.encode("!"))
    body = {"prompt": ["ab!", "x", "y"], "max_tokens": 400, "stream": is_streamed}
    response = service.post("/v1/completions", body)
    if is_streamed:
        assert "error" in json.loads(events_of(response.text)[-1])
    else:
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
    service.check_idle()


def test_models_lists_the_served_one(service):
    listed = service.client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "echo"
    assert model["root"] == "org/echo"
    assert model["max_model_len"] == MAX_MODEL_LEN
    for name in ("echo", "org/echo"):
        assert service.client.get(f"/v1/models/{name}").json()["id"] == "echo"
        assert service.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}).status_code == 200


def test_other_models_are_not_found(service):
    for response in (
        service.client.get("/v1/models/gpt-4"),
        service.post("/v1/completions", {"model": "gpt-4", "prompt": "a"}),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert response.json()["error"]["param"] == "model"
