"""Numbers that many processes add to and each of them sums up, in one memory made before they fork.

A row per living writer, a column per number: nobody writes where another does, so there are no locks around a number
and none that a killed process could keep. Memory and not files, because a full disk or a folder that a cleaner has
removed must not end a request. Knows the interface that prometheus_client wants of a value; does not know any metric.
"""

import fcntl
import mmap
import os
from typing import Any

MAX_ROWS = 256
MAX_COLUMNS = 512
_NUMBER_BYTES = 8


class SharedValues:
    """Construct it, and take all columns, before the fork; a process claims its row with its first addition."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("model-server-metrics")
        num_bytes = MAX_ROWS * MAX_COLUMNS * _NUMBER_BYTES
        os.ftruncate(self._fd, num_bytes)
        self._numbers = memoryview(mmap.mmap(self._fd, num_bytes)).cast("d")
        self._num_columns = 0
        self._pid = 0
        self._row = 0

    def __del__(self) -> None:
        os.close(self._fd)

    def new_value(self, *_args: Any, **_kwargs: Any) -> "SharedValue":
        """The next column; in place of prometheus_client's own class of values, hence the arguments."""
        assert self._num_columns < MAX_COLUMNS, "more numbers than columns"
        self._num_columns += 1
        return SharedValue(self, self._num_columns - 1)

    def add(self, column: int, amount: float) -> None:
        """Add to this process's row."""
        if self._pid != os.getpid():
            self._row = self._claim_row()
            self._pid = os.getpid()
        self._numbers[self._row * MAX_COLUMNS + column] += amount

    def sum(self, column: int) -> float:
        """Over all rows: those of the dead were left as they were."""
        return sum(self._numbers[column::MAX_COLUMNS])

    def _claim_row(self) -> int:
        """The first that no living process has; it goes on from what its former owner left."""
        for row in range(MAX_ROWS - 1):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                continue
            return row
        return MAX_ROWS - 1  # shared by all beyond, who may lose an addition now and then


class SharedValue:
    """One number, with the methods that prometheus_client calls."""

    def __init__(self, values: SharedValues, column: int) -> None:
        self._values = values
        self._column = column

    def inc(self, amount: float) -> None:
        """Add."""
        self._values.add(self._column, amount)

    def get(self) -> float:
        """The sum over all processes."""
        return self._values.sum(self._column)

    def get_exemplar(self) -> None:
        """There are none."""
