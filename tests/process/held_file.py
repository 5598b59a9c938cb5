"""A file that nobody gets open for as long as the test wants, as on a disk that does not answer."""

import fcntl
import os
import signal
import time
from pathlib import Path

from tests.process.conftest import StartService
from tests.process.harness import ProcessService

_LIMIT_S = 30.0
_POLL_S = 0.0005


class HeldFile:
    """A lease (fcntl(2)): the kernel lets whoever opens the file wait until it is given up, 45 s at most."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._previous = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it would tell that somebody waits
        self.hold()

    def hold(self) -> None:
        """As soon as nobody else has it open."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                return
            except BlockingIOError:
                assert time.monotonic() < deadline, "somebody keeps the file open"
            time.sleep(_POLL_S)

    def let_go(self) -> None:
        """Whoever waits gets it."""
        fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def wait_until_wanted(self, service: ProcessService) -> None:
        """Somebody waits."""
        deadline = time.monotonic() + _LIMIT_S
        while fcntl.fcntl(self._fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            assert time.monotonic() < deadline, service.log
            assert service.is_alive, service.log
            time.sleep(_POLL_S)

    def truncate(self, num_bytes: int) -> None:
        """Without opening it."""
        os.ftruncate(self._fd, num_bytes)

    def close(self) -> None:
        """Also lets go."""
        os.close(self._fd)
        signal.signal(signal.SIGIO, self._previous)


def start_with_waiting_loader(start: StartService, model: Path, **settings: object) -> tuple[ProcessService, HeldFile]:
    """A service whose loader waits for its file, beating; all before has gone its way. The caller closes the file."""
    file = HeldFile(model / "model.safetensors")
    service = start(model__path=str(model), **settings)
    file.wait_until_wanted(service)  # by the master, which reads the header
    file.let_go()
    file.hold()
    file.wait_until_wanted(service)
    return service, file
