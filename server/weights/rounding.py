"""Numbers between float32, bfloat16 and float16, as numpy arrays of their bits.

Knows the formats (IEEE 754; bfloat16 is the upper half of float32), rounds to nearest, ties to even. Imported by
converters only: a server that starts needs no numpy.
"""

import numpy as np
from numpy.typing import NDArray

from server.models.facts import DType

STORED_NAMES: dict[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # as safetensors calls them
LARGEST: dict[DType, float] = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}


def to_float32(data: bytes | bytearray | memoryview, dtype: DType) -> NDArray[np.float32]:
    """The exact values of little-endian `data`, one-dimensional."""
    if dtype == "float32":
        return np.frombuffer(data, dtype="<f4")
    if dtype == "float16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def from_float32(values: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """Round to `dtype`. The result's bytes are what a file stores; what is too large becomes infinite."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype("<f2")
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
    # NOTE: rounding a NaN could carry into the sign or make it infinite: it is cut off instead, with a bit kept set.
    return np.where(np.isnan(values), (bits >> 16).astype("<u2") | np.uint16(0x40), rounded)


def first_overflow(values: NDArray[np.float32], rounded: NDArray[np.generic], dtype: DType) -> float | None:
    """The first finite value that became infinite in `rounded`, if any."""
    if dtype == "float32":
        return None
    infinite = np.isinf(to_float32(rounded.tobytes(), dtype)) & np.isfinite(values)
    return float(values[infinite.argmax()]) if infinite.any() else None
