"""What is refused before the first byte: too much, too early, too late; with the status and when to come back."""

import concurrent.futures
import json

import pytest

from server.api.errors import MAX_RETRY_AFTER_S
from server.launch.board import StopMode
from tests.api.service import events_of, wait_until

BODIES = [
    ("/generate", {"inputs": "abc"}),
    ("/generate_stream", {"inputs": "abc"}),
    ("/", {"inputs": "abc", "stream": True}),
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/completions", {"prompt": "abc", "stream": True}),
]


def error_type_of(response):
    error = response.json()
    return error["error"]["type"] if isinstance(error["error"], dict) else error["error_type"]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_while_the_model_loads_requests_get_503(start_service, path, body):
    service = start_service(with_engine=False)
    response = service.post(path, body)
    assert response.status_code == 503
    assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER_S
    assert error_type_of(response) == ("service_unavailable_error" if "v1" in path else "healthcheck")


def test_bad_requests_are_refused_as_such_also_while_loading(start_service):
    service = start_service(with_engine=False)
    assert service.post("/generate", {"inputs": ""}).status_code == 422
    assert service.post("/v1/completions", {"prompt": [10**6]}).status_code == 400


def test_draining_service_finishes_what_runs_and_refuses_more(start_service):
    service = start_service(gated=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(service.post, "/generate_stream", {"inputs": "ab", "parameters": {"max_new_tokens": 3}})
        service.wait_at_gate()
        service.board.raise_stop(StopMode.DRAIN)
        for path, body in BODIES:
            response = service.post(path, body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
        assert service.client.get("/health").json()["status"] == "draining"
        service.board.stop = StopMode.NONE  # the engine's own drain is tested with the engine
        service.open_gate()
        assert json.loads(events_of(running.result().text)[-1])["generated_text"] == "aba"


def test_beyond_the_queue_requests_get_429_and_the_queue_goes_on(start_service):
    service = start_service(gated=True, engine__max_num_requests=2, engine__max_waiting_requests=1)
    bodies = [{"inputs": letter, "parameters": {"max_new_tokens": 2}} for letter in "abc"]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        admitted = []
        for number, body in enumerate(bodies, start=1):
            admitted.append(pool.submit(service.post, "/generate", body))
            wait_until(lambda number=number: len(service.app.state.serving.engine._live) == number)
        for path, body in BODIES:
            response = service.post(path, body)
            assert response.status_code == 429
            assert 1 <= int(response.headers["retry-after"]) <= MAX_RETRY_AFTER_S
            assert error_type_of(response) == ("rate_limit_error" if "v1" in path else "overloaded")
        service.open_gate()
        assert [future.result().json()["generated_text"] for future in admitted] == ["aa", "bb", "cc"]
    service.check_idle()


def test_call_whose_prompts_do_not_all_fit_is_refused_whole(start_service):
    service = start_service(engine__max_num_requests=2, engine__max_waiting_requests=1)
    assert service.post("/v1/completions", {"prompt": ["a", "b", "c", "d"]}).status_code == 429
    service.check_idle()
    assert service.post("/v1/completions", {"prompt": ["a", "b", "c"]}).status_code == 200


def test_body_above_the_limit_is_413_announced_or_not(start_service):
    service = start_service(server__max_body_bytes=1000)
    body = json.dumps({"inputs": "a" * 1000}).encode()
    headers = {"content-type": "application/json"}
    announced = service.client.post("/generate", content=body, headers=headers)
    in_pieces = service.client.post("/v1/completions", content=iter([body[:600], body[600:]]), headers=headers)
    for response in (announced, in_pieces):
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
        assert "1000 bytes" in response.text
    fitting = json.dumps({"inputs": "a", "pad": "b" * 900, "parameters": {"max_new_tokens": 1}}).encode()
    for content in (fitting, iter([fitting])):
        assert service.client.post("/generate", content=content, headers=headers).json() == {"generated_text": "a"}


def test_plain_request_id_is_echoed_and_others_replaced(service):
    def id_of(given=None):
        headers = {} if given is None else {"x-request-id": given}
        return service.client.get("/info", headers=headers).headers["x-request-id"]

    assert id_of("abc-1.2:3_4") == "abc-1.2:3_4"
    for given in (None, "", "a" * 129, "a b", "<script>"):
        assert id_of(given) not in ("", given)
        assert len(id_of(given)) == 16
    assert id_of() != id_of()
    assert service.client.get("/nowhere", headers={"x-request-id": "lost"}).headers["x-request-id"] == "lost"


def test_fault_of_ours_is_a_500_without_its_text(start_service, monkeypatch, caplog):
    service = start_service()
    monkeypatch.setattr("server.api.native.check_token_ids", lambda *_: 1 / 0)
    for path, shape in (("/detokenize", str), ("/v1/completions", dict)):
        monkeypatch.setattr("server.api.completions.encode_prompt", lambda *_, **__: 1 / 0)
        response = service.post(path, {"ids": [1], "prompt": "a"})
        assert response.status_code == 500
        assert isinstance(response.json()["error"], shape)
        assert "division" not in response.text
    assert any(record.exc_info for record in caplog.records)


def test_fault_of_ours_inside_a_stream_ends_it_with_an_error_event(start_service, monkeypatch, caplog):
    service = start_service()
    monkeypatch.setattr("server.api.native._token", lambda _event: 1 / 0)
    (event,) = events_of(service.post("/generate_stream", {"inputs": "a"}).text)
    assert json.loads(event) == {"error": "internal error", "error_type": "internal"}
    assert any(record.exc_info for record in caplog.records)
    service.check_idle()


def test_engine_that_refuses_or_is_full_keeps_its_reason():
    from server.api import generation
    from server.engine.messages import TokenOutput
    from server.errors import InvalidRequest, Overloaded, RequestFailed

    outcomes = {"refused": InvalidRequest, "overloaded": Overloaded, "error": RequestFailed}
    for reason, error_class in outcomes.items():
        error = generation._failure_of(TokenOutput(1, -1, 0.0, reason, "why"))
        assert type(error) is error_class
        assert str(error) == "why"
