"""The projections of a decoder: by the GEMM library or by kernels of kernels/gemm.py, as a table says for each size.

A kernel is loaded when a step needs it first, which must not be in a capture. Knows the arguments of those kernels;
does not know what a step is.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from server.models.facts import ModelFacts
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, GemmAlgorithm, KernelImage, Stream
from server.ops.cuda.kernels import Grid, Kernels
from server.ops.cuda.tiles import GemmChoice, GemmOperation, GemmRanges, GemmShape, GemmTable, Tile
from server.ops.interface import Linear

# x, weight, bias, out
RunLinear = Callable[[Buffer, Buffer, Buffer | None, Buffer], None]
# x, layer, gate_up, out
RunGated = Callable[[Buffer, Linear[Buffer], Buffer, Buffer], None]
# x, layer, delta, residual, norm weight, out
RunAddNorm = Callable[[Buffer, Linear[Buffer], Buffer, Buffer, Buffer, Buffer], None]
AddRmsNorm = Callable[[Buffer, Buffer, Buffer, Buffer], None]
Gate = Callable[[Buffer, Buffer], None]
RunT = TypeVar("RunT")

logger = logging.getLogger(__name__)


class Router(Generic[RunT]):
    """Finds the way of one operation for a weight and a number of rows, and makes it when it is needed first."""

    def __init__(self, ranges: Mapping[GemmShape, GemmRanges], make: Callable[[GemmChoice], RunT]) -> None:
        self._make = make
        self._default = make(None)
        self._ways: dict[tuple[tuple[int, ...], bool], _Ways[RunT]] = {
            ((shape.n, shape.k), shape.has_bias): _Ways(of) for shape, of in ranges.items()
        }

    def find(self, weight: Buffer, has_bias: bool, m: int) -> RunT:
        """How to run it."""
        ways = self._ways.get((weight.shape, has_bias)) if self._ways else None
        if ways is None:
            return self._default
        index = bisect_left(ways.max_rows, m)
        if index == len(ways.made):
            return self._default
        return ways.made[index] or ways.make(index, self._make)


class _Ways(Generic[RunT]):
    """Of one weight shape, per range of rows: those that were needed so far."""

    def __init__(self, ranges: GemmRanges) -> None:
        self.max_rows = ranges.max_rows
        self.made: list[RunT | None] = [None] * len(ranges.choices)
        self._choices = ranges.choices

    def make(self, index: int, make: Callable[[GemmChoice], RunT]) -> RunT:
        way = self.made[index] = make(self._choices[index])
        return way


class Projections:
    """Operations linear, gated_linear, linear_add_norm and logits of ops/interface on one stream."""

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        kernels: Kernels,
        facts: ModelFacts,
        workspace: Buffer,
        table: GemmTable,
        *,
        add_rms_norm: AddRmsNorm,
        gate: Gate,
    ) -> None:
        self._driver, self._stream, self._kernels, self._facts = driver, stream, kernels, facts
        self._workspace = workspace
        self._add_rms_norm, self._gate = add_rms_norm, gate
        self._block = facts.intermediate_size // facts.num_mlp_blocks
        usable = usable_ranges(driver, table)

        def of(operation: GemmOperation) -> dict[GemmShape, GemmRanges]:
            return {s: r for s, r in usable.items() if (s.operation, s.dtype) == (operation, facts.dtype)}

        self._linear = Router(of("linear"), self.make_linear)
        self._gated = Router(of("gated_linear"), self.make_gated)
        self._add_norm = Router(of("linear_add_norm"), self.make_add_norm)
        self._logits = Router(of("logits"), self.make_linear)

    def linear(self, x: Buffer, layer: Linear[Buffer], out: Buffer) -> None:
        """out [m, n] = x [m, k] @ weight.T + bias."""
        run = self._linear.find(layer.weight, layer.bias is not None, x.shape[0])
        run(x, layer.weight, layer.bias, out)

    def gated_linear(self, x: Buffer, layer: Linear[Buffer], gate_up: Buffer, out: Buffer) -> None:
        """out [m, intermediate] = silu(gate) * up; gate_up may be left as it is."""
        self._gated.find(layer.weight, layer.bias is not None, x.shape[0])(x, layer, gate_up, out)

    def linear_add_norm(
        self, x: Buffer, layer: Linear[Buffer], delta: Buffer, residual: Buffer, norm_weight: Buffer, out: Buffer
    ) -> None:
        """residual [m, n] += x @ weight.T + bias, then out = rms_norm(residual); delta may be left as it is."""
        run = self._add_norm.find(layer.weight, layer.bias is not None, x.shape[0])
        run(x, layer, delta, residual, norm_weight, out)

    def logits(self, x: Buffer, head: Buffer, out: Buffer) -> None:
        """out [m, vocab] = x @ head.T in fp32."""
        self._logits.find(head, False, x.shape[0])(x, head, None, out)

    # The ways; public for scripts/tune-kernels, which measures them.

    def make_linear(self, choice: GemmChoice) -> RunLinear:
        """Of linear and logits."""
        if not isinstance(choice, Tile):
            return self._by_library(choice)
        if _splits(choice):
            return self._split_linear(choice)
        kernel, grid = self._kernels.load(choice.image), tile_grid(choice.image)

        def run(x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer) -> None:
            (m, k), n = x.shape, weight.shape[0]
            kernel(grid(m, n, 1), x, weight, bias or weight, out, m, n, k)  # without a bias it is not read

        return run

    def make_gated(self, choice: GemmChoice) -> RunGated:
        """Of gated_linear: in one kernel, or a projection and the gate."""
        if isinstance(choice, Tile) and choice.image.name == "gated_linear":
            return self._fused_gate(choice)
        project, gate = self.make_linear(choice), self._gate

        def run(x: Buffer, layer: Linear[Buffer], gate_up: Buffer, out: Buffer) -> None:
            project(x, layer.weight, layer.bias, gate_up)
            gate(gate_up, out)

        return run

    def make_add_norm(self, choice: GemmChoice) -> RunAddNorm:
        """Of linear_add_norm: partial sums that the norm adds up, or a projection and the norm."""
        if isinstance(choice, Tile) and _splits(choice):
            return self._split_add_norm(choice)
        project, add_rms_norm = self.make_linear(choice), self._add_rms_norm

        def run(
            x: Buffer, layer: Linear[Buffer], delta: Buffer, residual: Buffer, norm_weight: Buffer, out: Buffer
        ) -> None:
            project(x, layer.weight, layer.bias, delta)
            add_rms_norm(residual, delta, norm_weight, out)

        return run

    def _by_library(self, algorithm: GemmAlgorithm | None) -> RunLinear:
        gemm_async, workspace, stream = self._driver.gemm_async, self._workspace, self._stream

        def run(x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer) -> None:
            gemm_async(x, weight, bias, out, workspace, stream, algorithm)

        return run

    def _split_linear(self, choice: Tile) -> RunLinear:
        split = self._partial_sums(choice)
        reduce = {
            has_bias: self._kernels.get("reduce_partials", self._facts.dtype, HAS_BIAS=has_bias)
            for has_bias in (False, True)
        }
        width = int(reduce[False].image.constants["BLOCK"])
        num_splits = choice.num_splits

        def run(x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer) -> None:
            (m, n), partials = out.shape, split(x, weight)
            grid = (m, -(-n // width), 1)
            reduce[bias is not None](grid, partials, bias or weight, out, m, n, num_splits)

        return run

    def _split_add_norm(self, choice: Tile) -> RunAddNorm:
        split = self._partial_sums(choice)
        add_partials = self._kernels.get("add_rms_norm_partials", self._facts.dtype)
        num_splits, eps = choice.num_splits, self._facts.rms_eps

        def run(
            x: Buffer, layer: Linear[Buffer], delta: Buffer, residual: Buffer, norm_weight: Buffer, out: Buffer
        ) -> None:
            assert layer.bias is None, "nothing adds a bias to partial sums and a residual"
            m, hidden = out.shape
            partials = split(x, layer.weight)
            add_partials((m, 1, 1), residual, partials, norm_weight, out, m, hidden, num_splits, eps)

        return run

    def _partial_sums(self, choice: Tile) -> Callable[[Buffer, Buffer], Buffer]:
        """Launches the kernel and gives its fp32 sums [num_splits, m, n], which lie in the workspace."""
        kernel, grid = self._kernels.load(choice.image), tile_grid(choice.image)
        num_splits, workspace = choice.num_splits, self._workspace

        def run(x: Buffer, weight: Buffer) -> Buffer:
            (m, k), n = x.shape, weight.shape[0]
            partials = Buffer(workspace.address, (num_splits, m, n), "float32", workspace.owner)
            assert partials.num_bytes <= workspace.num_bytes, f"partial sums {partials.shape} exceed the workspace"
            kernel(grid(m, n, num_splits), x, weight, partials, m, n, k, num_splits)
            return partials

        return run

    def _fused_gate(self, choice: Tile) -> RunGated:
        kernel, grid, block = self._kernels.load(choice.image), tile_grid(choice.image), self._block

        def run(x: Buffer, layer: Linear[Buffer], gate_up: Buffer, out: Buffer) -> None:
            assert layer.bias is None, "the fused gate adds no bias"
            (m, k), n = x.shape, out.shape[1]
            kernel(grid(m, n, 1), x, layer.weight, out, m, n, k, block)

        return run


def usable_ranges(driver: Driver, table: GemmTable) -> Mapping[GemmShape, GemmRanges]:
    """The table, without algorithms that belong to another version of the GEMM library: it chooses in their place."""
    choices = [choice for ranges in table.ranges.values() for choice in ranges.choices]
    num_algorithms = sum(isinstance(choice, GemmAlgorithm) for choice in choices)
    if not num_algorithms:
        return table.ranges
    version = driver.gemm_version()
    if version == table.gemm_version:
        return table.ranges
    logger.warning(
        "%d tuned algorithms are of cuBLAS %d, and this is %d, which chooses itself; run scripts/tune-kernels for it",
        *(num_algorithms, table.gemm_version, version),
    )
    return {shape: _without_algorithms(ranges) for shape, ranges in table.ranges.items()}


def _without_algorithms(ranges: GemmRanges) -> GemmRanges:
    choices = (None if isinstance(choice, GemmAlgorithm) else choice for choice in ranges.choices)
    return GemmRanges(ranges.max_rows, tuple(choices))


def tile_grid(image: KernelImage) -> Callable[[int, int, int], Grid]:
    """The grid of a kernel for m rows, n columns and a number of splits."""
    block_m, block_n = int(image.constants["BLOCK_M"]), int(image.constants["BLOCK_N"])

    def grid(m: int, n: int, num_splits: int) -> Grid:
        return -(-m // block_m) * -(-n // block_n), 1, num_splits

    return grid


def _splits(choice: Tile) -> bool:
    """Whether it leaves partial sums."""
    return "split" in choice.image.name
