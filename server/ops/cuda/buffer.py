"""An address with a shape: what decoder, kv and runner pass around when no torch is there to hold tensors."""

import math
from dataclasses import dataclass, field
from typing import Literal

BufferDType = Literal["bfloat16", "float16", "float32", "int32", "int64", "uint8"]

ITEM_BYTES: dict[BufferDType, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Row-major, contiguous memory that the driver can reach. `owner` is kept alive by every view of it."""

    address: int
    shape: tuple[int, ...]
    dtype: BufferDType
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def num_elements(self) -> int:
        """Entries, all dimensions together."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes from `address` on."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    def rows(self, begin: int, end: int) -> "Buffer":
        """Rows begin .. end - 1, without copy."""
        assert 0 <= begin <= end <= self.shape[0], f"rows {begin} .. {end} of {self.shape}"
        row_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        return Buffer(self.address + begin * row_bytes, (end - begin, *self.shape[1:]), self.dtype, self.owner)

    def view(self, *shape: int) -> "Buffer":
        """The same memory in another shape."""
        assert math.prod(shape) == self.num_elements, f"{self.shape} cannot be seen as {shape}"
        return Buffer(self.address, shape, self.dtype, self.owner)
