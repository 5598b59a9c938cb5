"""Requests before the first engine is ready, when engine.early_requests_wait_s lets them wait for it."""

import concurrent.futures

import httpx
import pytest

from server.launch.board import StopMode
from tests.api.service import ApiService, events_of, wait_until

BODIES = [
    ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 3}}),
    ("/generate_stream", {"inputs": "abc", "parameters": {"max_new_tokens": 3}}),
    ("/", {"inputs": "abc", "parameters": {"max_new_tokens": 3}}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 3, "stream": True}),
]


def num_early(service: ApiService) -> int:
    return service.app.state.serving.engine._num_early


def test_early_requests_wait_for_the_first_engine_and_are_answered(start_service) -> None:
    service = start_service(with_engine=False, engine__early_requests_wait_s=30)
    with concurrent.futures.ThreadPoolExecutor(len(BODIES)) as pool:
        waiting = [pool.submit(service.post, path, body) for path, body in BODIES]
        wait_until(lambda: num_early(service) == len(BODIES))
        assert service.client.get("/health").status_code == 503
        service.start_engine()
        answers = [future.result() for future in waiting]
    assert [answer.status_code for answer in answers] == [200] * len(BODIES)
    assert answers[0].json() == {"generated_text": "abc"}
    assert events_of(answers[4].text)[-1] == "[DONE]"
    assert num_early(service) == 0


def test_more_early_requests_than_may_wait_get_429(start_service) -> None:
    service = start_service(
        with_engine=False, engine__early_requests_wait_s=30, engine__max_waiting_requests=1, server__web_workers=1
    )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.post, *BODIES[0])
        wait_until(lambda: num_early(service) == 1)
        refused = service.post(*BODIES[1])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        service.start_engine()
        assert waiting.result().status_code == 200


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_early_request_is_refused_when_the_wait_is_over(start_service, path: str, body: dict[str, object]) -> None:
    service = start_service(with_engine=False, engine__early_requests_wait_s=0.01)
    answer = service.post(path, body)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_early_requests_are_refused_when_the_service_stops(start_service) -> None:
    service = start_service(with_engine=False, engine__early_requests_wait_s=30)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.post, *BODIES[0])
        wait_until(lambda: num_early(service) == 1)
        service.board.raise_stop(StopMode.DRAIN)
        assert waiting.result().status_code == 503


def test_an_early_client_that_leaves_frees_its_place(start_service) -> None:
    service = start_service(with_engine=False, engine__early_requests_wait_s=30)
    with pytest.raises(httpx.ReadTimeout):
        service.client.post("/generate", json={"inputs": "abc"}, timeout=0.2)
    wait_until(lambda: num_early(service) == 0)
