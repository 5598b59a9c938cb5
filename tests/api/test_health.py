"""Health follows the board, and nothing but the board."""

import time

import pytest

from server.api.health import LIVE_PATHS, READY_PATHS, read_health
from server.launch.board import Board, ExitCode, LoaderState, ModelState, StopMode

NOW = 1000.0


@pytest.fixture
def board():
    board = Board.create()
    board.started_at = NOW - 10
    return board


def status_of(board):
    return read_health(board, "m", 10, NOW).status


def test_new_service_is_loading_and_knows_no_end(board):
    health = read_health(board, "m", 10, NOW)
    assert (health.status, health.phase, health.progress, health.eta_s) == ("loading", "starting processes", 0, None)
    assert health.uptime_s == 10


def test_progress_and_eta_follow_the_bytes(board):
    board.loader_state, board.bytes_total, board.bytes_loaded = LoaderState.LOADING, 400, 100
    health = read_health(board, "m", 10, NOW)
    assert (health.phase, health.progress, health.eta_s) == ("loading weights", 0.25, 30.0)
    board.loader_state, board.bytes_loaded = LoaderState.LOADED, 400
    health = read_health(board, "m", 10, NOW)
    assert (health.status, health.phase) == ("loading", "first token")
    assert health.progress < 1


def test_loaded_weights_alone_are_not_ready(board):
    board.loader_state, board.model_state = LoaderState.LOADED, ModelState.STARTING
    assert status_of(board) == "loading"


def test_ready_needs_a_beating_engine(board):
    board.model_state, board.ready_at, board.engine_beat = ModelState.READY, NOW - 5, NOW - 9
    assert status_of(board) == "ready"
    board.engine_beat = NOW - 11
    assert status_of(board) == "stalled"
    assert read_health(board, "m", 0, NOW).status == "stalled"  # without a watchdog too
    board.longest_step_s = 1e6
    assert status_of(board) == "ready"


def test_crashed_engine_has_a_moment_to_come_back(board):
    board.model_state, board.ready_at, board.engine_beat = ModelState.NONE, NOW - 5, NOW - 4
    assert status_of(board) == "recovering"
    board.engine_beat = NOW - 6
    assert status_of(board) == "loading"


def test_stop_and_halt_win(board):
    board.model_state, board.ready_at, board.engine_beat = ModelState.READY, NOW, NOW
    board.raise_stop(StopMode.DRAIN)
    assert status_of(board) == "draining"
    board.halt(ExitCode.ENGINE_FAILED, "broken")
    assert status_of(board) == "failed"


def test_answers_from_the_first_moment_and_turns_ready(start_service):
    service = start_service(with_engine=False)
    for path in READY_PATHS:
        response = service.client.get(path)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["status"] == "loading"
        assert response.json()["model"] == "echo"
    for path in LIVE_PATHS:
        assert service.client.get(path).status_code == 200
    service.start_engine()
    for path in READY_PATHS:
        response = service.client.get(path)
        assert response.status_code == 200
        assert response.json()["status"] == "ready"
        assert response.json()["queue"] == {"running": 0, "waiting": 0}
        assert "retry-after" not in response.headers


def test_head_is_get_without_a_body(service):
    for path in (*READY_PATHS, *LIVE_PATHS):
        response = service.client.head(path)
        assert response.status_code == 200
        assert response.content == b""


def test_stalled_engine_is_neither_ready_nor_alive(start_service):
    service = start_service(with_engine=False)
    service.board.model_state, service.board.ready_at = ModelState.READY, 1.0
    service.board.engine_beat = time.monotonic() - 100
    for path in ("/health", "/health/live"):
        response = service.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "stalled")


def test_routes_are_documented(service):
    response = service.client.get("/openapi.json")
    assert "$ref" not in response.text
    paths = response.json()["paths"]
    schema = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    parameters = next(option for option in schema["properties"]["parameters"]["anyOf"] if "properties" in option)
    assert "inputs" in schema["properties"]
    assert "max_new_tokens" in parameters["properties"]
    assert {"/generate_stream", "/v1/completions", "/v1/models", "/health", "/metrics", "/info"} <= paths.keys()
