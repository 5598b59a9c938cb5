"""The master's own signal handlers and its look at the board, once per turn of Gunicorn's main loop.

Gunicorn's hooks are not enough: `install` replaces methods of the one Arbiter instance. A role that must end the
service writes board.halt and sends SIGCHLD; the main loop raises HaltServer, from which Gunicorn stops everybody.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from gunicorn.errors import HaltServer

from server.launch.board import Board, ExitCode, LoaderState, ModelState, Role, StopMode
from server.launch.loader import LoaderProcess
from server.launch.sd_notify import Notifier
from server.launch.service import Service
from server.telemetry.timeline import describe_start, ready_at, running_stages

logger = logging.getLogger(__name__)


def wake_master(board: Board) -> None:
    """Any role: make the master look at the board now instead of within a second."""
    os.kill(board.master_pid, signal.SIGCHLD)


class Supervisor:
    """Knows the board and Gunicorn's Arbiter; does not know HTTP, models or requests."""

    def __init__(self, arbiter: Any, service: Service, loader: LoaderProcess, notifier: Notifier) -> None:
        self._board = service.board
        self._folder = service.folder
        self._loader = loader
        self._notifier = notifier
        self._start_deadline = StartDeadline(service.board, service.settings.engine.load_deadline_s)
        self._has_announced = False
        self._num_engine_starts = 0
        self._murder_workers: Callable[[], None] = arbiter.murder_workers
        self._reap_workers: Callable[[], None] = arbiter.reap_workers
        self._handle_dirty_arbiter_exit: Callable[[int, int], None] = arbiter.handle_dirty_arbiter_exit
        self._handle_chld: Callable[[], None] = arbiter.handle_chld
        self._handle_term: Callable[[], None] = arbiter.handle_term
        self._handle_quit: Callable[[], None] = arbiter.handle_quit

    def install(self, arbiter: Any) -> None:
        """Replace the methods that Gunicorn looks up on its instance (SIGCHLD's name is `cld` on Linux)."""
        arbiter.murder_workers = self.murder_workers
        arbiter.reap_workers = self.reap_workers
        arbiter.handle_dirty_arbiter_exit = self.handle_dirty_arbiter_exit
        arbiter.handle_chld = arbiter.handle_cld = self.handle_chld
        arbiter.handle_term = self.handle_term
        arbiter.handle_int = arbiter.handle_quit = self.handle_quit
        arbiter.handle_hup = self.handle_hup
        arbiter.handle_usr2 = self.handle_usr2

    def murder_workers(self) -> None:
        """Gunicorn calls it once per turn of its loop, at least once a second."""
        self.look_at_board()
        self._murder_workers()

    def handle_chld(self) -> None:
        """A child has ended, or a role wants to be heard."""
        self._loader.take_status()
        self.look_at_board()
        self._handle_chld()

    def handle_dirty_arbiter_exit(self, pid: int, status: int) -> None:
        """Its model worker ends with it."""
        self._board.note_loss()
        self._handle_dirty_arbiter_exit(pid, status)

    def reap_workers(self) -> None:
        """A worker's exit code 3 or 4 ends the service once: during the stop, another one's would be a traceback."""
        try:
            self._reap_workers()
        except HaltServer as halt:
            self._board.halt(ExitCode(halt.exit_status), f"web worker: {halt.reason}")
            self._raise_halt()

    def handle_term(self) -> None:
        """Drain: running requests may finish."""
        self._stop(StopMode.DRAIN)
        self._handle_term()

    def handle_quit(self) -> None:
        """SIGQUIT and SIGINT: end at once."""
        self._stop(StopMode.QUICK)
        self._handle_quit()

    def handle_hup(self) -> None:
        """Gunicorn would replace all workers."""
        logger.warning("SIGHUP: no setting can change while running; nothing was touched, restart the service instead")

    def handle_usr2(self) -> None:
        """Gunicorn would start a second master, hence a second model."""
        logger.warning("SIGUSR2 refused: it would load the model twice; restart the service instead")

    def look_at_board(self) -> None:
        """Raises HaltServer if a role asked for the end, the start makes no progress, or the folder has gone."""
        self._board.mark_ready(Role.MASTER)  # its part of the start is over: it is in its main loop
        self._start_deadline.check()
        self._raise_halt()
        self._check_folder()
        self._announce()

    def _raise_halt(self) -> None:
        board = self._board
        if board.halt_code and not board.stop:
            self._stop(StopMode.QUICK)
            raise HaltServer(board.halt_reason.decode(errors="replace"), board.halt_code)

    def _check_folder(self) -> None:
        """End in good time: who dies after the folder could not be replaced, and health would not know it."""
        if not self._board.stop and not self._folder.is_intact():
            self._stop(StopMode.DRAIN)
            reason = f"server.runtime_dir {self._folder.path} was removed under the running service"
            raise HaltServer(reason, ExitCode.ENGINE_FAILED)

    def _stop(self, mode: StopMode) -> None:
        self._board.raise_stop(mode)  # before any signal: whoever misses the signal reads this
        self._notifier.stopping()

    def _announce(self) -> None:
        board = self._board
        service_ready_at = ready_at(board)
        if board.model_state == ModelState.READY and service_ready_at:
            if not self._has_announced:
                self._has_announced = True
                seconds = service_ready_at - board.started_at
                self._notifier.ready(f"ready after {seconds:.1f} s")
                logger.info("ready after %.2f s on port %d", seconds, board.port)
                for line in describe_start(board):
                    logger.info("start: %s", line)
            elif board.num_engine_starts > self._num_engine_starts:
                logger.info(
                    "ready again after %.2f s: engine %d", board.ready_at - board.lost_at, board.num_engine_starts
                )
            self._num_engine_starts = board.num_engine_starts
        elif not self._has_announced:
            self._notifier.status(loading_status(board))


def loading_status(board: Board) -> str:
    """One line about the start, for `systemctl status`."""
    if board.loader_state == LoaderState.LOADED:
        return "weights loaded, starting the engine"
    percent = 100 * board.bytes_loaded // board.bytes_total if board.bytes_total else 0
    return f"loading the weights: {percent} %"


class StartDeadline:
    """Ends a start, first or repeated, in which no byte and no stage moves. It names the stages that hang."""

    def __init__(self, board: Board, limit_s: float) -> None:
        self._board = board
        self._limit_s = limit_s
        self._progress: tuple[int, ...] = ()
        self._since = time.monotonic()

    def check(self) -> None:
        """Halt the service when the limit is exceeded. Call it about once a second."""
        board, now = self._board, time.monotonic()
        is_ready = board.model_state == ModelState.READY and board.web_ready_at
        progress = (board.bytes_loaded, board.num_stages_begun, board.model_pid, board.arbiter_pid)
        if is_ready or progress != self._progress:
            self._progress, self._since = progress, now
        elif now - self._since > self._limit_s:
            hanging = "; ".join(running_stages(board)) or "no stage running"
            board.halt(
                ExitCode.ENGINE_FAILED,
                f"no progress towards a ready engine for {self._limit_s:.0f} s (engine.load_deadline_s): {hanging}; "
                f"{loading_status(board)}",
            )
