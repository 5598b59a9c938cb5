"""Algorithms of cublasLt that differ from a given one in one respect. Constants of cublasLt.h, version 13.

Knows no GEMM: whether an algorithm suits one is asked elsewhere. Only measurements import it.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

from server.ops.cuda.cublas_lt import REDUCTION_COMPUTE_TYPE, LtHeuristicResult

CAP_TILE_IDS = 6
CAP_CUSTOM_OPTION_MAX = 7
CAP_STAGES_IDS = 13
CONFIG_TILE_ID = 1
CONFIG_SPLITK_NUM = 2
CONFIG_REDUCTION_SCHEME = 3
CONFIG_CTA_SWIZZLING = 4
CONFIG_CUSTOM_OPTION = 5
CONFIG_STAGES_ID = 6
CONFIG_CLUSTER_SHAPE_ID = 8  # of 16 bits, the others have 32
REDUCTION_NONE = 0

SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
CLUSTER_SHAPES = (0, *range(2, 16))  # automatic, 1 x 1, .. 16 x 1
MAX_CUSTOM_OPTION = 32


def variants(lt: Any, algorithm: LtHeuristicResult) -> Iterator[LtHeuristicResult]:
    """Those that differ in tile, stages, split of k, order of blocks, cluster, or the library's own option.

    Many suit no GEMM. Partial sums stay fp32.
    """
    changes = [
        (CONFIG_TILE_ID, _listed(lt, algorithm, CAP_TILE_IDS)),
        (CONFIG_STAGES_ID, _listed(lt, algorithm, CAP_STAGES_IDS)),
        (CONFIG_SPLITK_NUM, SPLITS),
        (CONFIG_CTA_SWIZZLING, (0, 1)),
        (CONFIG_CLUSTER_SHAPE_ID, CLUSTER_SHAPES),
        (CONFIG_CUSTOM_OPTION, range(min(MAX_CUSTOM_OPTION, _custom_option_max(lt, algorithm)) + 1)),
    ]
    seen = {bytes(algorithm.algorithm)}
    for which, values in changes:
        for value in values:
            changed = LtHeuristicResult.of(algorithm.as_algorithm())
            if not _set(lt, changed, which, value):
                continue
            if which == CONFIG_SPLITK_NUM:
                _set(lt, changed, CONFIG_REDUCTION_SCHEME, REDUCTION_COMPUTE_TYPE if value > 1 else REDUCTION_NONE)
            if bytes(changed.algorithm) not in seen:
                seen.add(bytes(changed.algorithm))
                yield changed


def _listed(lt: Any, algorithm: LtHeuristicResult, which: int) -> list[int]:
    """A list of 32-bit numbers; empty if the library gives none."""
    num_bytes = ctypes.c_size_t()
    get = lt.cublasLtMatmulAlgoCapGetAttribute
    if get(ctypes.byref(algorithm), ctypes.c_int(which), None, ctypes.c_size_t(0), ctypes.byref(num_bytes)):
        return []
    numbers = (ctypes.c_uint32 * (num_bytes.value // 4))()
    status = get(ctypes.byref(algorithm), ctypes.c_int(which), numbers, num_bytes, ctypes.byref(num_bytes))
    return [] if status else list(numbers)


def _custom_option_max(lt: Any, algorithm: LtHeuristicResult) -> int:
    number, num_bytes = ctypes.c_int32(), ctypes.c_size_t()
    status = lt.cublasLtMatmulAlgoCapGetAttribute(
        *(ctypes.byref(algorithm), ctypes.c_int(CAP_CUSTOM_OPTION_MAX)),
        *(ctypes.byref(number), ctypes.c_size_t(4), ctypes.byref(num_bytes)),
    )
    return -1 if status else number.value


def _set(lt: Any, algorithm: LtHeuristicResult, which: int, value: int) -> bool:
    number = ctypes.c_uint16(value) if which == CONFIG_CLUSTER_SHAPE_ID else ctypes.c_uint32(value)
    status = lt.cublasLtMatmulAlgoConfigSetAttribute(
        ctypes.byref(algorithm), ctypes.c_int(which), ctypes.byref(number), ctypes.c_size_t(ctypes.sizeof(number))
    )
    return not status
