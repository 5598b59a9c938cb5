"""The loader process: makes the weight memory, hands it over at once, fills it, and ends.

Forked first, from the master's main thread. Its main thread beats on the board while another one works: whoever finds
it dead or silent finishes the load (server/engine/weights.py). Knows processes and the board; what the bytes mean is
server.weights' matter.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from server.errors import StartupError
from server.launch.board import Board, ExitCode, LoaderState, ModelState, Role
from server.launch.fork_check import forked_at
from server.launch.hand_over import HandOver, send_memory
from server.launch.parent_death import die_with_parent
from server.settings.resolve import Device
from server.telemetry.logging import configure_logging
from server.weights.fill import complete_load
from server.weights.memory import HostStore, WeightStore
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord

logger = logging.getLogger(__name__)

BEAT_S = 0.1
KEEP_CONTEXT_S = 60.0  # for a model worker that is not ready by then it makes no difference
_READY_POLL_S = 0.02
_STOP_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """What to load, where to, and where to report."""

    plan: LoadPlan
    record: LoadRecord
    device: Device
    keeps_context: bool
    board: Board
    log_level: str


class LoaderProcess:
    """The master's side."""

    def __init__(self, pid: int, hand_over: HandOver, load: Load) -> None:
        self.hand_over = hand_over
        self._pid = pid
        self._load = load

    @classmethod
    def fork(cls, load: Load, close_in_child: Sequence[socket.socket]) -> "LoaderProcess":
        """Start it. `close_in_child`: listeners, which must not stay open in a process that nobody stops first."""
        hand_over, theirs = HandOver.create()
        lock_fd = load.record.try_lock()  # here and not in the child: nobody may find it free before
        assert lock_fd is not None, "the record is new"
        load.board.loader_beat = time.monotonic()
        pid = os.fork()
        if pid == 0:
            hand_over.close()
            for sock in close_in_child:
                sock.close()
            _run(load, theirs, lock_fd)
        os.close(lock_fd)
        theirs.close()
        load.board.loader_pid = pid
        return cls(pid, hand_over, load)

    def take_status(self) -> None:
        """Has it ended? Asked before Gunicorn's waitpid(-1) throws the status away.

        An early end halts the service if there is no memory yet; otherwise the model worker takes over.
        """
        if not self._pid:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # it died between our last look and Gunicorn's
            pid, status = self._pid, -1
        if not pid:
            return
        self._pid = 0
        board = self._load.board
        is_over = self._load.record.is_complete or board.loader_state == LoaderState.CANNOT_SHARE
        if is_over or board.stop or board.halt_code:  # it may have ended the service itself, with its reason
            return
        reason = f"the loader {_describe_status(status)} before it had finished"
        board.note_loader_failure(reason)
        if (fd := self.hand_over.copy_memory()) is None:
            board.halt(ExitCode.ENGINE_FAILED, board.loader_failure.decode(errors="replace"))  # its own words, if any
            return
        os.close(fd)
        logger.warning("%s: the model worker loads the rest", reason)


def _describe_status(status: int) -> str:
    if status < 0:
        return "ended"
    if os.WIFSIGNALED(status):
        return f"was killed by signal {os.WTERMSIG(status)}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


def open_store(device: Device) -> WeightStore:
    """The kind of memory that weights lie in. On a GPU this makes a context: after the last fork only."""
    if device == "cpu":
        return HostStore()
    from server.ops.cuda.nvidia import NvidiaDriver
    from server.weights.device_memory import DeviceStore, built_sum_kernels

    driver = NvidiaDriver.open()
    return DeviceStore(driver, built_sum_kernels(driver))


def _run(load: Load, sock: socket.socket, lock_fd: int) -> NoReturn:
    """The child's main thread."""
    codes: list[ExitCode] = []
    try:
        for deadly in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(deadly, signal.SIG_DFL)
        for ignored in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C reaches the whole group: the master decides
            signal.signal(ignored, signal.SIG_IGN)
        board = load.board
        board.loader_pid = os.getpid()
        die_with_parent(board.master_pid)
        board.begin_life(Role.LOADER, forked_at())
        configure_logging("loader", load.log_level)
        work = threading.Thread(target=lambda: codes.append(_load_or_report(load, sock, lock_fd)), name="loader")
        work.start()
        while work.is_alive():
            board.loader_beat = time.monotonic()
            work.join(BEAT_S)
    except Exception:
        logger.exception("the loader failed")
    os._exit(codes[0] if codes else ExitCode.ENGINE_FAILED)


def _load_or_report(load: Load, sock: socket.socket, lock_fd: int) -> ExitCode:
    board = load.board
    try:
        _load(load, sock)
        os.close(lock_fd)
    except StartupError as error:
        board.halt(ExitCode.PERMANENT, str(error))
        return ExitCode.PERMANENT
    except Exception as error:
        logger.exception("the loader failed")
        board.note_loader_failure(f"the loader failed: {error!r}")
        return ExitCode.ENGINE_FAILED
    if load.device == "cuda" and board.loader_state == LoaderState.LOADED:
        _keep_context(board, after_ready=load.keeps_context)
    return ExitCode.STOPPED


def _load(load: Load, sock: socket.socket) -> None:
    board, plan, num_bytes = load.board, load.plan, load.plan.layout.total_bytes
    board.bytes_total = plan.num_bytes
    board.loader_state = LoaderState.LOADING
    load.record.count_attempt()
    if load.device == "cuda":
        board.begin_stage(Role.LOADER, "context")
    store = open_store(load.device)
    board.begin_stage(Role.LOADER, "allocate")
    if not store.can_share:
        logger.warning("this GPU's memory cannot outlive a process: every model worker loads the weights by itself")
        board.mark_ready(Role.LOADER)
        board.loader_state = LoaderState.CANNOT_SHARE
        return
    fd = store.create(num_bytes)
    with sock:
        send_memory(sock, fd)
    memory = store.map_writable(fd, num_bytes)
    os.close(fd)

    def on_progress(num_bytes: int) -> None:
        board.bytes_loaded = num_bytes

    def on_loaded() -> None:
        board.begin_stage(Role.LOADER, "checksum")

    stage = board.begin_stage(Role.LOADER, "weights")
    if stage is not None:
        stage.num_bytes = board.bytes_total
    complete_load(plan, memory, load.record, on_progress, on_loaded)
    board.mark_ready(Role.LOADER)
    board.loader_state = LoaderState.LOADED
    memory.close()  # now that nobody waits: this process may live on, and has no business there any more


def _keep_context(board: Board, *, after_ready: bool) -> None:
    """While this process holds a context of the device, another one makes its own in 0.14 instead of 0.3 s.

    So at least until the first model worker is ready; `after_ready`: for its successors too.
    """
    deadline = time.monotonic() + KEEP_CONTEXT_S
    while not board.stop:
        is_ready = board.model_state == ModelState.READY
        if not after_ready and (is_ready or time.monotonic() > deadline):
            return
        time.sleep(_STOP_POLL_S if is_ready else _READY_POLL_S)
