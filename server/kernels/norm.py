"""RMSNorm in fp32, rounded once; alone, and behind the addition of a layer's output to the residual."""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.partials import sum_partials
from server.kernels.spec import KernelSpec, Variant


@triton.jit
def _scale_row(x, weight, out, squares, first, first_weights, hidden, eps, BLOCK: tl.constexpr):
    """out = x / sqrt(mean of squares + eps) * weight. `first`: x's first tile, which is still in registers.

    first_weights: what belongs to it, asked for together with x: nothing waits for memory behind the sum.
    """
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / hidden + eps)
    columns = tl.arange(0, BLOCK)
    in_row = columns < hidden
    weights = first_weights.to(tl.float32)
    tl.store(out + columns, (first * scale * weights).to(out.dtype.element_ty), mask=in_row)
    for begin in range(BLOCK, hidden, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        in_row = columns < hidden
        weights = tl.load(weight + columns, mask=in_row, other=0.0).to(tl.float32)
        values = tl.load(x + columns, mask=in_row, other=0.0)
        tl.store(out + columns, (values * scale * weights).to(out.dtype.element_ty), mask=in_row)


@triton.jit
def rms_norm(x, weight, out, hidden, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out [tokens, hidden] = x / sqrt(mean(x^2) + eps) * weight. grid (tokens, 1, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    first = tl.load(x + row + columns, mask=columns < hidden, other=0.0)
    first_weights = tl.load(weight + columns, mask=columns < hidden, other=0.0)
    squares = first * first
    for begin in range(BLOCK, hidden, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        values = tl.load(x + row + columns, mask=columns < hidden, other=0.0)
        squares += values * values
    _scale_row(x + row, weight, out + row, squares, first, first_weights, hidden, eps, BLOCK)


@triton.jit
def add_rms_norm(residual, delta, weight, out, hidden, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """residual [tokens, hidden] += delta, then out = rms_norm(residual). grid (tokens, 1, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    in_row = columns < hidden
    first = tl.load(residual + row + columns, mask=in_row, other=0.0)
    first_weights = tl.load(weight + columns, mask=in_row, other=0.0)
    first += tl.load(delta + row + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(residual + row + columns, first, mask=in_row)
    squares = first * first
    for begin in range(BLOCK, hidden, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        in_row = columns < hidden
        values = tl.load(residual + row + columns, mask=in_row, other=0.0)
        values += tl.load(delta + row + columns, mask=in_row, other=0.0).to(tl.float32)
        tl.store(residual + row + columns, values, mask=in_row)
        squares += values * values
    tl.debug_barrier()  # other threads of the program may read again what these have written
    _scale_row(residual + row, weight, out + row, squares, first, first_weights, hidden, eps, BLOCK)


@triton.jit
def add_rms_norm_partials(
    residual,
    partials,
    weight,
    out,
    num_tokens,
    hidden,
    num_splits,
    eps,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """residual [tokens, hidden] += the sum of partials [num_splits, tokens, hidden], then out = rms_norm(residual).

    grid (tokens, 1, 1). The sum is not rounded to the dtype of `out` before it is added.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64) * hidden
    stride = num_tokens.to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    in_row = columns < hidden
    first = tl.load(residual + row + columns, mask=in_row, other=0.0)
    first_weights = tl.load(weight + columns, mask=in_row, other=0.0)
    first += sum_partials(partials + row, stride, num_splits, columns, in_row)
    tl.store(residual + row + columns, first, mask=in_row)
    squares = first * first
    for begin in range(BLOCK, hidden, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        in_row = columns < hidden
        values = tl.load(residual + row + columns, mask=in_row, other=0.0)
        values += sum_partials(partials + row, stride, num_splits, columns, in_row)
        tl.store(residual + row + columns, values, mask=in_row)
        squares += values * values
    tl.debug_barrier()  # other threads of the program may read again what these have written
    _scale_row(residual + row, weight, out + row, squares, first, first_weights, hidden, eps, BLOCK)


_SIZES = {"hidden": "i32", "eps": "fp32"}
_VARIANTS = (Variant({"BLOCK": 4096}, num_warps=8),)

SPECS = (
    KernelSpec(
        name="rms_norm",
        function="rms_norm",
        parameters={"x": "*fp32", "weight": "*T", "out": "*T", **_SIZES},
        variants=_VARIANTS,
        aligned={"hidden": 8},
    ),
    KernelSpec(
        name="add_rms_norm",
        function="add_rms_norm",
        parameters={"residual": "*fp32", "delta": "*T", "weight": "*T", "out": "*T", **_SIZES},
        variants=_VARIANTS,
        aligned={"hidden": 8},
    ),
    KernelSpec(
        name="add_rms_norm_partials",
        function="add_rms_norm_partials",
        parameters={
            "residual": "*fp32",
            "partials": "*fp32",
            "weight": "*T",
            "out": "*T",
            "num_tokens": "i32",
            "hidden": "i32",
            "num_splits": "i32",
            "eps": "fp32",
        },
        variants=_VARIANTS,
        aligned={"hidden": 8},
    ),
)
