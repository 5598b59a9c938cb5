"""Starts the real service (gunicorn -c gunicorn.conf.py) in a session of its own, and accounts for all its processes.

Processes are counted by session id: a dying process loses its environment and memory before its sockets.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from server.bench.server_process import living_members, living_session
from server.launch.board import Board, ModelState

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60.0
PROMPT = "the sea was"


@dataclass(frozen=True)
class Ended:
    """How a service ended. Times in seconds since the signal."""

    exit_code: int
    exit_s: float
    all_gone_s: float
    survivors: tuple[int, ...]
    files: tuple[str, ...]


class ProcessService:
    """One running service. `end` (or the fixture) leaves nothing behind."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        environ: Mapping[str, str] | None = None,
        runtime_dir: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.runtime_dir = runtime_dir or folder / "run"
        self.log_path = folder / "log"
        settings = {"server.runtime_dir": str(self.runtime_dir)} | dict(settings)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MODEL_SERVER_", "NOTIFY_"))}
        env |= {"MODEL_SERVER_PROFILE": "test", "MODEL_SERVER_OVERRIDES": json.dumps(settings)} | dict(environ or {})
        self.started_at = time.monotonic()
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py", *arguments],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    # what it looks like

    @property
    def log(self) -> str:
        """Everything logged so far."""
        return self.log_path.read_text()

    @property
    def is_alive(self) -> bool:
        """Whether the master has not ended."""
        return self._process.poll() is None

    def board(self) -> Board:
        """A copy of the board; an empty one before it exists."""
        return Board.snapshot(self.pid) or Board()

    def processes(self) -> list[int]:
        """All living processes of the service, the master among them."""
        return living_members(self.pid)

    def web_workers(self) -> list[int]:
        """Children of the master that are neither arbiter nor loader."""
        board = self.board()
        return [pid for pid in children(self.pid) if pid not in (board.arbiter_pid, board.loader_pid)]

    def address(self) -> tuple[str, int] | None:
        """Where it listens, once it does."""
        try:
            host, _, port = (self.runtime_dir / "address").read_text().strip().rpartition(":")
        except OSError:
            return None
        return host, int(port)

    # what it does

    def get(self, path: str, timeout_s: float = 5.0) -> int | None:
        """The status of GET `path`; None while nobody listens, or when the connection is lost."""
        address = self.address()
        if address is None:
            return None
        connection = http.client.HTTPConnection(*address, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_for(self, condition: Callable[[Board], bool], what: str, limit_s: float = START_LIMIT_S) -> Board:
        """Poll the board until `condition` holds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.is_alive:
            board = self.board()
            if condition(board):
                return board
            time.sleep(0.002)
        raise AssertionError(f"never seen: {what}\n{self.log}")

    def wait_ready(self) -> "ProcessService":
        """Until /health says 200."""
        self.wait_for(lambda board: board.model_state == ModelState.READY, "a ready engine")
        deadline = time.monotonic() + START_LIMIT_S
        while self.get("/health") != 200:
            assert time.monotonic() < deadline, self.log
            assert self.is_alive, self.log
            time.sleep(0.01)
        return self

    def end(self, signal_number: int | None = None, limit_s: float = 30.0) -> Ended:
        """Send the signal to the master (None: it ends by itself) and watch everything go, for 3 s after the master."""
        begin = time.monotonic()
        if signal_number is not None:
            self._process.send_signal(signal_number)
        exit_code = self._process.wait(limit_s)
        exit_s = time.monotonic() - begin
        while self.processes() and time.monotonic() - begin < exit_s + 3:
            time.sleep(0.005)
        all_gone_s = time.monotonic() - begin
        survivors = tuple(self.processes())
        files = sorted(path.name for path in self.runtime_dir.iterdir()) if self.runtime_dir.is_dir() else []
        return Ended(exit_code, exit_s, all_gone_s, survivors, tuple(name for name in files if name != "lock"))

    def kill_all(self) -> None:
        """Whatever a failed test has left."""
        for pid in self.processes():
            _signal(pid, signal.SIGCONT)
            _signal(pid, signal.SIGKILL)
        self._process.wait(10)


@dataclass
class TokenStream:
    """One POST /generate_stream, read by a thread."""

    service: ProcessService
    num_tokens: int
    prompt: str = PROMPT
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    status: int = 0
    is_complete: bool = False
    error: str = ""

    def start(self) -> "TokenStream":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def wait_for_tokens(self, count: int, limit_s: float = 30.0) -> "TokenStream":
        deadline = time.monotonic() + limit_s
        while len(self.token_ids) < count:
            assert time.monotonic() < deadline, f"{len(self.token_ids)} tokens of {count}; {self}\n{self.service.log}"
            assert self._thread.is_alive() or len(self.token_ids) >= count, f"{self}\n{self.service.log}"
            time.sleep(0.002)
        return self

    def finish(self, limit_s: float = 60.0) -> "TokenStream":
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"the stream hangs: {self}\n{self.service.log}"
        return self

    def _run(self) -> None:
        address = self.service.address()
        assert address is not None
        connection = http.client.HTTPConnection(*address, timeout=60)
        # Sampled: each token depends on its position and all before, so that a wrong resumption shows.
        parameters = {"max_new_tokens": self.num_tokens, "temperature": 1.0, "seed": 11}
        body = {"inputs": self.prompt, "parameters": parameters}
        try:
            connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            for line in response:
                if line.startswith(b"data:"):
                    self._take(json.loads(line[5:]))
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()

    def _take(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        token = event["token"]
        assert isinstance(token, dict)
        self.token_ids.append(token["id"])
        self.arrivals.append(time.monotonic())
        self.is_complete = event["generated_text"] is not None


def children(pid: int) -> list[int]:
    """Living children of a process whose main thread forks."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in pids if living_session(int(child)) is not None]


def num_threads(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def has_mapped(pid: int, library: str) -> bool:
    """Whether a library is in the memory of a process."""
    return library in Path(f"/proc/{pid}/maps").read_text()


def is_port_open(address: tuple[str, int]) -> bool:
    """Whether somebody accepts."""
    with socket.socket() as sock:
        return sock.connect_ex(address) == 0


def _signal(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)
