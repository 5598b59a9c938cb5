"""GEMMs by cuBLAS through ctypes: finding the library, and calls whose argument blocks are made once per weight shape.

cuBLAS is column-major: out [m, n] in rows is its (n x m), and out = x @ weight.T is weight^T (n x k) by x (k x m).
Constants are those of cublas_api.h and cublasLt.h, version 13.
"""

import ctypes
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import StartupError
from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.cublas_lt import COMPUTE_32F, DATA_TYPES, OP_T, GemmKind, LtGemm
from server.ops.cuda.driver import DriverError, GemmAlgorithm, GemmProblem

# Lt comes first: libcublas needs it, and finds it then wherever it lies.
LIBRARY_NAMES = ("libcublasLt.so.13", "libcublas.so.13")
# Where NVIDIA's wheels put them, below a folder of sys.path.
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")

OP_N = 0
GEMM_DEFAULT = -1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16


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

    Without a bias cublasGemmEx chooses the algorithm, unless one is given. With either it is cublasLtMatmul, whose
    epilogue adds the bias to the fp32 sum before the one rounding. Sums of partial products are never rounded to less
    than fp32.
    """

    def __init__(self, library: CublasLibrary) -> None:
        self._library = library
        library.cublas.cublasGetStatusName.restype = ctypes.c_char_p
        library.lt.cublasLtGetVersion.restype = ctypes.c_size_t
        self._handle = ctypes.c_void_p()
        self._check(library.cublas.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        mode = ctypes.c_int(DISALLOW_REDUCED_PRECISION_REDUCTION)
        self._check(library.cublas.cublasSetMathMode(self._handle, mode), "cublasSetMathMode")
        self._gemm_ex = library.cublas.cublasGemmEx
        self._stream: int | None = None
        self._workspace: Buffer | None = None
        # By shape of weight, then dtypes; of Lt also whether there is a bias.
        self._plain: dict[tuple[tuple[int, ...], BufferDType, BufferDType], PlainGemm] = {}
        self._lt: dict[tuple[tuple[int, ...], BufferDType, BufferDType, bool], LtGemm] = {}

    @property
    def version(self) -> int:
        """Of cublasLt: algorithms are good for one version."""
        return int(self._library.lt.cublasLtGetVersion())

    def run(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        out: Buffer,
        workspace: Buffer,
        stream: int,
        algorithm: GemmAlgorithm | None = None,
    ) -> None:
        """out [m, n] = x [m, k] @ weight [n, k].T + bias [n]. n and k are multiples of 8, addresses of 16."""
        m, k = x.shape
        n = weight.shape[0]
        assert (n, k) == weight.shape, f"x {x.shape} does not suit weight {weight.shape}"
        assert (m, n) == out.shape, f"x {x.shape} and weight {weight.shape} do not make {out.shape}"
        assert weight.dtype == x.dtype, f"{x.dtype} x {weight.dtype}"
        if m == 0:
            return
        if bias is None and algorithm is None:
            self._run_plain(x, weight, out, workspace, stream)
            return
        assert bias is None or bias.dtype == x.dtype, f"with a bias all four are of one dtype, not {bias.dtype}"
        key = (weight.shape, weight.dtype, out.dtype, bias is not None)
        gemm = self._lt.get(key) or self._lt_gemm(GemmKind.of(weight, out.dtype, bias is not None))
        bias_address = 0 if bias is None else bias.address
        gemm.run(m, x.address, weight.address, bias_address, out.address, workspace, stream, algorithm)

    def search(self, problem: GemmProblem, max_results: int) -> list[GemmAlgorithm]:
        """See LtGemm.search."""
        return self._lt_gemm(GemmKind.of_problem(problem)).search(problem.m, problem.workspace_bytes, max_results)

    def vary(self, problem: GemmProblem, algorithm: GemmAlgorithm) -> list[GemmAlgorithm]:
        """See LtGemm.vary."""
        return self._lt_gemm(GemmKind.of_problem(problem)).vary(problem.m, problem.workspace_bytes, algorithm)

    def _lt_gemm(self, kind: GemmKind) -> LtGemm:
        key = ((kind.n, kind.k), kind.dtype, kind.out_dtype, kind.has_bias)
        if key not in self._lt:
            self._lt[key] = LtGemm(self._library.lt, self._handle, kind, self._check)
        return self._lt[key]

    def _run_plain(self, x: Buffer, weight: Buffer, out: Buffer, workspace: Buffer, stream: int) -> None:
        if stream != self._stream or workspace is not self._workspace:
            self._bind(stream, workspace)
        key = (weight.shape, weight.dtype, out.dtype)
        gemm = self._plain.get(key)
        if gemm is None:
            gemm = self._plain[key] = PlainGemm(self._handle, GemmKind.of(weight, out.dtype, has_bias=False))
        gemm.m.value = x.shape[0]
        gemm.weight.value = weight.address
        gemm.x.value = x.address
        gemm.out.value = out.address
        status = self._gemm_ex(*gemm.arguments)
        if status:
            self._check(status, f"cublasGemmEx of x {x.shape}, weight {weight.shape}, {x.dtype} -> {out.dtype}")

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


class PlainGemm:
    """The argument block of cublasGemmEx for one kind of GEMM; m and the three addresses change from call to call."""

    def __init__(self, handle: ctypes.c_void_p, kind: GemmKind) -> None:
        self.m = ctypes.c_int()
        self.weight, self.x, self.out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        # Small ints need no object: they are what a call without prototype takes for C ints.
        data_type, out_type = DATA_TYPES[kind.dtype], DATA_TYPES[kind.out_dtype]
        self.arguments = (
            *(handle, OP_T, OP_N, kind.n, self.m, kind.k),
            *(ctypes.byref(self._one), self.weight, data_type, kind.k, self.x, data_type, kind.k),
            *(ctypes.byref(self._zero), self.out, out_type, kind.n, COMPUTE_32F, GEMM_DEFAULT),
        )
