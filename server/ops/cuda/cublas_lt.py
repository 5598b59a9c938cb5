"""cublasLtMatmul: GEMMs with a bias, and GEMMs by an algorithm that was chosen beforehand. Constants of cublasLt.h, 13.

Knows one weight shape at a time; which algorithm is asked for, and why, is the caller's matter.
"""

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import DriverError, GemmAlgorithm, GemmProblem

OP_T = 1
COMPUTE_32F = 68
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
REDUCTION_COMPUTE_TYPE = 2  # partial sums in fp32; no split at all is always allowed

WIDEST_ALIGNMENT = 256  # of addresses, as far as algorithms care
# Algorithms that are remembered per weight shape: thousands of prefill sizes come and go, 300 bytes each.
MAX_ALGORITHMS = 1024
# Descriptors, one per bias: more than any model has layers.
MAX_DESCRIPTORS = 512

logger = logging.getLogger(__name__)


class LtHeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm (its first 64 bytes) and what it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @classmethod
    def of(cls, algorithm: GemmAlgorithm) -> "LtHeuristicResult":
        """As it was when the search found it."""
        found = cls(workspace_bytes=algorithm.workspace_bytes)
        ctypes.memmove(ctypes.byref(found), algorithm.data, ctypes.sizeof(found.algorithm))
        return found

    def as_algorithm(self) -> GemmAlgorithm:
        """What can be stored."""
        return GemmAlgorithm(bytes(self.algorithm), self.workspace_bytes)


@dataclass(frozen=True, slots=True)
class GemmKind:
    """What the descriptors of a GEMM depend on: weight [n, k] and x of one dtype, out [m, n]."""

    n: int
    k: int
    dtype: BufferDType
    out_dtype: BufferDType
    has_bias: bool

    @classmethod
    def of(cls, weight: Buffer, out_dtype: BufferDType, has_bias: bool) -> "GemmKind":
        """Of x in the weight's dtype."""
        n, k = weight.shape
        return cls(n, k, weight.dtype, out_dtype, has_bias)

    @classmethod
    def of_problem(cls, problem: GemmProblem) -> "GemmKind":
        """Whatever its number of rows."""
        return cls(problem.n, problem.k, problem.dtype, problem.out_dtype, problem.has_bias)

    def __post_init__(self) -> None:
        assert self.n % 8 == self.k % 8 == 0, f"both sizes of a weight must be multiples of 8, not {(self.n, self.k)}"
        assert self.out_dtype == self.dtype or (self.out_dtype == "float32" and not self.has_bias), f"{self}"

    def __str__(self) -> str:
        return f"n {self.n}, k {self.k}, {self.dtype} -> {self.out_dtype}" + (", with bias" if self.has_bias else "")


class LtGemm:
    """Descriptors of cublasLtMatmul for one kind of GEMM, and the algorithm per m, settled when it is first seen.

    An algorithm that is asked for is checked then: if this cuBLAS cannot run it, its own choice takes its place.
    """

    def __init__(self, lt: Any, handle: ctypes.c_void_p, kind: GemmKind, check: Callable[[int, str], None]) -> None:
        self._lt, self._kind, self._check = lt, kind, check
        self._handle = handle  # a cuBLAS handle is also one of Lt
        data_type = DATA_TYPES[kind.dtype]
        self._weight_layout = self._create_layout(data_type, kind.k, kind.n)
        self._x_layout = self._create_layout(data_type, kind.k, 1)
        self._out_layout = self._create_layout(DATA_TYPES[kind.out_dtype], kind.n, 1)
        self._m = 1
        self._question = self._create_descriptor()  # for choosing: its bias is an alignment
        if kind.has_bias:
            self._set_descriptor(self._question, LT_DESC_BIAS_POINTER, ctypes.c_void_p(WIDEST_ALIGNMENT))
        self._descriptors: dict[int, ctypes.c_void_p] = {}  # by the bias's address
        self._settled: OrderedDict[tuple[int, int, int, bytes | None], LtHeuristicResult] = OrderedDict()
        self._refused: set[GemmAlgorithm] = set()
        self._bound: Buffer | None = None  # the workspace of the call before
        self._num_bytes = 0
        self._workspace, self._workspace_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        self._stream = ctypes.c_void_p()
        self._weight, self._x, self._out = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._matmul = lt.cublasLtMatmul
        self._operands = (
            *(ctypes.byref(self._one), self._weight, self._weight_layout, self._x, self._x_layout),
            *(ctypes.byref(self._zero), self._out, self._out_layout, self._out, self._out_layout),
        )

    def run(
        self,
        m: int,
        x: int,
        weight: int,
        bias: int,
        out: int,
        workspace: Buffer,
        stream: int,
        algorithm: GemmAlgorithm | None,
    ) -> None:
        """Addresses of x [m, k], weight [n, k], bias [n] (0 without one), out [m, n]."""
        if m != self._m:
            self._set_rows(m)
        if workspace is not self._bound:
            self._bound, self._num_bytes = workspace, workspace.num_bytes
            self._workspace.value, self._workspace_bytes.value = workspace.address, self._num_bytes
        alignment = WIDEST_ALIGNMENT if (x | weight | bias | out) % WIDEST_ALIGNMENT == 0 else 16
        # By its bytes, whose hash is remembered, as a dataclass's is not.
        key = (m, alignment, self._num_bytes, algorithm.data if algorithm else None)
        found = self._settled.get(key)
        if found is None:
            found = self._settled[key] = self._settle(m, alignment, self._num_bytes, algorithm)
            if len(self._settled) > MAX_ALGORITHMS:
                self._settled.popitem(last=False)
        else:
            self._settled.move_to_end(key)
        descriptor = self._descriptors.get(bias)
        if descriptor is None:
            descriptor = self._describe(bias)
        self._x.value, self._weight.value, self._out.value, self._stream.value = x, weight, out, stream
        status = self._matmul(
            *(self._handle, descriptor, *self._operands),
            *(ctypes.byref(found), self._workspace, self._workspace_bytes, self._stream),
        )
        if status:
            self._check(status, f"cublasLtMatmul of m {m}, {self._kind}")

    def search(self, m: int, workspace_bytes: int, max_results: int) -> list[GemmAlgorithm]:
        """What cuBLAS thinks of for m rows, the best guess first, then what it thinks of for others and m rows can use.

        Addresses are multiples of 256 then. Raises DriverError if it knows no algorithm at all.
        """
        unique: dict[bytes, LtHeuristicResult] = {}
        errors: list[DriverError] = []
        for rows in (m, 2 * m, 4 * m, -(-m // 2)):
            self._set_rows(rows)
            for room in (workspace_bytes, 0):
                try:
                    results = self._ask_heuristic(rows, WIDEST_ALIGNMENT, room, max_results)
                except DriverError as error:  # it may know none without a workspace, or for another size
                    errors.append(error)
                    continue
                for result in results:
                    unique.setdefault(bytes(result.algorithm), result)
        self._set_rows(m)
        if not unique:
            raise errors[0]
        return self._usable((result for result in unique.values() if result.state == 0), workspace_bytes)[:max_results]

    def vary(self, m: int, workspace_bytes: int, algorithm: GemmAlgorithm) -> list[GemmAlgorithm]:
        """Those that differ from it in one respect, and that m rows can use."""
        from server.ops.cuda.lt_variants import variants  # which serving does not need

        self._set_rows(m)
        return self._usable(variants(self._lt, LtHeuristicResult.of(algorithm)), workspace_bytes)

    def _usable(self, results: Iterable[LtHeuristicResult], workspace_bytes: int) -> list[GemmAlgorithm]:
        answers = map(self._ask_check, results)
        return [
            answer.as_algorithm()
            for answer in answers
            if answer is not None and answer.workspace_bytes <= workspace_bytes
        ]

    def _set_rows(self, m: int) -> None:
        columns = ctypes.c_uint64(m)
        for layout in (self._x_layout, self._out_layout):
            status = self._lt.cublasLtMatrixLayoutSetAttribute(
                layout, ctypes.c_int(LT_LAYOUT_COLS), ctypes.byref(columns), ctypes.c_size_t(8)
            )
            self._check(status, "cublasLtMatrixLayoutSetAttribute")
        self._m = m

    # Which algorithm

    def _settle(
        self, m: int, alignment: int, workspace_bytes: int, algorithm: GemmAlgorithm | None
    ) -> LtHeuristicResult:
        found = self._check_algorithm(m, workspace_bytes, algorithm) if algorithm and alignment > 16 else None
        if found is None:
            found = self._ask_heuristic(m, alignment, workspace_bytes, 1)[0]
        return found

    def _check_algorithm(self, m: int, workspace_bytes: int, algorithm: GemmAlgorithm) -> LtHeuristicResult | None:
        """None if this cuBLAS cannot run it for m rows, which is logged once."""
        checked = self._ask_check(LtHeuristicResult.of(algorithm))
        if checked is not None and checked.workspace_bytes <= workspace_bytes:
            return checked
        if algorithm not in self._refused:
            self._refused.add(algorithm)
            reason = "it is refused" if checked is None else f"it needs a workspace of {checked.workspace_bytes} bytes"
            logger.warning(
                "cuBLAS cannot run the tuned algorithm for m %d, %s (%s): it chooses itself; run scripts/tune-kernels",
                *(m, self._kind, reason),
            )
        return None

    def _ask_check(self, asked: LtHeuristicResult) -> LtHeuristicResult | None:
        """The algorithm with what it needs for the present number of rows; None if it does not do."""
        answer = LtHeuristicResult()
        status = self._lt.cublasLtMatmulAlgoCheck(
            *(self._handle, self._question, *self._layouts, ctypes.byref(asked), ctypes.byref(answer))
        )
        if status or answer.state:
            return None
        ctypes.memmove(ctypes.byref(answer), ctypes.byref(asked), ctypes.sizeof(asked.algorithm))
        return answer

    def _ask_heuristic(self, m: int, alignment: int, workspace_bytes: int, max_results: int) -> list[LtHeuristicResult]:
        if self._kind.has_bias:  # the choice looks at how the bias is aligned, not at what it is
            self._set_descriptor(self._question, LT_DESC_BIAS_POINTER, ctypes.c_void_p(alignment))
        found, num_found = (LtHeuristicResult * max_results)(), ctypes.c_int()
        what = f"cublasLtMatmulAlgoGetHeuristic of m {m}, {self._kind}"
        with self._preference(alignment, workspace_bytes) as preference:
            status = self._lt.cublasLtMatmulAlgoGetHeuristic(
                *(self._handle, self._question, *self._layouts, preference, ctypes.c_int(max_results)),
                *(found, ctypes.byref(num_found)),
            )
        self._check(status, what)
        if num_found.value < 1:
            raise DriverError(what, found[0].state, "no algorithm")
        return list(found[: num_found.value])

    @contextmanager
    def _preference(self, alignment: int, workspace_bytes: int) -> Iterator[ctypes.c_void_p]:
        preference = self._create("cublasLtMatmulPreferenceCreate")
        try:
            self._prefer(preference, LT_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace_bytes))
            self._prefer(preference, LT_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(REDUCTION_COMPUTE_TYPE))
            for which in LT_PREF_MIN_ALIGNMENTS:
                self._prefer(preference, which, ctypes.c_uint32(alignment))
            yield preference
        finally:
            self._lt.cublasLtMatmulPreferenceDestroy(preference)

    def _prefer(self, preference: ctypes.c_void_p, which: int, value: Any) -> None:
        status = self._lt.cublasLtMatmulPreferenceSetAttribute(
            preference, ctypes.c_int(which), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
        )
        self._check(status, "cublasLtMatmulPreferenceSetAttribute")

    # Descriptors

    @property
    def _layouts(self) -> tuple[ctypes.c_void_p, ...]:
        return self._weight_layout, self._x_layout, self._out_layout, self._out_layout

    def _describe(self, bias: int) -> ctypes.c_void_p:
        if len(self._descriptors) == MAX_DESCRIPTORS:
            for descriptor in self._descriptors.values():
                self._check(self._lt.cublasLtMatmulDescDestroy(descriptor), "cublasLtMatmulDescDestroy")
            self._descriptors.clear()
        descriptor = self._create_descriptor()
        if self._kind.has_bias:
            self._set_descriptor(descriptor, LT_DESC_BIAS_POINTER, ctypes.c_void_p(bias))
        self._descriptors[bias] = descriptor
        return descriptor

    def _create_descriptor(self) -> ctypes.c_void_p:
        descriptor = self._create("cublasLtMatmulDescCreate", ctypes.c_int(COMPUTE_32F), ctypes.c_int(R_32F))
        self._set_descriptor(descriptor, LT_DESC_TRANSA, ctypes.c_int(OP_T))
        if self._kind.has_bias:
            self._set_descriptor(descriptor, LT_DESC_EPILOGUE, ctypes.c_int(LT_EPILOGUE_BIAS))
        return descriptor

    def _set_descriptor(self, descriptor: ctypes.c_void_p, which: int, value: Any) -> None:
        status = self._lt.cublasLtMatmulDescSetAttribute(
            descriptor, ctypes.c_int(which), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
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
