from types import SimpleNamespace
from typing import cast

import pytest
from gunicorn.errors import HaltServer

from server.launch.board import Board, ExitCode, LoaderState, ModelState, Role, StopMode
from server.launch.loader import LoaderProcess
from server.launch.sd_notify import Notifier
from server.launch.service import Service
from server.launch.supervisor import StartDeadline, Supervisor, loading_status


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number: what time.monotonic() says."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_start_that_moves_is_never_ended(clock: list[float]) -> None:
    board = Board.create()
    deadline = StartDeadline(board, 10)
    for step in range(20):
        clock[0] += 9
        board.bytes_loaded = step
        deadline.check()
    assert not board.halt_code


def test_a_start_that_stands_still_ends_with_what_was_seen_last(clock: list[float]) -> None:
    board = Board.create()
    board.loader_state, board.bytes_loaded, board.bytes_total = LoaderState.LOADING, 25, 100
    deadline = StartDeadline(board, 10)
    deadline.check()
    clock[0] += 11
    deadline.check()
    assert board.halt_code == ExitCode.ENGINE_FAILED
    assert b"25 %" in board.halt_reason


def test_a_start_that_hangs_names_the_stage_it_hangs_in_and_who_waits_for_it(clock: list[float]) -> None:
    board = Board.create()
    deadline = StartDeadline(board, 10)
    with board.stage(Role.MASTER, "checkpoint"):
        pass
    board.begin_stage(Role.MODEL, "wait for weights")
    clock[0] += 9
    board.begin_stage(Role.LOADER, "weights")
    deadline.check()
    assert not board.halt_code
    clock[0] += 11
    deadline.check()
    assert board.halt_code == ExitCode.ENGINE_FAILED
    assert b"loader weights for 11 s; model wait for weights for 20 s" in board.halt_reason
    assert b"checkpoint" not in board.halt_reason


def test_an_engine_without_a_listening_web_worker_is_no_finished_start(clock: list[float]) -> None:
    board = Board.create()
    board.model_state = ModelState.READY
    deadline = StartDeadline(board, 10)
    deadline.check()
    clock[0] += 11
    deadline.check()
    assert board.halt_code == ExitCode.ENGINE_FAILED


def test_a_ready_service_has_no_deadline_until_it_starts_again(clock: list[float]) -> None:
    board = Board.create()
    board.model_state, board.web_ready_at = ModelState.READY, clock[0]
    deadline = StartDeadline(board, 10)
    for _ in range(3):
        clock[0] += 100
        deadline.check()
    board.model_state = ModelState.NONE
    deadline.check()
    assert not board.halt_code
    clock[0] += 11
    deadline.check()
    assert board.halt_code


def test_the_status_line_follows_the_start() -> None:
    board = Board.create()
    assert loading_status(board) == "loading the weights: 0 %"
    board.bytes_loaded, board.bytes_total = 50, 200
    assert loading_status(board) == "loading the weights: 25 %"
    board.loader_state = LoaderState.LOADED
    assert loading_status(board) == "weights loaded, starting the engine"


class FailedWorkers:
    """As Gunicorn's Arbiter: each look at dead workers finds one more that ended with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self.num_reaped = 0

    def reap_workers(self) -> None:
        self.num_reaped += 1
        raise HaltServer("Worker failed to boot.", self._exit_code)

    def murder_workers(self) -> None: ...

    def handle_chld(self) -> None: ...

    def handle_dirty_arbiter_exit(self, pid: int, status: int) -> None: ...

    def handle_term(self) -> None: ...

    def handle_quit(self) -> None: ...


@pytest.mark.parametrize("exit_code", [3, 4])
def test_of_several_failed_web_workers_only_the_first_ends_the_service(exit_code: int) -> None:
    board = Board.create()
    arbiter = FailedWorkers(exit_code)
    settings = SimpleNamespace(engine=SimpleNamespace(load_deadline_s=10))
    service = cast(Service, SimpleNamespace(board=board, settings=settings, folder=None))
    Supervisor(arbiter, service, cast(LoaderProcess, None), Notifier()).install(arbiter)
    with pytest.raises(HaltServer) as halt:
        arbiter.reap_workers()
    assert halt.value.exit_status == exit_code
    assert "failed to boot" in halt.value.reason
    arbiter.reap_workers()  # during the stop: Gunicorn has no handler for a second one
    assert arbiter.num_reaped == 2
    assert board.stop == StopMode.QUICK


def test_a_replaced_engine_is_announced_with_the_time_it_was_missed(caplog: pytest.LogCaptureFixture) -> None:
    board = Board.create()
    settings = SimpleNamespace(engine=SimpleNamespace(load_deadline_s=10))
    folder = SimpleNamespace(is_intact=lambda: True)
    service = cast(Service, SimpleNamespace(board=board, settings=settings, folder=folder))
    supervisor = Supervisor(FailedWorkers(0), service, cast(LoaderProcess, None), Notifier())
    board.started_at, board.ready_at, board.web_ready_at = 1.0, 2.0, 2.0
    board.start[Role.MODEL].ready_at = 2.0
    board.model_state, board.num_engine_starts = ModelState.READY, 1
    with caplog.at_level("INFO"):
        supervisor.look_at_board()
        supervisor.look_at_board()
        assert "ready again" not in caplog.text
        board.lost_at, board.ready_at, board.num_engine_starts = 5.0, 5.25, 2
        supervisor.look_at_board()
        supervisor.look_at_board()
    assert caplog.text.count("ready again after 0.25 s: engine 2") == 1
