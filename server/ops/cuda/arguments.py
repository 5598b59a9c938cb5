"""How the arguments of a kernel lie in host memory when it is launched. Knows Triton's type names and no driver."""

import ctypes
import struct
from collections.abc import Sequence

from server.ops.cuda.driver import Parameter

# Kernels that Triton compiled take pointers to two scratch areas after their own parameters; ours use none.
NUM_SCRATCH_POINTERS = 2

_STRUCT_CODES = {
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "u16": "H",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}


class PackedArguments:
    """The argument values of one kernel at fixed addresses, and the pointer array that a launch takes.

    Made once; a launch overwrites the values by one `pack_into`. The launch call copies them, so that the next launch
    may overwrite them at once, but two threads must not launch the same function.
    """

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        codes = [_struct_code(parameter) for parameter in parameters] + ["Q"] * NUM_SCRATCH_POINTERS
        # Native alignment ("@") is each type's own size, which is what the device wants.
        self._pack_into = struct.Struct("@" + "".join(codes[: len(parameters)])).pack_into
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        self._values = ctypes.create_string_buffer(ends[-1])  # zeros: what the scratch pointers stay
        start = ctypes.addressof(self._values)
        self.offsets = tuple(end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True))
        self._pointers = (ctypes.c_void_p * len(codes))(*(start + offset for offset in self.offsets))
        self.address = ctypes.addressof(self._pointers)

    def write(self, values: Sequence[int | float]) -> None:
        """Raises struct.error if a value does not fit its parameter, or their number is wrong."""
        self._pack_into(self._values, 0, *values)

    @property
    def raw(self) -> bytes:
        """The bytes as they lie there, scratch pointers included."""
        return self._values.raw


def _struct_code(parameter: Parameter) -> str:
    if parameter.type.startswith("*"):
        return "Q"
    code = _STRUCT_CODES.get(parameter.type)
    if code is None:
        raise ValueError(f"parameter {parameter.name}: no way to pass type {parameter.type!r}")
    return code
