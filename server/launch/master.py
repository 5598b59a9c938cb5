"""The master's hooks: what happens between `gunicorn -c gunicorn.conf.py` and the first web worker.

Order: lock, board, port, checkpoint, loader (on_starting); then Gunicorn forks the dirty arbiter; then the app is built
(when_ready); then the web workers are forked. Permanent faults are found first: exit code 4 and one line.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from gunicorn.sock import TCP6Socket, TCPSocket

from server.errors import EngineDead, StartupError
from server.launch.board import Board, ExitCode, Role
from server.launch.bytecode import HTTP_SAMPLE, warn_if_compiled
from server.launch.fork_check import check_every_fork, forked_at
from server.launch.garbage import resume_collector
from server.launch.hand_over import HandOver
from server.launch.loader import Load, LoaderProcess
from server.launch.preload import load_once
from server.launch.runtime_dir import RuntimeDir, retry_briefly
from server.launch.sd_notify import Notifier
from server.launch.service import Service, current_service, publish_service
from server.launch.stages import IMPORTED_AT
from server.launch.supervisor import Supervisor
from server.settings.machine import detect_machine
from server.settings.resolve import resolve, runtime_dir
from server.settings.schema import Settings
from server.weights.folder import HubAccess
from server.weights.index import open_checkpoint
from server.weights.layout import weight_layout
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord

logger = logging.getLogger(__name__)

APP_DEADLINE_S = 10
_ENGINE_BACKLOG = 128


def on_starting(arbiter: Any) -> None:
    """After preload, before Gunicorn's signal handlers, listeners and every fork."""
    notifier = Notifier()
    settings = load_once()
    folder = RuntimeDir(runtime_dir(settings.server))
    try:
        folder.acquire()
        _stop_at_once_on_signals(folder)
        _start(arbiter, settings, folder, notifier)
    except (StartupError, EngineDead) as error:
        logger.error("cannot start: %s", error)
        code = ExitCode.PERMANENT if isinstance(error, StartupError) else ExitCode.ENGINE_FAILED
    except Exception:
        logger.exception("cannot start")
        code = ExitCode.ENGINE_FAILED
    else:
        return
    folder.release()
    raise SystemExit(code)


def _stop_at_once_on_signals(folder: RuntimeDir) -> None:
    """Until Gunicorn installs its handlers there is nothing to drain; only the lock's holder may sweep."""

    def stop(_signal_number: int, _frame: FrameType | None) -> None:
        folder.release()
        os._exit(ExitCode.STOPPED)

    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signal_number, stop)


def _start(arbiter: Any, settings: Settings, folder: RuntimeDir, notifier: Notifier) -> None:
    board = Board.create()
    board.master_pid = os.getpid()
    board.started_at = _process_start()
    board.begin_stage(Role.MASTER, "python and gunicorn", board.started_at)
    board.begin_stage(Role.MASTER, "imports", IMPORTED_AT)
    board.begin_stage(Role.MASTER, "port")
    check_every_fork(board)
    arbiter.LISTENERS = [_bind(address, arbiter) for address in arbiter.cfg.address]
    host, board.port = arbiter.LISTENERS[0].getsockname()[:2]
    folder.write_address(host, board.port)
    board.begin_stage(Role.MASTER, "checkpoint")
    checkpoint = open_checkpoint(settings.model.path, settings.model.revision, HubAccess.from_environment(os.environ))
    resolved = resolve(settings, checkpoint.facts, detect_machine())
    layout = weight_layout(checkpoint.facts)
    plan = LoadPlan.make(checkpoint, layout)
    record = LoadRecord(len(plan.chunks), len(plan.sources))
    engine_listener = _listen(folder.engine_socket)
    notifier.status("loading")
    board.begin_stage(Role.MASTER, "fork loader")
    load = Load(plan, record, resolved.device, settings.engine.keep_context, board, settings.server.log_level)
    loader = LoaderProcess.fork(load, close_in_child=[*arbiter.LISTENERS, engine_listener])
    board.begin_stage(Role.MASTER, "fork arbiter")
    service = Service(
        settings,
        resolved,
        checkpoint,
        layout,
        board,
        engine_listener,
        tuple(arbiter.LISTENERS),
        folder,
        plan,
        record,
        loader.hand_over,
        *HandOver.create(),
    )
    publish_service(service)
    Supervisor(arbiter, service, loader, notifier).install(arbiter)


def _process_start() -> float:
    """time.monotonic() of this process's exec, to 10 ms: Python's own start belongs on the timeline."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def _bind(address: object, arbiter: Any) -> TCPSocket:
    """Bind and listen here, so that a busy port is found before anything else is done; Gunicorn finds it done."""
    if not isinstance(address, tuple):
        raise StartupError(f"bind must be host:port, found {address}")
    kind: Any = TCP6Socket if ":" in address[0] else TCPSocket
    sockets: list[TCPSocket] = []
    failure = f"cannot listen on {address[0]} port {address[1]} (server.host, server.port)"
    try:
        retry_briefly(lambda: sockets.append(kind(address, arbiter.cfg, arbiter.log)), failure)
    except (TypeError, ValueError) as error:  # what Python says of names that cannot be one
        raise StartupError(f"{failure} ({error})") from error
    return sockets[0]


def _listen(path: Path) -> socket.socket:
    """The engine's listener outlives every model worker: connections wait in its backlog meanwhile."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_ENGINE_BACKLOG)
    return listener


def when_ready(arbiter: Any) -> None:
    """After the dirty arbiter's fork, before those of the web workers: build what they all share."""
    service = current_service()
    try:
        service.board.begin_stage(Role.MASTER, "app")
        arbiter.app.callable = _within(APP_DEADLINE_S, lambda: _build_app(service))
        arbiter.worker_class = _import_worker_class()
        resume_collector()
        warn_if_compiled(HTTP_SAMPLE, "2 s")
        service.board.begin_stage(Role.MASTER, "fork web workers")
    except Exception as error:
        if not isinstance(error, StartupError):
            logger.exception("the HTTP app could not be built")
        code = ExitCode.PERMANENT if isinstance(error, StartupError) else ExitCode.ENGINE_FAILED
        service.board.halt(code, f"the HTTP app could not be built: {error}")
        # Gunicorn ends the children properly only from its main loop: no web worker until it sees the board.
        arbiter.num_workers = 0
    os.kill(os.getpid(), signal.SIGCHLD)  # the loader may have ended before there was a handler


def _build_app(service: Service) -> Any:
    # FastAPI and the tokenizer: not before the forks that do not need them.
    from server.api.lean_import import import_fastapi

    import_fastapi()
    from server.api.app import create_app

    return create_app(
        service.settings, service.resolved, service.checkpoint, service.board, str(service.folder.engine_socket)
    )


def _import_worker_class() -> type:
    from server.launch.web_worker import WebWorker  # uvicorn: as above

    return WebWorker


def _within(deadline_s: float, build: Callable[[], Any]) -> Any:
    """Run `build` in this thread (threads and forks do not mix). Raises TimeoutError after the deadline."""

    def expire(_signal_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {deadline_s:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        return build()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def post_fork(_arbiter: Any, worker: Any) -> None:
    """In each web worker: it only connects, and has no use for the weights."""
    service = current_service()
    if worker.age == 1:  # only the first one writes on the timeline
        service.board.begin_life(Role.WEB, forked_at())
        service.board.begin_stage(Role.WEB, "process")
    service.close_in_web_worker()


def on_exit(_arbiter: Any) -> None:
    """The last thing that the master does."""
    current_service().folder.release()
