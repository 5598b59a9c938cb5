"""GEMMs by cuBLAS through ctypes: finding the library, and calls whose argument blocks are made once per weight shape.

cuBLAS is column-major: out [m, n] in rows is its (n x m), and out = x @ weight.T is weight^T (n x k) by x (k x m).
Constants are those of cublas_api.h and cublasLt.h, version 13.
"""

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import StartupError
from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import DriverError

# Lt comes first: libcublas needs it, and finds it then wherever it lies.
LIBRARY_NAMES = ("libcublasLt.so.13", "libcublas.so.13")
# Where NVIDIA's wheels put them, below a folder of sys.path.
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")

OP_N, OP_T = 0, 1
COMPUTE_32F = 68
GEMM_DEFAULT = -1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
R_32F = 0
DATA_TYPES: dict[BufferDType, int] = {"float32": R_32F, "float16": 2, "bfloat16": 14}

LT_LAYOUT_COLS = 3
LT_DESC_TRANSA = 3
LT_DESC_EPILOGUE = 7
LT_DESC_BIAS_POINTER = 8
LT_EPILOGUE_BIAS = 4
LT_PREF_MAX_WORKSPACE_BYTES = 1
LT_PREF_REDUCTION_SCHEME_MASK = 3
LT_PREF_MIN_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D
LT_REDUCTION_COMPUTE_TYPE = 2  # partial sums in fp32; no split at all is always allowed

# Algorithms that are remembered per weight shape: thousands of prefill sizes come and go, 300 bytes each.
MAX_ALGORITHMS = 1024


class LtHeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm (its first 64 bytes) and what it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class CublasLibrary:
    """The two libraries. Their functions have no prototypes: give ctypes values, plain ints are cut to 32 bits."""

    cublas: Any
    lt: Any


def load_cublas(search_folders: Iterable[str] | None = None) -> CublasLibrary:
    """From NVIDIA's wheels below `search_folders` (default: sys.path), else as the dynamic linker finds it."""
    folders = [Path(folder) / below for folder in search_folders or sys.path for below in WHEEL_FOLDERS]
    lt, cublas = (_load(name, folders) for name in LIBRARY_NAMES)
    return CublasLibrary(cublas, lt)


def _load(name: str, folders: list[Path]) -> ctypes.CDLL:
    path = next((folder / name for folder in folders if (folder / name).exists()), Path(name))
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise StartupError(
            f"cannot load {path}: {error}; looked in {' and '.join(WHEEL_FOLDERS)} below the folders of sys.path, then "
            "where the dynamic linker looks; install the extra `cuda`, which brings nvidia-cublas, version 13"
        ) from error


class Gemms:
    """One cuBLAS handle of the context that is current, for one thread at a time.

    Without a bias cublasGemmEx chooses the algorithm. With one it is cublasLtMatmul, whose epilogue adds the bias to
    the fp32 sum before the one rounding. Sums of partial products are never rounded to less than fp32.
    """

    def __init__(self, library: CublasLibrary) -> None:
        self._library = library
        library.cublas.cublasGetStatusName.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._check(library.cublas.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        mode = ctypes.c_int(DISALLOW_REDUCED_PRECISION_REDUCTION)
        self._check(library.cublas.cublasSetMathMode(self._handle, mode), "cublasSetMathMode")
        self._gemm_ex = library.cublas.cublasGemmEx
        self._stream: int | None = None
        self._workspace: Buffer | None = None
        # By shape and dtype of weight, then dtypes.
        self._plain: dict[tuple[tuple[int, ...], BufferDType, BufferDType, BufferDType], PlainGemm] = {}
        self._biased: dict[tuple[tuple[int, ...], BufferDType, BufferDType, BufferDType, BufferDType], BiasedGemm] = {}

    def run(self, x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer, workspace: Buffer, stream: int) -> None:
        """out [m, n] = x [m, k] @ weight [n, k].T + bias [n]. n and k are multiples of 8, addresses of 16."""
        m, k = x.shape
        n = weight.shape[0]
        assert (n, k) == weight.shape, f"x {x.shape} does not suit weight {weight.shape}"
        assert (m, n) == out.shape, f"x {x.shape} and weight {weight.shape} do not make {out.shape}"
        if m == 0:
            return
        if bias is None:
            self._run_plain(x, weight, out, workspace, stream)
        else:
            self._run_biased(x, weight, bias, out, workspace, stream)

    def _run_plain(self, x: Buffer, weight: Buffer, out: Buffer, workspace: Buffer, stream: int) -> None:
        if stream != self._stream or workspace is not self._workspace:
            self._bind(stream, workspace)
        key = (weight.shape, weight.dtype, x.dtype, out.dtype)
        gemm = self._plain.get(key)
        if gemm is None:
            assert weight.dtype == x.dtype, f"{x.dtype} x {weight.dtype}"
            gemm = self._plain[key] = PlainGemm(self._handle, weight.shape, x.dtype, out.dtype)
        gemm.m.value = x.shape[0]
        gemm.weight.value = weight.address
        gemm.x.value = x.address
        gemm.out.value = out.address
        status = self._gemm_ex(*gemm.arguments)
        if status:
            self._check(status, f"cublasGemmEx of x {x.shape}, weight {weight.shape}, {x.dtype} -> {out.dtype}")

    def _run_biased(self, x: Buffer, weight: Buffer, bias: Buffer, out: Buffer, workspace: Buffer, stream: int) -> None:
        key = (weight.shape, weight.dtype, x.dtype, out.dtype, bias.dtype)
        gemm = self._biased.get(key)
        if gemm is None:
            assert len(set(key[1:])) == 1, f"with a bias all four are of one dtype, not {key[1:]}"
            gemm = self._biased[key] = BiasedGemm(self._library, self._handle, weight.shape, x.dtype, self._check)
        gemm.run(x.shape[0], x.address, weight.address, bias.address, out.address, workspace, stream)

    def _bind(self, stream: int, workspace: Buffer) -> None:
        # In this order: a new stream takes the workspace away.
        cublas, address = self._library.cublas, ctypes.c_void_p(workspace.address)
        self._check(cublas.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
        status = cublas.cublasSetWorkspace_v2(self._handle, address, ctypes.c_size_t(workspace.num_bytes))
        self._check(status, "cublasSetWorkspace")
        self._stream, self._workspace = stream, workspace

    def _check(self, status: int, call: str) -> None:
        if status:
            name = self._library.cublas.cublasGetStatusName(ctypes.c_int(status))
            raise DriverError(call, status, name.decode() if name else "unknown status")


def _sizes(weight_shape: tuple[int, ...]) -> tuple[int, int]:
    n, k = weight_shape
    assert n % 8 == k % 8 == 0, f"both sizes of a weight must be multiples of 8, not {weight_shape}"
    return n, k


class PlainGemm:
    """The argument block of cublasGemmEx for one weight shape; m and the three addresses change from call to call."""

    def __init__(
        self, handle: ctypes.c_void_p, weight_shape: tuple[int, ...], dtype: BufferDType, out_dtype: BufferDType
    ) -> None:
        assert out_dtype in (dtype, "float32"), f"{dtype} -> {out_dtype}"
        n, k = _sizes(weight_shape)
        self.m = ctypes.c_int()
        self.weight, self.x, self.out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        data_type, size_n, size_k = ctypes.c_int(DATA_TYPES[dtype]), ctypes.c_int(n), ctypes.c_int(k)
        self.arguments = (
            *(handle, ctypes.c_int(OP_T), ctypes.c_int(OP_N), size_n, self.m, size_k),
            *(ctypes.byref(self._one), self.weight, data_type, size_k, self.x, data_type, size_k),
            *(ctypes.byref(self._zero), self.out, ctypes.c_int(DATA_TYPES[out_dtype]), size_n),
            *(ctypes.c_int(COMPUTE_32F), ctypes.c_int(GEMM_DEFAULT)),
        )


class BiasedGemm:
    """Descriptors of cublasLtMatmul for one weight shape, and the algorithm per m, chosen when it is first seen.

    The descriptors are made once; the number of rows and the bias's address are written into them where they change.
    """

    def __init__(
        self,
        library: CublasLibrary,
        handle: ctypes.c_void_p,
        weight_shape: tuple[int, ...],
        dtype: BufferDType,
        check: Callable[[int, str], None],
    ) -> None:
        n, k = _sizes(weight_shape)
        self._lt = library.lt
        self._check = check
        self._handle = handle  # a cuBLAS handle is also one of Lt
        self._shape = f"n {n}, k {k}, {dtype}, with bias"
        data_type = DATA_TYPES[dtype]
        self._descriptor = self._create("cublasLtMatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(R_32F))
        self._set_descriptor(LT_DESC_TRANSA, ctypes.c_int(OP_T))
        self._set_descriptor(LT_DESC_EPILOGUE, ctypes.c_int(LT_EPILOGUE_BIAS))
        self._weight_layout = self._create_layout(data_type, k, n)
        self._x_layout = self._create_layout(data_type, k, 1)
        self._out_layout = self._create_layout(data_type, n, 1)
        self._m, self._bias = 1, 0
        self._algorithms: OrderedDict[tuple[int, int, int], LtHeuristicResult] = OrderedDict()
        self._weight, self._x, self._out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._front = (
            *(handle, self._descriptor, ctypes.byref(self._one), self._weight, self._weight_layout),
            *(self._x, self._x_layout, ctypes.byref(self._zero), self._out, self._out_layout),
            *(self._out, self._out_layout),
        )

    def run(self, m: int, x: int, weight: int, bias: int, out: int, workspace: Buffer, stream: int) -> None:
        """Addresses of x [m, k], weight [n, k], bias [n], out [m, n]."""
        if m != self._m:
            self._set_rows(m)
        alignment = 256 if (x | weight | bias | out) & 255 == 0 else 16
        key = (m, alignment, workspace.num_bytes)
        found = self._algorithms.get(key)
        if found is None:
            found = self._choose(*key)
        else:
            self._algorithms.move_to_end(key)
        if bias != self._bias:
            self._set_bias(bias)
        self._x.value, self._weight.value, self._out.value = x, weight, out
        room, num_bytes = ctypes.c_void_p(workspace.address), ctypes.c_size_t(workspace.num_bytes)
        status = self._lt.cublasLtMatmul(*self._front, ctypes.byref(found), room, num_bytes, ctypes.c_void_p(stream))
        if status:
            self._check(status, f"cublasLtMatmul of m {m}, {self._shape}")

    def _set_rows(self, m: int) -> None:
        columns = ctypes.c_uint64(m)
        for layout in (self._x_layout, self._out_layout):
            status = self._lt.cublasLtMatrixLayoutSetAttribute(
                layout, ctypes.c_int(LT_LAYOUT_COLS), ctypes.byref(columns), ctypes.c_size_t(8)
            )
            self._check(status, "cublasLtMatrixLayoutSetAttribute")
        self._m = m

    def _set_bias(self, address: int) -> None:
        self._set_descriptor(LT_DESC_BIAS_POINTER, ctypes.c_void_p(address))
        self._bias = address

    def _choose(self, m: int, alignment: int, workspace_bytes: int) -> LtHeuristicResult:
        self._set_bias(alignment)  # the choice looks at how the bias is aligned, not at what it is
        preference = self._create("cublasLtMatmulPreferenceCreate")
        try:
            self._prefer(preference, LT_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace_bytes))
            self._prefer(preference, LT_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(LT_REDUCTION_COMPUTE_TYPE))
            for which in LT_PREF_MIN_ALIGNMENTS:
                self._prefer(preference, which, ctypes.c_uint32(alignment))
            found = self._ask_heuristic(m, preference)
        finally:
            self._lt.cublasLtMatmulPreferenceDestroy(preference)
        self._algorithms[m, alignment, workspace_bytes] = found
        if len(self._algorithms) > MAX_ALGORITHMS:
            self._algorithms.popitem(last=False)
        return found

    def _ask_heuristic(self, m: int, preference: ctypes.c_void_p) -> LtHeuristicResult:
        found, num_found = LtHeuristicResult(), ctypes.c_int()
        layouts = (self._weight_layout, self._x_layout, self._out_layout, self._out_layout)
        status = self._lt.cublasLtMatmulAlgoGetHeuristic(
            *(self._handle, self._descriptor, *layouts, preference, ctypes.c_int(1)),
            *(ctypes.byref(found), ctypes.byref(num_found)),
        )
        self._check(status, f"cublasLtMatmulAlgoGetHeuristic of m {m}, {self._shape}")
        if num_found.value != 1:
            raise DriverError(f"cublasLtMatmulAlgoGetHeuristic of m {m}, {self._shape}", found.state, "no algorithm")
        return found

    def _prefer(self, preference: ctypes.c_void_p, which: int, value: Any) -> None:
        status = self._lt.cublasLtMatmulPreferenceSetAttribute(
            preference, ctypes.c_int(which), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        self._check(status, "cublasLtMatmulPreferenceSetAttribute")

    def _set_descriptor(self, which: int, value: Any) -> None:
        status = self._lt.cublasLtMatmulDescSetAttribute(
            self._descriptor, ctypes.c_int(which), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        self._check(status, "cublasLtMatmulDescSetAttribute")

    def _create_layout(self, data_type: int, num_rows: int, num_columns: int) -> ctypes.c_void_p:
        return self._create(
            "cublasLtMatrixLayoutCreate",
            *(ctypes.c_int(data_type), ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns)),
            ctypes.c_int64(num_rows),
        )

    def _create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(getattr(self._lt, name)(ctypes.byref(made), *arguments), name)
        return made
