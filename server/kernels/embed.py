"""Token embedding: the row of each token's id, in fp32. An id comes from the host or is what its slot sampled last."""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant


@triton.jit
def embed(token_ids, token_slots, last_tokens, table, out, hidden, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out [tokens, hidden] = table rows. grid (tokens, 1, 1); a slot below 0 means that the id is in token_ids."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    token = tl.program_id(0)
    slot = tl.load(token_slots + token)
    on_host = slot < 0
    host_id = tl.load(token_ids + token)
    token_id = tl.where(on_host, host_id, tl.load(last_tokens + tl.where(on_host, 0, slot)))
    source = table + token_id.to(tl.int64) * hidden
    dest = out + token.to(tl.int64) * hidden
    for begin in range(0, hidden, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        in_row = columns < hidden
        tl.store(dest + columns, tl.load(source + columns, mask=in_row).to(tl.float32), mask=in_row)


SPECS = (
    KernelSpec(
        name="embed",
        function="embed",
        parameters={
            "token_ids": "*i32",
            "token_slots": "*i32",
            "last_tokens": "*i32",
            "table": "*T",
            "out": "*fp32",
            "hidden": "i32",
        },
        variants=(Variant({"BLOCK": 1024}),),
        aligned={"token_ids": 4, "token_slots": 4, "last_tokens": 4, "hidden": 8},
    ),
)
