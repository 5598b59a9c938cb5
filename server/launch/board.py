"""The board: one shared anonymous mapping made before any fork. Everyone reads it without asking anyone.

Each field has one writing role. Aligned 8-byte stores are atomic on the machines we run on, so there are no locks.
Times are time.monotonic(), which all processes of a machine share. It survives its writers and is never trusted with
anything that must be consistent across fields.
"""

import ctypes
import mmap
import time
from enum import IntEnum

MAX_EXECUTING = 1024
MAX_STAGES = 64
_TEXT_BYTES = 512


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
        ("loader_beat", ctypes.c_double),
        ("bytes_total", ctypes.c_int64),
        ("bytes_loaded", ctypes.c_int64),
        # arbiter and model worker
        ("model_state", ctypes.c_int64),
        ("model_pid", ctypes.c_int64),
        ("boot_attempts", ctypes.c_int64),
        ("num_engine_starts", ctypes.c_int64),
        ("ready_at", ctypes.c_double),
        ("engine_beat", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("num_running", ctypes.c_int64),
        ("num_waiting", ctypes.c_int64),
        ("num_kv_blocks", ctypes.c_int64),
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
        ("num_bad_forks", ctypes.c_int64),
        ("num_web_workers_seen", ctypes.c_int64),
        # start-up timeline: rows are claimed in order by whoever starts a stage
        ("num_stages", ctypes.c_int64),
        ("stages", Stage * MAX_STAGES),
    ]

    @classmethod
    def create(cls) -> "Board":
        """A zeroed board in MAP_SHARED memory, inherited by every fork; freed with the last process."""
        return cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))

    def halt(self, code: int, reason: str) -> None:
        """Ask for the end of the service. The first reason stands. The caller still has to wake the master."""
        if not self.halt_code:
            self.halt_reason = reason.encode(errors="replace")[: _TEXT_BYTES - 1]
            self.halt_code = code

    def begin_stage(self, role: str, name: str) -> Stage | None:
        """Claim a timeline row; None when the timeline is full (later restarts are not start-up)."""
        index = self.num_stages
        if index >= MAX_STAGES:
            return None
        self.num_stages = index + 1
        stage: Stage = self.stages[index]
        stage.role, stage.name = role.encode()[:15], name.encode()[:31]
        stage.begin, stage.end, stage.num_bytes = time.monotonic(), 0.0, 0
        return stage
