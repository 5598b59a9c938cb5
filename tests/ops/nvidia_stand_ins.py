"""Stand-ins for cuda-bindings' module and for cuBLAS: real memory, real sums, and a list of what was called."""

import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver as real

SUCCESS = real.CUresult.CUDA_SUCCESS

# Calls that only answer; "handle" stands for a new one.
ANSWERS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetCount": (2,),
    "cuDeviceGetName": (b"Stand-in GPU\0\0\0",),
    "cuDeviceTotalMem": (1 << 37,),
    "cuMemGetInfo": (5, 7),
    "cuMemGetAllocationGranularity": (2 << 20,),
    "cuDevicePrimaryCtxRetain": ("handle",),
    "cuMemCreate": ("handle",),
    "cuMemImportFromShareableHandle": ("handle",),
    "cuMemAddressReserve": ("handle",),
    "cuStreamCreate": ("handle",),
    "cuEventCreate": ("handle",),
    "cuModuleLoadData": ("handle",),
    "cuModuleGetFunction": ("handle",),
    "cuStreamEndCapture": ("handle",),
    "cuGraphInstantiate": ("handle",),
}
ATTRIBUTES = {
    real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
    real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    real.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
}


# cudaDataType numbers
TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


class StandInCuda:
    """Names of types and constants are cuda-bindings' own. `failures`: call -> the code that it gives."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, Any] = {}
        self.can_share_memory = True
        self.is_capturing = True
        self._handles = itertools.count(0x1000)
        self._blocks: dict[int, Any] = {}
        self.registered: set[int] = set()

    def names(self) -> list[str]:
        """What was called, in order."""
        return [call[0] for call in self.calls]

    def arguments(self, name: str) -> tuple[Any, ...]:
        """Of the last call of that name."""
        return next(call[1:] for call in reversed(self.calls) if call[0] == name)

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        if not name.startswith("cu"):
            return value
        answer = getattr(self, "do_" + name, None) or self._answer(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            num_values = len(ANSWERS.get(name, ())) or hasattr(self, "do_" + name)
            if name in self.failures:
                return (self.failures[name], *[None] * num_values)
            result = answer(*arguments)
            return (SUCCESS, *(result if isinstance(result, tuple) else () if result is None else (result,)))

        return call

    def _answer(self, name: str) -> Callable[..., tuple[Any, ...]]:
        values = ANSWERS.get(name, ())
        return lambda *arguments: tuple(next(self._handles) if value == "handle" else value for value in values)

    def do_cuDeviceGet(self, index: int) -> Any:
        return real.CUdevice(index)

    def do_cuDeviceGetAttribute(self, attribute: Any, device: Any) -> int:
        return ATTRIBUTES.get(attribute, int(self.can_share_memory))

    def do_cuMemAlloc(self, num_bytes: int) -> int:
        return self._make(num_bytes)

    def do_cuMemHostAlloc(self, num_bytes: int, flags: int) -> int:
        return self._make(num_bytes)

    def do_cuMemFree(self, address: int) -> None:
        del self._blocks[address]

    def do_cuMemFreeHost(self, address: int) -> None:
        del self._blocks[address]

    def do_cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        self.registered.add(address)

    def do_cuMemHostUnregister(self, address: int) -> None:
        self.registered.remove(address)

    def do_cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> int:
        assert kind == real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return os.memfd_create("stand-in", 0)  # inherited on exec, as the driver's may be

    def do_cuStreamIsCapturing(self, stream: int) -> Any:
        status = real.CUstreamCaptureStatus
        active, none = status.CU_STREAM_CAPTURE_STATUS_ACTIVE, status.CU_STREAM_CAPTURE_STATUS_NONE
        return active if self.is_capturing else none

    def do_cuMemcpyHtoDAsync(self, dest: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(dest, source, num_bytes)

    do_cuMemcpyDtoHAsync = do_cuMemcpyDtoDAsync = do_cuMemcpyHtoDAsync

    def do_cuMemsetD8Async(self, dest: int, value: int, num_bytes: int, stream: int) -> None:
        ctypes.memset(dest, value, num_bytes)

    def _make(self, num_bytes: int) -> int:
        block = ctypes.create_string_buffer(num_bytes)
        self._blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)


class StandInCublas:
    """Both libraries in one: column-major GEMMs in host memory, as their manuals define them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: dict[str, int] = {}
        self.num_algorithms = 1
        self.refused: set[int] = set()  # first words of algorithms that the check finds unfit
        self.used: list[int] = []  # first words of the algorithms of all calls
        self.rows: list[int] = []  # of each question
        self.heuristics: list[dict[int, int]] = []  # the preferences of each question
        self.least_room = 0  # of workspace: with less it knows no algorithm
        self._objects: list[dict[Any, Any]] = [{}]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublas"):
            raise AttributeError(name)
        do = getattr(self, "do_" + name, None)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failures:
                return self.failures[name]
            return (do(*arguments) if do is not None else None) or 0

        return call

    def do_cublasGetStatusName(self, status: ctypes.c_int) -> bytes | None:
        return {13: b"CUBLAS_STATUS_EXECUTION_FAILED", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}.get(status.value)

    def do_cublasCreate_v2(self, handle: Any) -> None:
        handle._obj.value = 0xB1A5

    def do_cublasGemmEx(
        self, handle: Any, op_a: int, op_b: int, m: int, n: Any, k: int, alpha: Any, *rest: Any
    ) -> None:
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _algorithm = rest
        assert (handle.value, op_a, op_b, compute) == (0xB1A5, 1, 0, 68)
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        left = self._matrix(a, a_type, k, m, lda)
        right = self._matrix(b, b_type, k, n.value, ldb)
        out = self._matrix(c, c_type, m, n.value, ldc)
        out.copy_(left.double().T @ right.double())

    def do_cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> None:
        self._make(made, {"compute": compute.value, "scale": scale.value})

    def do_cublasLtMatrixLayoutCreate(self, made: Any, kind: Any, rows: Any, columns: Any, leading: Any) -> None:
        self._make(made, {"type": kind.value, 2: rows.value, 3: columns.value, 4: leading.value})

    def do_cublasLtMatmulPreferenceCreate(self, made: Any) -> None:
        self._make(made, {})

    def _set(self, handle: Any, which: Any, value: Any, num_bytes: Any) -> None:
        assert ctypes.sizeof(value._obj) == num_bytes.value
        self._objects[handle.value][which.value] = value._obj.value

    do_cublasLtMatmulDescSetAttribute = do_cublasLtMatrixLayoutSetAttribute = _set
    do_cublasLtMatmulPreferenceSetAttribute = _set

    def do_cublasLtMatmulAlgoGetHeuristic(self, handle: Any, desc: Any, *rest: Any) -> int:
        *_layouts, preference, num_wanted, found, num_found = rest
        self.rows.append(self._objects[_layouts[-1].value][3])
        self.heuristics.append(dict(self._objects[preference.value]))
        if 8 in self._objects[desc.value]:
            self.heuristics[-1][0] = self._objects[desc.value][8]  # how the bias is aligned
        if self._objects[preference.value][1] < self.least_room:
            return 15
        num_found._obj.value = min(num_wanted.value, self.num_algorithms)
        for index in range(num_found._obj.value):
            found[index].algorithm[0], found[index].workspace_bytes = 0xA1 + index, 512 * index
        return 0

    def do_cublasLtGetVersion(self) -> int:
        return 130101

    def do_cublasLtMatmulAlgoCheck(self, handle: Any, desc: Any, *rest: Any) -> int:
        *_layouts, asked, answer = rest
        answer._obj.workspace_bytes = asked._obj.workspace_bytes
        return 15 if asked._obj.algorithm[0] in self.refused else 0

    TILE_IDS = (18, 20, 24)

    def do_cublasLtMatmulAlgoCapGetAttribute(
        self, algorithm: Any, which: Any, numbers: Any, num_bytes: Any, num_written: Any
    ) -> int:
        if which.value == 7:  # the largest custom option
            numbers._obj.value = 3
        elif which.value == 6:
            num_written._obj.value = 4 * len(self.TILE_IDS)
            if numbers is not None:
                numbers[:] = self.TILE_IDS
        else:
            return 7
        return 0

    def do_cublasLtMatmulAlgoConfigSetAttribute(self, algorithm: Any, which: Any, value: Any, num_bytes: Any) -> None:
        """Attribute i is half-word 8 + i."""
        assert num_bytes.value == ctypes.sizeof(value._obj) == (2 if which.value == 8 else 4)
        half_words = (ctypes.c_uint16 * 32).from_address(ctypes.addressof(algorithm._obj))
        half_words[8 + which.value] = value._obj.value

    def do_cublasLtMatmulDescDestroy(self, desc: Any) -> None:
        self._objects[desc.value].clear()

    def do_cublasLtMatmul(self, handle: Any, desc: Any, alpha: Any, *rest: Any) -> None:
        a, a_desc, b, b_desc, beta, c, _c_desc, d, d_desc, algorithm, _workspace, _num_bytes, _stream = rest
        what = self._objects[desc.value]
        assert (what["compute"], what["scale"], what[3], what.get(4, 0)) == (68, 0, 1, 0)
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        assert c.value == d.value
        self.used.append(algorithm._obj.algorithm[0])
        left, right, out = (self._described(*pair) for pair in ((a, a_desc), (b, b_desc), (d, d_desc)))
        total = left.double().T @ right.double()
        if what.get(7) == 4:
            kind = self._objects[d_desc.value]["type"]
            total += self._matrix(ctypes.c_void_p(what[8]), kind, len(out), 1, len(out)).double()
        out.copy_(total)

    def _described(self, address: Any, handle: Any) -> torch.Tensor:
        layout = self._objects[handle.value]
        return self._matrix(address, layout["type"], layout[2], layout[3], layout[4])

    def _matrix(self, address: Any, kind: int, rows: int, columns: int, leading: int) -> torch.Tensor:
        """Column-major: element (i, j) lies at i + j * leading."""
        dtype = TYPES[kind]
        memory = (ctypes.c_ubyte * (leading * columns * dtype.itemsize)).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).view(columns, leading)[:, :rows].T

    def _make(self, made: Any, attributes: dict[Any, Any]) -> None:
        made._obj.value = len(self._objects)
        self._objects.append(attributes)
