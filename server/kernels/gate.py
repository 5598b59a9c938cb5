"""The MLP's gate: silu(gate) * up, of the two halves of each block of the fused projection."""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant


@triton.jit
def gate(gate_up, out, intermediate, block, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out [tokens, intermediate]. grid (tokens, any number, 1): the programs of a token take turns at its tiles.

    A row of gate_up: per `block` columns of `out`, that many of gate, then that many of up. A token has
    intermediate / block * ceil(block / BLOCK) tiles.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    token = tl.program_id(0).to(tl.int64)
    tiles_per_block = tl.cdiv(block, BLOCK)
    for tile in range(tl.program_id(1), intermediate // block * tiles_per_block, tl.num_programs(1)):
        first = tile // tiles_per_block * block  # column of `out` where the tile's block begins
        columns = tile % tiles_per_block * BLOCK + tl.arange(0, BLOCK)
        in_block = columns < block
        source = gate_up + (token * intermediate + first) * 2
        gates = tl.load(source + columns, mask=in_block, other=0.0).to(tl.float32)
        ups = tl.load(source + block + columns, mask=in_block, other=0.0).to(tl.float32)
        gated = gates / (1.0 + tl.exp(-gates)) * ups
        tl.store(out + token * intermediate + first + columns, gated.to(out.dtype.element_ty), mask=in_block)


SPECS = (
    KernelSpec(
        name="gate",
        function="gate",
        parameters={"gate_up": "*T", "out": "*T", "intermediate": "i32", "block": "i32"},
        variants=(Variant({"BLOCK": 1024}),),
        aligned={"intermediate": 8, "block": 8},
    ),
)
