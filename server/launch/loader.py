"""The loader process: makes the weight memory, hands it to the master at once, fills it, and ends.

Forked first, from the master's main thread.
Knows processes and the board; what the bytes mean is server.weights' matter.
"""

import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from server.errors import EngineDead, StartupError
from server.launch.board import Board, ExitCode, LoaderState, Role
from server.launch.fork_check import forked_at
from server.launch.parent_death import die_with_parent
from server.telemetry.logging import configure_logging
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.loader import run_loader
from server.weights.memory import create_weight_memory

logger = logging.getLogger(__name__)

HAND_OVER_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What to load, and where to report."""

    checkpoint: Checkpoint
    layout: WeightLayout
    board: Board
    log_level: str


class LoaderProcess:
    """The master's side."""

    def __init__(self, pid: int, sock: socket.socket, board: Board) -> None:
        self._pid = pid
        self._sock = sock
        self._board = board

    @classmethod
    def fork(cls, load: Load, close_in_child: Sequence[socket.socket]) -> "LoaderProcess":
        """Start it. `close_in_child`: listeners, which must not stay open in a process that nobody stops first."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for sock in (ours, *close_in_child):
                sock.close()
            _run(load, theirs)
        theirs.close()
        return cls(pid, ours, load.board)

    def receive_memory(self) -> int:
        """The descriptor of the weight memory. Raises StartupError or EngineDead if the loader ended or is silent."""
        with self._sock:
            self._sock.settimeout(HAND_OVER_DEADLINE_S)
            try:
                _, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
            except OSError as error:
                raise EngineDead(f"the loader handed no memory over within {HAND_OVER_DEADLINE_S:.0f} s") from error
        if not fds:
            _, status = os.waitpid(self._pid, 0)
            reason = self._board.halt_reason.decode(errors="replace")
            failure = StartupError if self._board.halt_code == ExitCode.PERMANENT else EngineDead
            raise failure(reason or f"the loader {_describe_status(status)} before it had allocated memory")
        return int(fds[0])

    def take_status(self) -> None:
        """Has it ended? Asked before Gunicorn's waitpid(-1) throws the status away. A failure halts the service."""
        if not self._pid:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # it died between our last look and Gunicorn's
            pid, status = self._pid, -1
        if pid:
            self._pid = 0
            if self._board.loader_state != LoaderState.LOADED:
                self._board.loader_state = LoaderState.FAILED
                self._board.halt(
                    ExitCode.ENGINE_FAILED, f"the loader {_describe_status(status)} before it had finished"
                )


def _describe_status(status: int) -> str:
    if status < 0:
        return "ended"
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def _run(load: Load, sock: socket.socket) -> NoReturn:
    """The child's whole life."""
    board, code = load.board, ExitCode.STOPPED
    try:
        for deadly in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(deadly, signal.SIG_DFL)
        for ignored in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C reaches the whole group: the master decides
            signal.signal(ignored, signal.SIG_IGN)
        die_with_parent(board.master_pid)
        configure_logging("loader", load.log_level)
        _load(load, sock)
    except StartupError as error:
        code = ExitCode.PERMANENT
        board.halt(code, str(error))
    except Exception as error:
        logger.exception("the loader failed")
        code = ExitCode.ENGINE_FAILED
        board.halt(code, f"the loader failed: {error!r}")
    os._exit(code)


def _load(load: Load, sock: socket.socket) -> None:
    board, layout = load.board, load.layout
    board.begin_life(Role.LOADER, forked_at())
    board.bytes_total = sum(tensor.num_bytes for tensor in layout.tensors)
    board.loader_state = LoaderState.LOADING
    with board.stage(Role.LOADER, "allocate"):
        fd = create_weight_memory(layout.total_bytes)
        with sock:
            socket.send_fds(sock, [b"w"], [fd])

    def on_progress(num_bytes: int) -> None:
        board.bytes_loaded = num_bytes

    with board.stage(Role.LOADER, "weights") as stage:
        run_loader(load.checkpoint, layout, fd, 0, on_progress)
        if stage is not None:
            stage.num_bytes = board.bytes_total
    board.mark_ready(Role.LOADER)
    board.loader_state = LoaderState.LOADED
