"""Every malformed request gets its 4xx with the field named, in strict JSON, and the engine is untouched.

The `service` fixture checks after each test that a plain request still gets the same answer and no block is lost.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from server.api.completions_schema import CompletionBody
from server.api.native_schema import DetokenizeBody, GenerateParameters
from tests.api.service import MAX_MODEL_LEN, VOCAB_SIZE


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def refused(service, path, body, status=None):
    """The error of a refusal, parsed strictly. `body` may be raw bytes."""
    num_steps = service.runner.num_steps
    headers = {"content-type": "application/json"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = service.client.post(path, content=content, headers=headers)
    assert response.status_code == (status or (400 if path.startswith("/v1") else 422)), response.text
    assert response.headers["content-type"] == "application/json"
    error = json.loads(response.content.decode(), parse_constant=refuse_constant)
    assert service.runner.num_steps == num_steps
    return error


def refused_parameter(service, name, value, path="/generate"):
    error = refused(service, path, {"inputs": "abc", "parameters": {"max_new_tokens": 2, name: value}})
    assert error["error_type"] == "validation"
    assert error["error"].startswith(f"parameters.{name}"), error
    return error["error"]


def refused_field(service, name, value, **fields):
    body = {"prompt": "abc", "max_tokens": 2, **fields, name: value}
    error = refused(service, "/v1/completions", body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(name), error
    assert error["message"].startswith(error["param"])
    return error


NOT_INTEGERS = [1.5, 1.0, True, "1", [1], {}]
NOT_NUMBERS = [True, "0.5", "NaN", [0.5], {}, float("nan"), float("inf"), -float("inf"), 10**400]


def test_max_new_tokens(service):
    for value in [0, -1, 10**9, 10**30, *NOT_INTEGERS]:
        refused_parameter(service, "max_new_tokens", value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "typical_p", "repetition_penalty", "frequency_penalty"])
def test_numbers_that_are_none(service, name):
    for value in NOT_NUMBERS:
        refused_parameter(service, name, value)


@pytest.mark.parametrize("name", ["top_k", "seed", "truncate", "top_n_tokens", "best_of"])
def test_integers_that_are_none(service, name):
    for value in NOT_INTEGERS:
        refused_parameter(service, name, value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, -1e-9, 100.1, 1e300]),
        ("top_k", [0, -1, -(2**63)]),
        ("top_p", [0, -0.1, 1.0001]),
        ("typical_p", [0, 1.1]),
        ("repetition_penalty", [0, -1, -1e-38]),
        ("frequency_penalty", [-2.01, 2.01, 1e9]),
        ("seed", [-1, 2**64, 10**40]),
        ("truncate", [0, -5]),
        ("top_n_tokens", [-1, 6]),
        ("best_of", [0, -1]),
        ("do_sample", ["yes", 1, 0]),
        ("details", ["true", 1]),
        ("return_full_text", [2]),
        ("watermark", [1]),
        ("stop", ["", [""], ["a"] * 5, [1], 1, {}, [None], "x" * 2000]),
        ("adapter_id", [1]),
    ],
)
def test_values_out_of_range(service, name, values):
    for value in values:
        refused_parameter(service, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.9),
        ("frequency_penalty", 0.5),
        ("decoder_input_details", True),
        ("top_n_tokens", 3),
        ("best_of", 2),
        ("watermark", True),
        ("adapter_id", "lora"),
        ("grammar", {"type": "json", "value": {}}),
    ],
)
def test_wishes_that_cannot_be_met_yet_are_not_dropped(service, name, value):
    for path in ("/generate", "/", "/generate_stream"):
        message = refused_parameter(service, name, value, path)
        assert "not" in message


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_inputs(service, path):
    for inputs in ("", None, 1, ["a"], {}, True):
        assert refused(service, path, {"inputs": inputs})["error"].startswith("inputs: ")


def test_inputs_are_required(service):
    assert refused(service, "/generate", {"parameters": {}})["error"].startswith("inputs: ")
    assert refused(service, "/v1/completions", {})["error"]["param"] == "prompt"


def test_prompts(service):
    prompts = [
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        [[1], []],
        None,
        5,
        True,
        {},
        [None],
        ["a", [1]],
        [[1], "a"],
        [1, "a"],
        ["a", 1],
        [VOCAB_SIZE],
        [200000],
        [-1],
        [1.5],
        [True],
        [1, 2**70],
        [[0, VOCAB_SIZE]],
        [[1], [1.5]],
        [[True]],
        [[["a"]]],
        ["a"] * 257,
    ]
    for prompt in prompts:
        refused_field(service, "prompt", prompt)


def test_prompts_that_look_wrong_but_are_not(service):
    for prompt in (" ", "<|im_end|>", [0], [VOCAB_SIZE - 1], "\x00"):
        response = service.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 200, prompt


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, *NOT_INTEGERS]),
        ("temperature", [-1, 2.01, 1e300, *NOT_NUMBERS]),
        ("top_p", [-0.1, 1.0001, *NOT_NUMBERS]),
        ("top_k", [-2, *NOT_INTEGERS]),
        ("min_p", [-0.1, 1.1, *NOT_NUMBERS]),
        ("repetition_penalty", [0, -1, *NOT_NUMBERS]),
        ("presence_penalty", [-2.01, 2.01, 1e9, 0.5, *NOT_NUMBERS]),
        ("frequency_penalty", [-2.01, 2.01, 1e9, -2, *NOT_NUMBERS]),
        ("n", [0, -1, 2, 10**9, *NOT_INTEGERS]),
        ("best_of", [0, -1, 2, 10**6, *NOT_INTEGERS]),
        ("logprobs", [21, -1, VOCAB_SIZE + 1, 10**6, 5, 0, *NOT_INTEGERS]),
        ("echo", [True, 1, "no"]),
        ("suffix", ["x", 1]),
        ("logit_bias", [{str(VOCAB_SIZE): 1}, {"-1": 1}, {"abc": 1}, {"1": 101}, {"1": "a"}, [1], 5]),
        ("stop", ["", ["a"] * 5, [1], {}]),
        ("stop_token_ids", [[VOCAB_SIZE], [VOCAB_SIZE + 1], [-1], [2**31], ["abc"], [1e3], [True], 5, "5", [1] * 129]),
        ("seed", [2**64, -(2**63) - 1, *NOT_INTEGERS]),
        ("min_tokens", [-1, 3, *NOT_INTEGERS]),
        ("priority", [2**31, *NOT_INTEGERS]),
        ("ignore_eos", [1, "true"]),
        ("stream", [1, "true"]),
        ("stream_options", [True, {"include_usage": 1}]),
        ("model", [1, ["echo"]]),
    ],
)
def test_completion_fields(service, name, values):
    for value in values:
        refused_field(service, name, value)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionBody, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
        (CompletionBody, {"prompt": "a", "stop": [1] * 1000}),
        (DetokenizeBody, {"ids": ["x"] * 1000}),
        (GenerateParameters, {"stop": [1] * 1000}),
    ],
)
def test_validation_stops_at_the_first_wrong_item_of_a_list(model, fields):
    """An error for each of a million items held the event loop for nine seconds."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate_json(json.dumps(fields))
    assert raised.value.error_count() == 1


def test_wrong_values_of_a_million_logit_biases_cost_nothing(service):
    refused_field(service, "logit_bias", {str(token_id): "x" for token_id in range(1000)})
    CompletionBody.model_validate_json(json.dumps({"prompt": "a", "logit_bias": dict.fromkeys("abc", "x")}))


def test_half_of_a_surrogate_pair_is_not_searched_for_in_a_huge_body(service):
    body = b'{"x": [' + b"[1]," * 100_000 + b'1], "inputs": "\\ud800"}'
    assert refused(service, "/generate", body)["error"].startswith("body: ")


def test_a_text_whose_tokens_the_model_has_not_is_refused(start_service):
    """The engine would die of the id, and its successors of the resubmission."""
    service = start_service()
    serving = service.app.state.serving
    low, high = service.encode("a")[0], service.encode("z")[0]
    facts = replace(serving.facts, vocab_size=(low + high) // 2)
    service.app.state.serving = replace(serving, facts=facts)
    for path, field in (("/generate", "inputs"), ("/generate_stream", "inputs"), ("/v1/completions", "prompt")):
        assert f"{field}: the text holds token {high}" in json.dumps(refused(service, path, {field: "aza"}))


@pytest.mark.parametrize("min_tokens", [0, 1])
def test_stop_ids_out_of_range_are_refused_with_and_without_min_tokens(service, min_tokens):
    refused_field(service, "stop_token_ids", [VOCAB_SIZE], min_tokens=min_tokens)


NO_OBJECTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"{'inputs': 1}",
    b'{"inputs": "a",}',
    b"[" * 5000,
    b'{"inputs": ' + b"9" * 5000 + b"}",
    b"\xef\xbb\xbf{}",
    b'{"inputs": "\xed\xa0\x80"}',
    b'{"inputs": NaN',
]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/v1/completions", "/tokenize"])
def test_bodies_that_are_no_object(service, path):
    for body in NO_OBJECTS:
        error = refused(service, path, body)["error"]
        message = error["message"] if isinstance(error, dict) else error
        assert message.startswith(("body: ", "inputs: ")), message


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", rb'{"inputs": "a\ud800"}', "inputs"),
        ("/generate", rb'{"inputs": "a", "parameters": {"stop": ["x", "\udc00"]}}', "parameters.stop.1"),
        ("/v1/completions", rb'{"prompt": ["a", "\ud83d"]}', "prompt.1"),
        ("/generate", rb'{"inputs": "a", "\ud800": "\ud800"}', "?"),
    ],
)
def test_lone_surrogates_are_named(service, path, body, field):
    error = refused(service, path, body)["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert message.startswith(f"{field}: ")
    assert "surrogate" in message


def test_raw_nan_and_infinity_are_not_echoed(service):
    for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        error = refused(service, "/generate", b'{"inputs": "a", "parameters": {"top_p": ' + value + b"}}")
        assert error["error"].startswith("parameters.top_p: ")


def prompt_of(num_tokens):
    return "x" * num_tokens


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
@pytest.mark.parametrize("max_tokens", [None, 1, MAX_MODEL_LEN])
def test_prompt_above_the_context_tells_limit_and_length(service, num_tokens, max_tokens):
    for path in ("/generate", "/generate_stream", "/"):
        body = {"inputs": prompt_of(num_tokens), "parameters": {"max_new_tokens": max_tokens}}
        message = refused(service, path, body)["error"]
        assert message.startswith("inputs: ")
        assert str(num_tokens) in message
        assert str(MAX_MODEL_LEN) in message
        assert str(max_tokens) in message
    body = {"prompt": prompt_of(num_tokens), "max_tokens": max_tokens}
    error = refused(service, "/v1/completions", body)["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert f"{num_tokens} tokens" in error["message"]
    assert f"{MAX_MODEL_LEN} tokens" in error["message"]
    assert f"max_tokens {max_tokens or 16}" in error["message"]


def test_prompt_just_below_the_context_has_room_for_one(service):
    body = {"inputs": prompt_of(MAX_MODEL_LEN - 1), "parameters": {"max_new_tokens": 1}}
    assert service.post("/generate", body).json() == {"generated_text": "x"}
    body["parameters"]["max_new_tokens"] = 2
    message = refused(service, "/generate", body)["error"]
    assert message.startswith("parameters.max_new_tokens: ")
    assert f"{MAX_MODEL_LEN - 1}" in message
    answer = service.post("/v1/completions", {"prompt": prompt_of(MAX_MODEL_LEN - 1)}).json()
    assert answer["choices"][0]["text"] == "x"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/generate", 405),
        ("DELETE", "/", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/generate/", 404),
        ("GET", "/v1", 404),
    ],
)
def test_unknown_routes_and_methods_have_the_family_shape(service, method, path, status):
    response = service.client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert isinstance(error, dict) == path.startswith("/v1")
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_other_content_types_are_refused(service, content_type):
    response = service.client.post("/generate", content=b'{"inputs": "a"}', headers={"content-type": content_type})
    assert response.status_code == 415
    assert "content-type" in response.json()["error"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json; charset=utf-8"}])
def test_json_content_types_are_taken(service, headers):
    body = b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}'
    assert service.client.post("/generate", content=body, headers=headers).json() == {"generated_text": "a"}


def test_detokenize_refuses_ids_that_do_not_exist(service):
    for ids in ([VOCAB_SIZE], [-1], [2**70], ["a"], [True], 5, None):
        assert refused(service, "/detokenize", {"ids": ids})["error"].startswith("ids")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NATIVE_NAMES = st.sampled_from(list(GenerateParameters.model_fields))
COMPLETION_NAMES = st.sampled_from([name for name in CompletionBody.model_fields if name != "stream"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parameters=st.dictionaries(NATIVE_NAMES, JSON_VALUES, max_size=3), inputs=JSON_VALUES)
def test_no_native_body_makes_a_server_error(service, parameters, inputs):
    body = json.dumps({"inputs": inputs, "parameters": {"max_new_tokens": 2, **parameters}})
    response = service.client.post("/generate", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 422), response.text
    json.loads(response.content.decode(), parse_constant=refuse_constant)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(COMPLETION_NAMES, JSON_VALUES, max_size=3), is_streamed=st.booleans())
def test_no_completion_body_makes_a_server_error(service, fields, is_streamed):
    body = json.dumps({"prompt": "ab", "max_tokens": 2, "stream": is_streamed, **fields})
    response = service.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
