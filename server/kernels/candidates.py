"""Which kernels scripts/tune-kernels tries for a GEMM. Imports no Triton, and nothing that serves imports it."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.kernels.spec import Constant
from server.ops.cuda.tiles import GemmOperation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel of gemm.py by name, its constants and launch; `num_splits`: parts of k that are summed apart."""

    kernel: str
    constants: Mapping[str, Constant]
    num_warps: int
    num_stages: int
    num_splits: int = 1


def candidates(
    operation: GemmOperation, m: int, n: int, k: int, *, has_bias: bool, block: int, arch: str
) -> list[Candidate]:
    """For m rows by weights [n, k]; `block`: columns of a block of gate and then of up, 0 for other operations.

    None yet: algorithms of cuBLAS are what is tuned.
    """
    return []
