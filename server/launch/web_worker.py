"""The web worker: Gunicorn's process, uvicorn's server, our signals.

SIGTERM starts the lame duck: readiness off, new requests refused, the listener still open; then uvicorn's shutdown.
Knows processes and signals. The app is server.api's.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
from uvicorn_worker import UvicornWorker

from server.launch.board import Board, ExitCode, Role, StopMode
from server.launch.parent_death import die_with_parent
from server.launch.service import current_service
from server.launch.supervisor import wake_master
from server.telemetry.logging import configure_logging

# A thread that renders metrics gives way to the event loop after this: Python's own 5 ms are the time of a token.
_SWITCH_INTERVAL_S = 0.0005
_STALL_LIMIT_S = 60.0  # as common proxies have it
_SEND_BUFFER_BYTES = 256 << 10  # seconds of a fast stream; the kernel would let it grow to 4 MB


def bound_stalled_clients(listener: socket.socket, stall_limit_s: float = _STALL_LIMIT_S) -> None:
    """Who connects here and then reads nothing, or is gone without a word, is dropped after the limit.

    Until then it holds one small buffer in the kernel: its stream waits, and what waits goes out at once when it reads.
    Connections inherit both options from their listener.
    """
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_limit_s * 1e3))


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
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        for listener in self.sockets:
            bound_stalled_clients(listener.sock)
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
