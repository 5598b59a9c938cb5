"""How much memory a server under test takes, looked at now and then by a thread: all its processes, and the device.

The host's part is the proportional set size: a page that n processes share counts 1/n in each, so the sum is what
the server really takes. Knows /proc and nvidia-smi; does not know what the processes are for.
"""

import shutil
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server.bench.server_process import living_members

SAMPLE_EVERY_S = 5.0
_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
_QUERY_LIMIT_S = 10.0


class Extent(msgspec.Struct, frozen=True):
    """Bytes at the first look, the most, and at the last."""

    begin: int
    max: int
    end: int


class Memory(msgspec.Struct, frozen=True):
    """`device` null: nvidia-smi knows none. `processes`: at the moment of the most, by pid and name."""

    host: Extent
    device: Extent | None
    processes: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Look:
    processes: dict[str, int]
    device: int | None

    @property
    def host(self) -> int:
        return sum(self.processes.values())


class MemoryWatch:
    """Looks at the processes of a session at the begin, every few seconds, and at the end. Use as a context manager."""

    def __init__(self, session: int, every_s: float = SAMPLE_EVERY_S) -> None:
        self._session = session
        self._every_s = every_s
        self._looks: list[_Look] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._looks.append(_look(self._session))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._looks.append(_look(self._session))

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._looks.append(_look(self._session))

    def result(self) -> Memory:
        """After the end."""
        most = max(self._looks, key=lambda look: look.host)
        devices = [look.device for look in self._looks if look.device is not None]
        return Memory(_extent(look.host for look in self._looks), _extent(devices) if devices else None, most.processes)


def _extent(values: Iterable[int]) -> Extent:
    known = list(values)
    return Extent(known[0], max(known), known[-1])


def _look(session: int) -> _Look:
    sizes = {pid: pss_bytes(pid) for pid in living_members(session)}
    return _Look({f"{pid} {_name_of(pid)}": size for pid, size in sizes.items()}, device_bytes())


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 for one that has gone or is not ours."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].strip()
    except OSError:
        return ""


def device_bytes() -> int | None:
    """Memory in use on all GPUs, by anyone; None without a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        result = subprocess.run(  # noqa: S603 (the driver's own tool)
            [program, *_QUERY], capture_output=True, text=True, check=True, timeout=_QUERY_LIMIT_S
        )
        return sum(int(line) << 20 for line in result.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
