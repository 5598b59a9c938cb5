"""Copies of chosen rows: the hidden states that are decoded into logits."""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant


@triton.jit
def gather_rows(x, rows, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out [samples, width]: row s is x[rows[s]]. grid (samples, 1, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    sample = tl.program_id(0)
    source = x + tl.load(rows + sample).to(tl.int64) * width
    dest = out + sample.to(tl.int64) * width
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        in_row = columns < width
        tl.store(dest + columns, tl.load(source + columns, mask=in_row), mask=in_row)


SPECS = (
    KernelSpec(
        name="gather_rows",
        function="gather_rows",
        parameters={"x": "*T", "rows": "*i32", "out": "*T", "width": "i32"},
        variants=(Variant({"BLOCK": 1024}),),
        aligned={"rows": 4, "width": 8},
    ),
)
