"""Which way each GEMM of a model is best computed, by its size: what scripts/tune-kernels measured on one kind of GPU.

Plain data, resolved to compiled kernels. Does not know how anything is launched.
"""

from dataclasses import dataclass
from typing import Literal

from server.ops.cuda.buffer import BufferDType
from server.ops.cuda.driver import GemmAlgorithm, KernelImage

GemmOperation = Literal["linear", "gated_linear", "linear_add_norm", "logits"]
GEMM_OPERATIONS: tuple[GemmOperation, ...] = ("linear", "gated_linear", "linear_add_norm", "logits")


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel of kernels/gemm.py; `num_splits` parts of k are summed apart, if it is one that splits."""

    image: KernelImage
    num_splits: int = 1


# None: the GEMM library, by its own choice.
GemmChoice = GemmAlgorithm | Tile | None


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A projection of a model by weights [n, k]."""

    operation: GemmOperation
    dtype: BufferDType
    n: int
    k: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class GemmRanges:
    """choices[i] is for m rows up to max_rows[i], which ascend; beyond the last the GEMM library chooses."""

    max_rows: tuple[int, ...]
    choices: tuple[GemmChoice, ...]

    def __post_init__(self) -> None:
        assert len(self.max_rows) == len(self.choices), f"{len(self.choices)} choices for {self.max_rows}"
        assert list(self.max_rows) == sorted(set(self.max_rows)), f"{self.max_rows} do not ascend"


@dataclass(frozen=True, slots=True)
class GemmTable:
    """All that was measured on one kind of GPU. Algorithms are good for `gemm_version` of the GEMM library alone."""

    gemm_version: int
    ranges: dict[GemmShape, GemmRanges]


NO_TABLE = GemmTable(0, {})
