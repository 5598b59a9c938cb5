import os

from server.engine.worker import backoff_s, begin_attempt, note_device_fault, pause_after_short_life_s
from server.launch.board import Board, ModelState
from server.ops.cuda.driver import DriverError


def test_the_pause_before_an_attempt_grows_from_nothing_to_a_limit() -> None:
    pauses = [backoff_s(attempt) for attempt in range(1, 12)]
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert 0 < pauses[1] < 1
    assert pauses[-1] == 5


def test_an_engine_that_follows_a_short_life_waits_a_moment_and_others_do_not() -> None:
    assert pause_after_short_life_s(0.01) > 0
    assert pause_after_short_life_s(2.0) == 0


def test_a_device_fault_names_what_was_executing() -> None:
    board = Board.create()
    board.step, board.graph_size, board.num_executing = 7, 8, 2
    board.executing[:2] = [0xA, 0xB]
    note_device_fault(board, DriverError("launch", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert (board.fault_code, board.fault_step, board.fault_graph_size) == (700, 7, 8)
    assert list(board.fault_requests[: board.num_fault_requests]) == [0xA, 0xB]


def test_a_device_fault_of_a_start_is_not_put_on_the_requests_of_the_last_model_worker() -> None:
    board = Board.create()
    board.num_executing, board.graph_size = 2, 8
    begin_attempt(board)
    assert (board.model_pid, board.model_state, board.boot_attempts) == (os.getpid(), ModelState.STARTING, 1)
    note_device_fault(board, DriverError("cuCtxSetCurrent", 999, "CUDA_ERROR_UNKNOWN"))
    assert (board.num_faults, board.num_fault_requests, board.fault_graph_size) == (1, 0, 0)
