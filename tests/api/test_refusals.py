"""From exceptions to statuses and bodies, in both families."""

import json

import pytest

from server.api.errors import BodyTooLarge, ModelNotFound, NotJson, refusal_of
from server.errors import EngineDead, InvalidRequest, NotReady, Overloaded, RequestFailed


@pytest.mark.parametrize(
    ("error", "native", "openai"),
    [
        (InvalidRequest("m", "p"), (422, "validation"), (400, "invalid_request_error")),
        (BodyTooLarge("m"), (413, "validation"), (413, "invalid_request_error")),
        (NotJson("m"), (415, "validation"), (415, "invalid_request_error")),
        (ModelNotFound("m"), (404, "validation"), (404, "invalid_request_error")),
        (Overloaded("m", 5), (429, "overloaded"), (429, "rate_limit_error")),
        (NotReady("m"), (503, "healthcheck"), (503, "service_unavailable_error")),
        (EngineDead("m"), (503, "healthcheck"), (503, "service_unavailable_error")),
        (RequestFailed("m"), (424, "generation"), (500, "server_error")),
        (KeyError("secret"), (500, "internal"), (500, "server_error")),
    ],
)
def test_each_kind_has_its_status_and_type(error, native, openai):
    refusal = refusal_of(error, "/generate")
    assert (refusal.status, json.loads(refusal.body)["error_type"]) == native
    refusal = refusal_of(error, "/v1/completions")
    assert (refusal.status, json.loads(refusal.body)["error"]["type"]) == openai
    assert b"secret" not in refusal.body


def test_message_names_the_field_and_the_code():
    error = InvalidRequest("is bad", "top_p", "some_code")
    assert json.loads(refusal_of(error, "/").body)["error"] == "top_p: is bad"
    assert json.loads(refusal_of(error, "/v1/x").body)["error"] == {
        "message": "top_p: is bad",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "some_code",
    }


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [(Overloaded("m", 7), "7"), (Overloaded("m", 999), "120"), (NotReady("m", 0), "1"), (EngineDead("m"), "1")],
)
def test_retry_after_is_between_one_second_and_two_minutes(error, retry_after):
    assert refusal_of(error, "/").headers == {"Retry-After": retry_after}
