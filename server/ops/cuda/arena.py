"""One piece of device memory that is given out front to back, for as long as the process lives.

Knows sizes and alignment. Does not know what the buffers are for.
"""

import math
from dataclasses import dataclass

from server.ops.cuda.buffer import ITEM_BYTES, Buffer, BufferDType
from server.ops.cuda.driver import Driver

ALIGNMENT = 256  # what kernels may assume of every buffer


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer that is yet to be made."""

    shape: tuple[int, ...]
    dtype: BufferDType

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes from an arena."""
        return aligned(math.prod(self.shape) * ITEM_BYTES[self.dtype])


class Arena:
    """One allocation. Its contents are whatever the memory held before. Raises OutOfDeviceMemory."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self._next_address = driver.allocate(num_bytes)
        self._end_address = self._next_address + num_bytes
        assert self._next_address % ALIGNMENT == 0, f"memory at {self._next_address:#x}"

    def take(self, spec: BufferSpec) -> Buffer:
        """The next buffer."""
        buffer = Buffer(self._next_address, spec.shape, spec.dtype, self)
        self._next_address += spec.num_bytes
        assert self._next_address <= self._end_address, f"the arena ends before {spec}"
        return buffer
