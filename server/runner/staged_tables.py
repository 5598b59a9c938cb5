"""The block tables in one host buffer, a row per slot: what was written for an earlier step is not written again.

Knows rows of integers. Does not know requests or steps.
"""

from array import array
from collections.abc import Sequence

from server.ops.interface import BatchLimits

MIN_COLUMNS = 8


class TableWidth:
    """Columns of the block tables of a step: few when requests are short, since all rows are uploaded for each step.

    A power of two, as a change rewrites all rows of a buffer; up to four times what is needed stays as it is.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._most = limits.max_blocks_per_request
        self._columns = 0

    def fit(self, longest: int) -> int:
        """Columns for a longest table of `longest` blocks."""
        assert longest <= self._most, f"{longest} blocks of a request, a table has {self._most}"
        if not longest <= self._columns <= max(4 * longest, MIN_COLUMNS):
            self._columns = min(max(MIN_COLUMNS, 1 << (longest - 1).bit_length()), self._most)
        return self._columns


class StagedTables:
    """The rows of one host buffer. Tables are told apart by identity: whoever changes one makes another tuple."""

    def __init__(self, words: memoryview, limits: BatchLimits) -> None:
        self._words = words
        self._num_blocks = limits.num_blocks
        self._written: list[tuple[int, ...]] = [()] * limits.max_num_requests
        self._columns = 0

    def write(self, slots: Sequence[int], tables: Sequence[tuple[int, ...]], columns: int) -> None:
        """Row `slots[i]` becomes `tables[i]`; what lies behind it in the row is left as it is."""
        if columns != self._columns:
            self._columns = columns
            self._written = [()] * len(self._written)
        written = self._written
        for slot, table in zip(slots, tables, strict=True):
            if written[slot] is not table:
                self._write_row(slot, table)

    def _write_row(self, slot: int, table: tuple[int, ...]) -> None:
        before = self._written[slot]
        first = len(before) if table[: len(before)] == before else 0  # mostly it has grown by a block
        tail = table[first:]
        if tail:
            assert min(tail) >= 0, f"block {min(tail)} of slot {slot}"
            assert max(tail) < self._num_blocks, f"block {max(tail)} of slot {slot}, the pool has {self._num_blocks}"
            begin = slot * self._columns
            self._words[begin + first : begin + len(table)] = array("i", tail)
        self._written[slot] = table
