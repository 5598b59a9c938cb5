"""Random numbers for measurements, and results compared, without NumPy: bytes are moved by slices, floats by map.

The power that a GPU draws, and so its clock, depends on the operands' bits: mantissas and signs are random here.
"""

import struct
from collections.abc import Sequence
from operator import abs as magnitude
from operator import sub
from random import Random

from server.ops.cuda.buffer import ITEM_BYTES, BufferDType

# High bytes, sign aside, of magnitudes from 0.5 to 2, and from 1/128 to 1/32: as activations and weights have them.
_INPUT_BYTES: dict[BufferDType, range] = {"bfloat16": range(0x3F, 0x40), "float16": range(0x38, 0x40)}
_WEIGHT_BYTES: dict[BufferDType, range] = {"bfloat16": range(0x3C, 0x3D), "float16": range(0x20, 0x28)}
# Of the largest magnitude: both results are rounded, gate and up perhaps twice.
TOLERANCES: dict[BufferDType, float] = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "float32": 2.0**-10}


def random_inputs(count: int, dtype: BufferDType, random: Random) -> bytearray:
    """Numbers as activations are."""
    return _random(count, _INPUT_BYTES[dtype], random)


def random_weights(count: int, dtype: BufferDType, random: Random) -> bytearray:
    """Numbers as weights are."""
    return _random(count, _WEIGHT_BYTES[dtype], random)


def _random(count: int, high_bytes: range, random: Random) -> bytearray:
    table = bytes((byte & 0x80) | high_bytes[byte % len(high_bytes)] for byte in range(256))
    values = bytearray(2 * count)
    values[0::2] = random.randbytes(count)
    values[1::2] = random.randbytes(count).translate(table)
    return values


def as_floats(data: bytes | bytearray | memoryview, dtype: BufferDType) -> Sequence[float]:
    """The numbers of raw memory."""
    if dtype == "float16":
        return struct.unpack(f"<{len(data) // ITEM_BYTES[dtype]}e", data)
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data = wide
    return memoryview(data).cast("f")


def agree(found: Sequence[float], expected: Sequence[float], dtype: BufferDType) -> bool:
    """Whether every number is as near as roundings allow; one that is NaN is not."""
    limit = TOLERANCES[dtype] * max(map(magnitude, expected), default=0.0)
    within = map(limit.__ge__, map(magnitude, map(sub, found, expected)))
    return len(found) == len(expected) and all(within)
