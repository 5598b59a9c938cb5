"""The dirty arbiter's side: parent of every model worker, which starts by fork with all imports done.

With the torch backend it holds torch; nothing here runs a computation, or a forked model worker would hang on the locks
of threads that it does not have.
"""

import logging
import os
import signal
from typing import Any

from server.errors import StartupError
from server.launch.board import Board, ExitCode, ModelState, Role
from server.launch.bytecode import TORCH_SAMPLE, warn_if_compiled
from server.launch.fork_check import forked_at
from server.launch.garbage import resume_collector
from server.launch.parent_death import die_with_parent
from server.launch.service import Service, current_service
from server.launch.supervisor import wake_master
from server.telemetry.logging import configure_logging

logger = logging.getLogger(__name__)


def on_dirty_starting(arbiter: Any) -> None:
    """In the arbiter, before its own signal handlers: it still has the master's, which would only queue a SIGTERM."""
    for deadly in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(deadly, signal.SIG_DFL)
    for ignored in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent(arbiter.ppid)
    service = current_service()
    configure_logging("arbiter", service.settings.server.log_level)
    try:
        _prepare(arbiter, service)
    except StartupError as error:
        _give_up(service.board, ExitCode.PERMANENT, str(error))
    except Exception as error:
        logger.exception("the dirty arbiter could not start")
        _give_up(service.board, ExitCode.ENGINE_FAILED, f"the dirty arbiter could not start: {error!r}")
    if service.board.stop:
        os._exit(ExitCode.STOPPED)
    _adapt(arbiter, service.board)


def _prepare(arbiter: Any, service: Service) -> None:
    board = service.board
    board.begin_life(Role.ARBITER, forked_at())
    board.begin_stage(Role.ARBITER, "process")
    board.arbiter_pid = os.getpid()
    board.model_state, board.model_pid = ModelState.NONE, 0  # its model worker died with the previous arbiter
    board.num_arbiter_starts += 1
    board.arbiter_boot_attempts += 1  # reset by a ready engine: a crash while importing counts like an exception
    max_attempts = service.settings.engine.max_boot_attempts
    if board.arbiter_boot_attempts > max_attempts:
        _give_up(
            board, ExitCode.ENGINE_FAILED, f"the dirty arbiter died {max_attempts} times before an engine was ready"
        )
    for listener in service.http_listeners:  # else connections would hang in them after the web side has closed
        listener.close()
    board.begin_stage(Role.ARBITER, "imports")
    import server.engine.worker  # noqa: F401 (compiled and imported once, for every model worker)
    from server.engine.boot import import_backend

    import_backend(service.resolved.backend)
    resume_collector()
    warn_if_compiled(TORCH_SAMPLE, "3 s")
    board.begin_stage(Role.ARBITER, "gunicorn")


def _give_up(board: Board, code: ExitCode, reason: str) -> None:
    board.halt(code, reason)
    wake_master(board)
    os._exit(code)


def _adapt(arbiter: Any, board: Board) -> None:
    """Replace five methods of the instance."""
    manage_workers, clean_up = arbiter.manage_workers, arbiter._cleanup_sync
    spawn_worker, forget_worker = arbiter.spawn_worker, arbiter._cleanup_worker

    def spawn_worker_on_timeline() -> Any:
        board.begin_stage(Role.ARBITER, "fork model worker")
        pid = spawn_worker()  # the child does not return
        board.mark_ready(Role.ARBITER)
        return pid

    def forget_dead_worker(pid: int) -> None:
        board.note_loss()
        forget_worker(pid)

    async def manage_workers_unless_stopping() -> None:
        if board.stop and arbiter._server is not None:
            # A SIGTERM between init_signals and the loop's start would be lost.
            arbiter.alive = False
            arbiter._server.close()
        await manage_workers()

    async def reload() -> None:
        logger.warning("SIGHUP ignored")

    def clean_up_and_exit() -> None:
        clean_up()
        os._exit(ExitCode.STOPPED)  # tearing down an interpreter with torch takes 0.5 s

    arbiter.manage_workers = manage_workers_unless_stopping
    arbiter.reload = reload
    arbiter.spawn_worker = spawn_worker_on_timeline
    arbiter._cleanup_worker = forget_dead_worker
    arbiter._cleanup_sync = clean_up_and_exit
