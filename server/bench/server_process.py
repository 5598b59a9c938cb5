"""A server under test: started in a session and a runtime folder of its own, watched from outside, and always ended.

Also with a bench that is killed: the kernel ends the process that was started, and ours takes its children with it.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from server.bench.http import Address, ask
from server.errors import ServerError
from server.launch.parent_death import die_with_parent
from server.settings.load import OVERRIDES_VARIABLE, PROFILE_VARIABLE

_STOP_LIMIT_S = 15.0
_GONE_LIMIT_S = 5.0
_LOG_TAIL_LINES = 15
_READY_POLL_S = 0.002


class BenchFailed(ServerError):
    """A measurement could not be made; the message holds the end of the server's log."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server. `{port}` in arguments and url becomes a free port; other servers have no `overrides`.

    `environ` replaces variables; an empty value removes one.
    """

    arguments: tuple[str, ...]
    url: str = "http://127.0.0.1:{port}"
    folder: Path | None = None
    profile: str = ""
    overrides: Mapping[str, object] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = True

    def with_environ(self, environ: Mapping[str, str]) -> "ServerCommand":
        """The same with more variables."""
        return replace(self, environ={**self.environ, **environ})


class ServerProcess:
    """Use as a context manager: whatever happens inside, no process of the server outlives it."""

    def __init__(self, command: ServerCommand) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="msb-"))  # short: Unix sockets in it have 108 bytes for their path
        self._log = self._folder / "log"
        port = free_port()
        parts = urlsplit(command.url.format(port=port))
        self.address: Address = (parts.hostname or "127.0.0.1", parts.port or port)
        arguments = [argument.replace("{port}", str(port)) for argument in command.arguments]
        environ = self._environment(command, port)
        with self._log.open("w") as log:
            self.started_at = time.monotonic()
            self._process = subprocess.Popen(  # noqa: S603 (what the caller asked to measure)
                arguments, cwd=command.folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
            )  # fmt: skip

    def _environment(self, command: ServerCommand, port: int) -> dict[str, str]:
        environ = {name: value for name, value in (os.environ | dict(command.environ)).items() if value}
        environ.pop("NOTIFY_SOCKET", None)  # whoever runs this command is not the service
        if command.is_ours:
            own = {"server.host": "127.0.0.1", "server.port": port, "server.runtime_dir": str(self._folder / "run")}
            callers = json.loads(environ.get(OVERRIDES_VARIABLE) or "{}")
            environ[OVERRIDES_VARIABLE] = json.dumps(callers | dict(command.overrides) | own)
            if command.profile:
                environ[PROFILE_VARIABLE] = command.profile
        return environ

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        try:
            self._end(error_class is None)
        finally:
            self._kill_group()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process that was started, leader of its session and group."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raises BenchFailed if it has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"the server ended with exit code {self._process.returncode}")

    def wait_ready(self, limit_s: float) -> None:
        """Until GET /health is answered with 200. Raises BenchFailed if that takes too long or the server ends."""
        deadline = self.started_at + limit_s
        while time.monotonic() < deadline:
            self.check_alive()
            answer = ask(self.address, "GET", "/health")
            if answer is not None and answer.status == 200:
                return
            time.sleep(_READY_POLL_S)
        raise self.failure(f"not ready within {limit_s:.0f} s")

    def failure(self, what: str) -> BenchFailed:
        """An error that shows the end of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return BenchFailed("\n  ".join([f"{what}; its last lines:", *lines]))

    def _end(self, is_well: bool) -> None:
        """Ask it to stop and wait; after a failure, or when it takes too long, there is only the kill."""
        if is_well and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                return

    def _kill_group(self) -> None:
        """Everything that it started and that stayed in its group, until the last one has gone."""
        deadline = time.monotonic() + _GONE_LIMIT_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline and (self._process.poll() is None or living_members(self.pid)):
                os.killpg(self.pid, signal.SIGKILL)
                time.sleep(0.005)


def living_members(session: int) -> list[int]:
    """Pids of the session's processes that live."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if living_session(pid) == session]


def living_session(pid: int) -> int | None:
    """The session of a process that lives; None for the dead, who may stay as zombies where nobody reaps orphans.

    A zombie lives while it has other threads: they hold its files and sockets until the last of them has gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    is_dead = fields[0] in "ZX" and int(fields[17]) <= 1
    return None if is_dead else int(fields[3])


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def path_without_compilers(search_path: str, folder: Path) -> str:
    """`search_path` as it would be if no C compiler were installed: folders that hold one are replaced by links."""
    kept = []
    for number, name in enumerate(part for part in search_path.split(":") if part and Path(part).is_dir()):
        programs = list(Path(name).iterdir())
        if any(_is_compiler(program.name) for program in programs):
            replacement = folder / str(number)
            replacement.mkdir(parents=True)
            for program in programs:
                if not _is_compiler(program.name):
                    (replacement / program.name).symlink_to(program)
            name = str(replacement)
        kept.append(name)
    return ":".join(kept)


def _is_compiler(program: str) -> bool:
    words = program.replace(".", "-").split("-")
    return any(word in ("cc", "gcc", "c++", "g++", "clang", "clang++", "tcc", "c89", "c99", "nvcc") for word in words)
