"""The folder of one running instance: lock, engine socket, address file, Gunicorn's temporary files.

    lock              held (flock) by the master and, through inheritance, by every child
    engine.sock       the engine's listener
    address           host:port, written when the port is bound
    gunicorn-dirty-*  Gunicorn's own

Knows paths and the lock. Does not know who uses them.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from server.errors import StartupError

_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET = "gunicorn-dirty-XXXXXXXX/worker-1000000.sock"
_RETRY_LIMIT_S = 1.0
_RETRY_INTERVAL_S = 0.05


class RuntimeDir:
    """Construct, then `acquire` before anything else touches the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine_socket = path / "engine.sock"
        self._address = path / "address"
        self._lock_fd = -1
        self._folder_fd = -1
        self._is_locked = False

    @property
    def proc_name(self) -> str:
        """Unique per folder: Gunicorn names a pid file after it and kills whoever that names."""
        return "model-server-" + hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:12]

    def acquire(self) -> None:
        """Create the folder, lock it for this instance, and remove what a killed one left.

        Raises StartupError if that is impossible or another instance lives there, which is not disturbed.
        """
        self._check_length()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self._lock_fd = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StartupError(f"server.runtime_dir {self.path} cannot be used: {error.strerror}") from error
        retry_briefly(
            lambda: fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
            f"server.runtime_dir {self.path} is in use by another instance; stop it, or choose another port (--port)",
        )
        self._is_locked = True  # what lies here is ours from now on, never before
        # A lock on the folder itself keeps systemd-tmpfiles from removing old files in it.
        self._folder_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._folder_fd, fcntl.LOCK_SH)
        self._sweep()
        # Gunicorn's files go here too, so that two instances never meet. `gettempdir` has cached another answer.
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.path)

    def write_address(self, host: str, port: int) -> None:
        """Publish where the service listens; whole or not at all, for whoever polls it."""
        partial = self.path / "address.new"
        partial.write_text(f"[{host}]:{port}\n" if ":" in host else f"{host}:{port}\n")
        partial.replace(self._address)

    def is_intact(self) -> bool:
        """Whether lock and engine socket are where they were: without them no process could be replaced."""
        try:
            is_same = os.path.samestat((self.path / "lock").stat(), os.fstat(self._lock_fd))
        except OSError:
            return False
        return is_same and self.engine_socket.exists()

    def release(self) -> None:
        """Remove everything but the lock, which ends with the process. Does nothing if it was never acquired."""
        if self._is_locked:
            self._sweep()

    def _sweep(self) -> None:
        for path in (self.engine_socket, self._address, *self.path.glob("gunicorn-dirty-*")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _check_length(self) -> None:
        longest = os.fsencode(self.path / _LONGEST_SOCKET)
        excess = len(longest) - _MAX_SOCKET_PATH_BYTES
        if excess > 0:
            raise StartupError(
                f"server.runtime_dir {self.path} is too long: sockets in it would need {len(longest)} bytes, "
                f"{_MAX_SOCKET_PATH_BYTES} are possible; choose a path at least {excess} bytes shorter"
            )

    def _check_owner(self) -> None:
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise StartupError(f"server.runtime_dir {self.path} is not a folder")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StartupError(
                f"server.runtime_dir {self.path} must belong to this user and be writable by nobody else "
                f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})"
            )


def retry_briefly(action: Callable[[], None], failure: str) -> None:
    """Try for 1 s: the dying children of a killed master let go of lock and port one after the other.

    Raises StartupError with `failure` and the last error.
    """
    deadline = time.monotonic() + _RETRY_LIMIT_S
    while True:
        try:
            return action()
        except OSError as error:
            if time.monotonic() > deadline:
                raise StartupError(f"{failure} ({error.strerror})") from error
        time.sleep(_RETRY_INTERVAL_S)
