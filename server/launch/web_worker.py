"""The web worker: Gunicorn's process, uvicorn's server, our signals.

SIGTERM starts the lame duck: readiness off, new requests refused, the listener still open; then uvicorn's shutdown.
Knows processes and signals. The app is server.api's.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn
from uvicorn_worker import UvicornWorker

from server.launch.board import Board, ExitCode, Role, StopMode
from server.launch.parent_death import die_with_parent
from server.launch.service import current_service
from server.launch.supervisor import wake_master
from server.telemetry.logging import configure_logging


class WebWorker(UvicornWorker):
    """Gunicorn's worker class from `when_ready` on."""

    CONFIG_KWARGS = {  # noqa: RUF012 (uvicorn-worker's name and kind)
        "loop": "uvloop",
        "http": "httptools",
        "ws": "none",
        "lifespan": "on",
        "access_log": False,
        "server_header": False,
    }

    def init_signals(self) -> None:
        """The first code of ours after Gunicorn's change of user, which clears the parent-death request."""
        die_with_parent(self.ppid)
        configure_logging("web", self.cfg.loglevel)
        super().init_signals()
        for ignored in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group: the master decides
            signal.signal(ignored, signal.SIG_IGN)

    async def _serve(self) -> None:
        service = current_service()
        board, timeouts = service.board, service.resolved.stop_timeouts
        self.config.app = self.wsgi
        self.config.timeout_graceful_shutdown = timeouts.web_s
        is_first = self.age == 1
        if is_first:
            board.begin_stage(Role.WEB, "uvicorn")
        server = _Server(self.config, board, timeouts.lame_duck_s, is_first)
        # Plain sockets: uvloop detaches those at its end, Gunicorn's wrappers would be closed twice.
        await server.serve(sockets=[listener.sock for listener in self.sockets])
        if not server.started:
            raise SystemExit(ExitCode.ENGINE_FAILED)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, board: Board, lame_duck_s: float, is_first: bool) -> None:
        super().__init__(config)
        self._board = board
        self._lame_duck_s = lame_duck_s
        self._is_first = is_first
        self._is_draining = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._is_first:
            self._board.mark_ready(Role.WEB)
        if not self._board.web_ready_at:
            self._board.web_ready_at = time.monotonic()
            wake_master(self._board)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Instead of uvicorn's handlers, which would close the listener at once. Runs in the loop, before startup."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        loop.add_signal_handler(signal.SIGQUIT, os._exit, ExitCode.STOPPED)
        if self._board.stop:  # the signal came while this process still had the master's handlers
            self._drain()
        yield

    def _drain(self) -> None:
        if self._board.stop == StopMode.QUICK:
            os._exit(ExitCode.STOPPED)
        if self._is_draining:  # the second signal
            self.should_exit = True
            return
        self._is_draining = True
        asyncio.get_running_loop().call_later(self._lame_duck_s, setattr, self, "should_exit", True)
