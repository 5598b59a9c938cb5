"""The rows of the start-up timeline: what one role did from its fork until it was ready, one stage after the other.

A process begins its next stage at the instant in which it ends the one before, so stages are disjoint and leave no gap.
Knows memory and clocks; which role owns which track is the board's matter.
"""

import ctypes
import os
import time
from collections.abc import Iterator

MAX_STAGES = 40  # of one role: several attempts, until one is ready
IMPORTED_AT = time.monotonic()  # by then Python and Gunicorn had started: this is among the first of our modules


class Stage(ctypes.Structure):
    """One row. Times are time.monotonic(); `end` 0: still running, or its process died in it."""

    role: bytes
    name: bytes
    pid: int
    begin: float
    end: float
    num_bytes: int
    _fields_ = [
        ("role", ctypes.c_char * 16),
        ("name", ctypes.c_char * 32),
        ("pid", ctypes.c_int64),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
        ("num_bytes", ctypes.c_int64),
    ]


class Track(ctypes.Structure):
    """The rows of one role. One process writes at a time, hence no lock; readers may look at any moment.

    `ready_at` 0: not ready yet. Later stages are no part of the start and get no row. `lost_at`: of a restart, the
    last sign of life of the model worker whose loss, or whose arbiter's, it makes up for.
    """

    ready_at: float
    lost_at: float
    num_stages: int
    _fields_ = [
        ("ready_at", ctypes.c_double),
        ("lost_at", ctypes.c_double),
        ("num_stages", ctypes.c_int64),
        ("stages", Stage * MAX_STAGES),
    ]

    def begin(self, role: str, name: str, at: float = 0.0) -> Stage | None:
        """End the running stage and begin another, now or `at`; None if the role is ready.

        With all rows in use the last one is written again: it always says what runs now.
        """
        at = at or time.monotonic()
        self.end(at)
        if self.ready_at:
            return None
        index = self.num_stages = min(self.num_stages, MAX_STAGES - 1)
        stage: Stage = self.stages[index]
        stage.role, stage.name, stage.pid = role.encode(), name.encode()[:31], os.getpid()
        stage.begin, stage.end, stage.num_bytes = at, 0.0, 0
        self.num_stages = index + 1  # last: a reader never sees a half-written row
        return stage

    def end(self, at: float = 0.0) -> None:
        """End the running stage, if this process has one. What a dead process was doing stays unfinished."""
        stage = self.stages[self.num_stages - 1] if self.num_stages else None
        if stage is not None and not stage.end and stage.pid == os.getpid():
            stage.end = at or time.monotonic()

    def mark_ready(self) -> None:
        """The role's start is over: its last stage ends now. The first call counts."""
        if not self.ready_at:
            now = time.monotonic()
            self.end(now)
            self.ready_at = now

    def reset(self, lost_at: float) -> None:
        """Forget everything, for the start of a successor."""
        self.num_stages = 0
        self.ready_at, self.lost_at = 0.0, lost_at

    def rows(self) -> Iterator[Stage]:
        """In the order in which they began."""
        return (self.stages[index] for index in range(self.num_stages))
