"""What adds up the partial sums that parts of a GEMM's k have left: for other kernels, and as one of its own."""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant


@triton.jit
def sum_partials(partials, stride, num_splits, columns, mask):
    """The fp32 sums [BLOCK] of columns over the splits, which lie `stride` numbers apart; in order, so that a result
    never depends on timing."""
    total = tl.load(partials + columns, mask=mask, other=0.0)
    for split in tl.range(1, num_splits, loop_unroll_factor=4):
        total += tl.load(partials + split * stride + columns, mask=mask, other=0.0)
    return total


@triton.jit
def reduce_partials(
    partials, bias, out, m, n, num_splits, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr = False
):
    """out [m, n] = the sum of partials [num_splits, m, n] + bias [n], rounded once. grid (m, ceil(n / BLOCK), 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = columns < n
    biases = tl.load(bias + columns, mask=in_row, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    total = sum_partials(partials + row * n, m.to(tl.int64) * n, num_splits, columns, in_row) + biases
    tl.store(out + row * n + columns, total.to(out.dtype.element_ty), mask=in_row)


SPECS = (
    KernelSpec(
        name="reduce_partials",
        function="reduce_partials",
        parameters={"partials": "*fp32", "bias": "*T", "out": "*T", "m": "i32", "n": "i32", "num_splits": "i32"},
        variants=tuple(Variant({"BLOCK": 512, "HAS_BIAS": has_bias}) for has_bias in (False, True)),
        aligned={"n": 8},
    ),
)
