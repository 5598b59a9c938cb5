"""The board: one shared memory file, mapped before any fork. Everyone reads it without asking anyone.

Each field has one writing role. Aligned 8-byte stores are atomic on the machines we run on, so there are no locks.
Times are time.monotonic(), which all processes of a machine share. It survives its writers and is never trusted with
anything that must be consistent across fields.
"""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

MAX_EXECUTING = 1024
STAGES_PER_ROLE = 16
_TEXT_BYTES = 512
_MEMFD_NAME = "model-server-board"


class ExitCode(IntEnum):
    """What the master's exit status means. Gunicorn itself gives 3 and 4 to workers that cannot boot."""

    STOPPED = 0
    ENGINE_FAILED = 3
    PERMANENT = 4


class Role(IntEnum):
    """Who writes: each role has its own rows of the timeline, so claiming one needs no lock.

    At most one process per role writes rows at a time: of the web workers only the first one ever forked does.
    """

    MASTER = 0
    LOADER = 1
    ARBITER = 2
    MODEL = 3
    WEB = 4


class LoaderState(IntEnum):
    """Written by the loader (FAILED: by the master, from its exit status)."""

    NONE = 0
    LOADING = 1
    LOADED = 2
    FAILED = 3


class ModelState(IntEnum):
    """Written by the model worker; reset to NONE by the arbiter before it forks."""

    NONE = 0
    STARTING = 1
    READY = 2


class StopMode(IntEnum):
    """Written by the master before it sends any signal. It only rises."""

    NONE = 0
    DRAIN = 1
    QUICK = 2


class Stage(ctypes.Structure):
    """One row of the start-up timeline. `end` 0: still running."""

    _fields_ = [
        ("role", ctypes.c_char * 16),
        ("name", ctypes.c_char * 32),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
        ("num_bytes", ctypes.c_int64),
    ]


class Board(ctypes.Structure):
    """The fields, by writer. Use `Board.create()` in the master; forks inherit it."""

    stop: int
    stop_at: float
    halt_code: int
    halt_reason: bytes
    _fields_ = [
        # master
        ("started_at", ctypes.c_double),
        ("master_pid", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("stop_at", ctypes.c_double),
        ("port", ctypes.c_int64),
        # any role: ends the service; the master reads it on SIGCHLD
        ("halt_code", ctypes.c_int64),
        ("halt_reason", ctypes.c_char * _TEXT_BYTES),
        # loader
        ("loader_state", ctypes.c_int64),
        ("bytes_total", ctypes.c_int64),
        ("bytes_loaded", ctypes.c_int64),
        # arbiter and model worker
        ("model_state", ctypes.c_int64),
        ("model_pid", ctypes.c_int64),
        ("boot_attempts", ctypes.c_int64),
        ("num_engine_starts", ctypes.c_int64),
        ("arbiter_pid", ctypes.c_int64),
        ("num_arbiter_starts", ctypes.c_int64),
        ("arbiter_boot_attempts", ctypes.c_int64),
        ("ready_at", ctypes.c_double),
        ("longest_step_s", ctypes.c_double),  # a bound on legal steps, which no watchdog may undercut
        ("engine_beat", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("num_running", ctypes.c_int64),
        ("num_waiting", ctypes.c_int64),
        ("num_kv_blocks", ctypes.c_int64),  # that can be leased: without the scratch block
        ("num_free_kv_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("max_model_len", ctypes.c_int64),
        ("num_preemptions", ctypes.c_int64),
        ("prefix_query_tokens", ctypes.c_int64),
        ("prefix_hit_tokens", ctypes.c_int64),
        ("num_prompt_tokens", ctypes.c_int64),
        ("num_generated_tokens", ctypes.c_int64),
        ("num_executing", ctypes.c_int64),
        ("executing", ctypes.c_uint64 * MAX_EXECUTING),
        # whoever forks: counts forks that broke the rules (a second thread, CUDA touched)
        ("num_forks", ctypes.c_int64),
        ("num_bad_forks", ctypes.c_int64),
        # start-up timeline: role r owns the rows from r * STAGES_PER_ROLE on, and its own counter
        ("num_stages", ctypes.c_int64 * len(Role)),
        ("stages", Stage * (len(Role) * STAGES_PER_ROLE)),
    ]

    @classmethod
    def create(cls) -> "Board":
        """A zeroed board in shared memory, inherited by every fork; freed with the last process."""
        fd = os.memfd_create(_MEMFD_NAME)
        try:
            os.ftruncate(fd, ctypes.sizeof(cls))
            return cls.from_buffer(mmap.mmap(fd, ctypes.sizeof(cls)))  # which keeps its own duplicate of fd
        finally:
            os.close(fd)

    @classmethod
    def snapshot(cls, pid: int) -> "Board | None":
        """A copy of the board of the service that process `pid` belongs to, for whoever looks from outside.

        None if there is no such process (of this user) or it holds no board (yet).
        """
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(path.readlink()).startswith(f"/memfd:{_MEMFD_NAME}"):
                        data = path.read_bytes()
                        return cls.from_buffer_copy(data) if len(data) == ctypes.sizeof(cls) else None
        return None

    def halt(self, code: ExitCode, reason: str) -> None:
        """Ask for the end of the service. The first reason stands. The caller still has to wake the master."""
        if not self.halt_code:
            self.halt_reason = reason.encode(errors="replace")[: _TEXT_BYTES - 1]
            self.halt_code = code

    def raise_stop(self, mode: StopMode) -> None:
        """Master only, before it signals anybody: signals are wake-ups, and whoever misses one reads this."""
        if self.stop == StopMode.NONE:
            self.stop_at = time.monotonic()
        self.stop = max(self.stop, mode)

    def begin_stage(self, role: Role, name: str) -> Stage | None:
        """Claim a timeline row; None when the role's rows are used up (later restarts are not start-up)."""
        index = self.num_stages[role]
        if index >= STAGES_PER_ROLE:
            return None
        stage: Stage = self.stages[role * STAGES_PER_ROLE + index]
        stage.role, stage.name = role.name.lower().encode(), name.encode()[:31]
        stage.begin, stage.end, stage.num_bytes = time.monotonic(), 0.0, 0
        self.num_stages[role] = index + 1  # last: a reader never sees a half-written row
        return stage

    @contextlib.contextmanager
    def stage(self, role: Role, name: str) -> Iterator[Stage | None]:
        """A timeline row around a block of code. It stays unfinished if the block raises."""
        stage = self.begin_stage(role, name)
        yield stage
        if stage is not None:
            stage.end = time.monotonic()

    def timeline(self) -> list[Stage]:
        """All rows claimed so far, in the order of their begin."""
        rows = [self.stages[role * STAGES_PER_ROLE + index] for role in Role for index in range(self.num_stages[role])]
        return sorted(rows, key=lambda stage: float(stage.begin))
