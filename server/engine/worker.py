"""The model worker: Gunicorn's process around one engine thread. Named in gunicorn.conf.py as a dirty app.

The main thread only beats (Gunicorn's loop); the engine thread builds the engine and runs it. Knows processes and the
board; how an engine is built is server.engine.boot's matter.
"""

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from gunicorn.dirty.app import DirtyApp

from server.engine.boot import build_engine
from server.errors import StartupError
from server.launch.board import Board, ExitCode, ModelState, Role, StopMode
from server.launch.fork_check import forked_at
from server.launch.garbage import resume_collector
from server.launch.parent_death import die_with_parent
from server.launch.service import Service, current_service
from server.launch.supervisor import wake_master
from server.ops.cuda.driver import DriverError, OutOfDeviceMemory
from server.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
_SHORT_LIFE_S = 1.0


class ModelWorker(DirtyApp):
    """Gunicorn calls `init` in the forked process; no token ever travels through Gunicorn."""

    def init(self) -> None:
        """Signals first: a SIGTERM during Gunicorn's own init would be swallowed. Returns at once."""
        for signal_number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(signal_number, self._on_signal)
        for ignored in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group: the master decides
            signal.signal(ignored, signal.SIG_IGN)
        self._service = current_service()
        board = self._service.board
        die_with_parent(board.arbiter_pid)
        board.begin_life(Role.MODEL, forked_at())
        board.begin_stage(Role.MODEL, "process")
        configure_logging("model", self._service.settings.server.log_level)
        begin_attempt(board)
        max_attempts = self._service.settings.engine.max_boot_attempts
        if board.boot_attempts > max_attempts:
            _halt(board, ExitCode.ENGINE_FAILED, f"the model worker died {max_attempts} times while starting")
        if board.stop or board.halt_code:
            os._exit(ExitCode.STOPPED)
        threading.Thread(target=run_engine, args=(self._service,), name="engine", daemon=True).start()

    def __call__(self, action: str, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{action}: requests come over the engine's own socket")

    def _on_signal(self, _signal_number: int, _frame: FrameType | None) -> None:
        board = current_service().board
        if board.stop != StopMode.DRAIN or board.model_state != ModelState.READY:
            os._exit(ExitCode.STOPPED)  # this process alone, or a quick stop, or nothing to serve yet
        # Otherwise the engine loop reads board.stop and ends with its last web worker.


def begin_attempt(board: Board) -> None:
    """What the board says of the model worker is of this process from here on."""
    board.model_pid = os.getpid()
    board.engine_beat = time.monotonic()
    board.num_executing = board.graph_size = 0  # a predecessor that died in a step has left them
    board.model_state = ModelState.STARTING
    board.boot_attempts += 1  # attempts, not exceptions: a segmentation fault counts too


def run_engine(service: Service) -> None:
    """The engine thread's whole life; it ends the process."""
    board = service.board
    max_attempts = service.settings.engine.max_boot_attempts
    try:
        _build_and_run(service)
        os._exit(ExitCode.STOPPED)
    except StartupError as error:
        _halt(board, ExitCode.PERMANENT, str(error))
    except Exception as error:
        if board.stop or board.halt_code:  # whoever waited for something gave up because the service ends
            os._exit(ExitCode.STOPPED)
        if isinstance(error, DriverError) and not isinstance(error, OutOfDeviceMemory):  # that harms no context
            note_device_fault(board, error)
        logger.exception("the engine failed")
        if board.model_state != ModelState.READY and board.boot_attempts >= max_attempts:
            _halt(board, ExitCode.ENGINE_FAILED, f"the engine did not start in {max_attempts} attempts: {error!r}")
    os._exit(ExitCode.ENGINE_FAILED)


def _build_and_run(service: Service) -> None:
    board = service.board
    pause_s = max(backoff_s(board.boot_attempts), pause_after_short_life_s(time.monotonic() - board.ready_at))
    if pause_s:
        board.begin_stage(Role.MODEL, "back-off")
        time.sleep(pause_s)
    engine = build_engine(service)
    board.mark_ready(Role.MODEL)
    board.engine_beat = board.ready_at = time.monotonic()
    board.boot_attempts = board.arbiter_boot_attempts = 0
    board.num_engine_starts += 1
    board.model_state = ModelState.READY
    wake_master(board)
    resume_collector()  # no pass between steps over what was built for the engine
    engine.run()


def backoff_s(attempt: int) -> float:
    """Pause before the n-th attempt in a row: none before the first, then 0.2 s, doubling, at most 5 s."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (attempt - 2)) if attempt > 1 else 0.0


def pause_after_short_life_s(age_s: float) -> float:
    """Pause when the last engine was ready `age_s` ago: a request that kills every engine must not spin them."""
    return _FIRST_BACKOFF_S if age_s < _SHORT_LIFE_S else 0.0


def note_device_fault(board: Board, error: DriverError) -> None:
    """A failed call leaves a device's context unusable: say what ran, for the successor and the log. Tier 0 is ours."""
    board.note_fault(error.code, str(error), tier=0)
    request_ids = [f"{board.fault_requests[index]:x}" for index in range(board.num_fault_requests)]
    logger.error(
        "device error %d in step %d, tier 0, graph size %d, of requests %s: %s",
        error.code,
        board.fault_step,
        board.fault_graph_size,
        ", ".join(request_ids) or "of nobody",
        error,
    )


def _halt(board: Board, code: ExitCode, reason: str) -> None:
    board.halt(code, reason)
    wake_master(board)
