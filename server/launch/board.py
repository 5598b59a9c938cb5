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

from server.launch.stages import Stage, Track

MAX_EXECUTING = 1024
MAX_EOS_TOKEN_IDS = 16
_TEXT_BYTES = 512
_MEMFD_NAME = "model-server-board"


class ExitCode(IntEnum):
    """What the master's exit status means. Gunicorn itself gives 3 and 4 to workers that cannot boot."""

    STOPPED = 0
    ENGINE_FAILED = 3
    PERMANENT = 4


class Role(IntEnum):
    """Who writes: each role has its own track of the timeline, so claiming a row needs no lock.

    At most one process per role writes rows at a time: of the web workers only the first one ever forked does.
    """

    MASTER = 0
    LOADER = 1
    ARBITER = 2
    MODEL = 3
    WEB = 4


class LoaderState(IntEnum):
    """Written by the loader, or by the model worker that finishes its work.

    CANNOT_SHARE: memory does not outlive a process here, every model worker loads into its own.
    """

    NONE = 0
    LOADING = 1
    LOADED = 2
    CANNOT_SHARE = 3


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


class Board(ctypes.Structure):
    """The fields, by writer. Use `Board.create()` in the master; forks inherit it."""

    stop: int
    stop_at: float
    halt_code: int
    halt_reason: bytes
    loader_failure: bytes
    device_name: bytes
    fault_call: bytes
    reaped_at: float
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
        ("loader_pid", ctypes.c_int64),
        ("loader_beat", ctypes.c_double),
        ("loader_failure", ctypes.c_char * _TEXT_BYTES),  # also by the master, and by the model worker that takes over
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
        ("graph_size", ctypes.c_int64),  # token rows of the graph that the last step replayed; 0: it was issued singly
        ("num_executing", ctypes.c_int64),
        ("executing", ctypes.c_uint64 * MAX_EXECUTING),
        # the last failed call of a device, written by the model worker that it ended
        ("num_faults", ctypes.c_int64),
        ("fault_code", ctypes.c_int64),
        ("fault_step", ctypes.c_int64),
        ("fault_tier", ctypes.c_int64),
        ("fault_graph_size", ctypes.c_int64),
        ("fault_call", ctypes.c_char * _TEXT_BYTES),
        ("num_fault_requests", ctypes.c_int64),
        ("fault_requests", ctypes.c_uint64 * MAX_EXECUTING),
        # what the first model worker found and a replacement need not look for again; 0: nothing yet
        ("kv_pool_bytes", ctypes.c_int64),
        ("num_token_ids", ctypes.c_int64),
        ("num_eos_token_ids", ctypes.c_int64),
        ("eos_token_ids", ctypes.c_int64 * MAX_EOS_TOKEN_IDS),
        # whoever forks: counts forks that broke the rules (a second thread, CUDA touched)
        ("num_forks", ctypes.c_int64),
        ("num_bad_forks", ctypes.c_int64),
        ("device_name", ctypes.c_char * 64),  # by the model worker, which asks the driver
        # graphs of steps of the running model worker: captured, and wanted in all (0: it uses none)
        ("num_graphs", ctypes.c_int64),
        ("num_graphs_wanted", ctypes.c_int64),
        # start-up timeline, one track per role: the service's start, and the last replacement of a dead process
        ("web_ready_at", ctypes.c_double),  # the first web worker that listened
        ("lost_at", ctypes.c_double),  # last sign of life of the model worker that died last
        ("reaped_at", ctypes.c_double),  # when its parent, or its parent's parent, took notice
        ("start", Track * len(Role)),
        ("restart", Track * len(Role)),
        ("has_restarted", ctypes.c_int64 * len(Role)),
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

    def note_fault(self, code: int, call: str, tier: int) -> None:
        """Model worker only: a call of the device failed. What was executing then stays readable after its death."""
        self.fault_code, self.fault_call = code, call.encode(errors="replace")[: _TEXT_BYTES - 1]
        self.fault_step, self.fault_tier, self.fault_graph_size = self.step, tier, self.graph_size
        self.num_fault_requests = self.num_executing
        ctypes.memmove(self.fault_requests, self.executing, ctypes.sizeof(self.executing))
        self.num_faults += 1

    def note_loader_failure(self, reason: str) -> None:
        """For the one who takes over. The first reason stands."""
        if not self.loader_failure:
            self.loader_failure = reason.encode(errors="replace")[: _TEXT_BYTES - 1]

    def raise_stop(self, mode: StopMode) -> None:
        """Master only, before it signals anybody: signals are wake-ups, and whoever misses one reads this."""
        if self.stop == StopMode.NONE:
            self.stop_at = time.monotonic()
        self.stop = max(self.stop, mode)

    def begin_life(self, role: Role, forked_at: float) -> None:
        """A new process of `role` speaks for the first time. Its first stage is "fork", begun by its parent.

        Before the service was ready this goes on with the rows of the start. Later it is a restart: its rows replace
        those of the last one, begin with the loss, and go on over failed attempts.
        """
        reaped_at = self.reaped_at if role in (Role.ARBITER, Role.MODEL) else 0.0
        if self.ready_at and (not self.has_restarted[role] or self.restart[role].ready_at):
            self.has_restarted[role] = 1
            self.restart[role].reset(self.lost_at)
            if reaped_at:
                self.begin_stage(role, "dying", self.lost_at)
        if reaped_at:
            self.begin_stage(role, "respawn", reaped_at)
            self.reaped_at = 0.0
        self.begin_stage(role, "fork", forked_at)

    def note_loss(self) -> None:
        """Whoever reaps a model worker or its arbiter: the moment, for the successor's timeline."""
        self.lost_at, self.reaped_at = self.engine_beat, time.monotonic()

    def track(self, role: Role) -> Track:
        """Where `role` writes at the moment."""
        track: Track = (self.restart if self.has_restarted[role] else self.start)[role]
        return track

    def begin_stage(self, role: Role, name: str, at: float = 0.0) -> Stage | None:
        """End the role's running stage and begin the next; None when its start is over."""
        return self.track(role).begin(role.name.lower(), name, at)

    @contextlib.contextmanager
    def stage(self, role: Role, name: str) -> Iterator[Stage | None]:
        """A timeline row around a block of code. It stays unfinished if the block raises. They do not nest."""
        stage = self.begin_stage(role, name)
        yield stage
        if stage is not None and not stage.end:
            stage.end = time.monotonic()

    def mark_ready(self, role: Role) -> None:
        """The role's start is over; its stages from now on get no rows."""
        self.track(role).mark_ready()

    def timeline(self) -> list[Stage]:
        """All rows of the service's start so far, in the order of their begin."""
        rows = [stage for track in self.start for stage in track.rows()]
        return sorted(rows, key=lambda stage: float(stage.begin))

    @property
    def num_stages_begun(self) -> int:
        """Of all roles, restarts included: it moves whenever anybody does."""
        return sum(track.num_stages for tracks in (self.start, self.restart) for track in tracks)
