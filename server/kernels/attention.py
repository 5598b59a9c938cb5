"""Paged attention: one query per request split over its context (decode), and tiles of a chunk's queries (prefill).

Softmax is in fp32, to the base 2 (`scale` holds log2 e); its weights are rounded to the model's dtype before they
meet V. Positions that a query does not see are never read from the pool: others' values there, NaN too, change nothing.
The query heads of a group are rows of one tile, so that K and V are read once for all of them. How many chunks there
are stands in the step's header, so that a recorded launch suits every step that needs no larger grid: programs for
which there is nothing leave at once, and rows of `out` that belong to no chunk are left as they are.
"""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant

DECODE_ROWS = tl.constexpr(16)  # query heads of a decode tile, used or not: the fewest rows that tl.dot takes
CHUNKS_AT_ONCE = tl.constexpr(64)

# Places in the step's header: ops/interface.
NUM_DECODES = tl.constexpr(0)
NUM_CHUNKS = tl.constexpr(1)
NUM_TOKENS = tl.constexpr(2)
TABLE_COLUMNS = tl.constexpr(3)


@triton.jit
def _table_of(header, slots, block_tables, chunk):
    """Where the block table of a chunk's request begins."""
    row = tl.load(slots + chunk).to(tl.int64)
    return block_tables + row * tl.load(header + TABLE_COLUMNS)


@triton.jit
def _load_block_ids(table, positions, is_context, block_shift):
    return tl.load(table + (positions >> block_shift), mask=is_context, other=0)


@triton.jit
def _pool_offsets(block_ids, positions, block_shift, num_kv_heads, kv_head, HEAD_DIM: tl.constexpr):
    """Offset of the first element of `kv_head` in the pool's rows that hold `positions` of a request."""
    rows = (block_ids.to(tl.int64) << block_shift) + (positions & ((1 << block_shift) - 1))
    return (rows * num_kv_heads + kv_head) * HEAD_DIM


@triton.jit
def _softmax_step(scores, scale, maximum, total):
    """Fold raw scores [rows, n] into the running maximum and total: weights, factor for what was summed before."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    return weights, correction, new_maximum, total * correction + tl.sum(weights, 1)


@triton.jit
def attend_decode(
    qkv,
    keys,
    values,
    header,
    slots,
    block_tables,
    context_lens,
    out,
    partial,
    partial_lse,
    arrivals,
    scale,
    num_kv_heads,
    group_size,
    block_shift,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    COMBINES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Token row r is the last token of request r, for each decode. grid (num_kv_heads, requests, splits).

    One split writes `out`. Several leave weighted means of V in partial [request][head][split][HEAD_DIM], and the
    base-2 logarithms of their totals in partial_lse [request][head][split]; -inf there says that the split had nothing
    and left no mean. Then combine_splits writes `out`, or with COMBINES the last split of a request and KV head to
    arrive, by arrivals [request][kv head], which are 0 before and after.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    # All that is needed before the first block id is asked for at once; of a request that is not there it is not used.
    num_decodes = tl.load(header + NUM_DECODES)
    context = tl.load(context_lens + request)
    table = _table_of(header, slots, block_tables, request)
    if request >= num_decodes:
        return
    tiles_per_split = tl.cdiv(tl.cdiv(context, BLOCK_N), num_splits)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, context)

    rows = tl.arange(0, DECODE_ROWS)
    is_head = rows < group_size
    first_head = request.to(tl.int64) * (num_kv_heads * group_size) + kv_head * group_size
    parts = (first_head + rows) * num_splits + split
    if IS_SPLIT and not COMBINES and begin >= end:
        tl.store(partial_lse + parts, tl.full([DECODE_ROWS], float("-inf"), tl.float32), mask=is_head)
        return

    dims = tl.arange(0, HEAD_DIM)
    q_offset = (request.to(tl.int64) * num_kv_heads + kv_head) * ((group_size + 2) * HEAD_DIM)
    q = tl.load(qkv + q_offset + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_head[:, None], other=0.0)
    columns = tl.arange(0, BLOCK_N)
    # Ids of blocks are read a tile ahead, so that the loads of K and V never wait for them and can be pipelined.
    block_ids = _load_block_ids(table, begin + columns, begin + columns < end, block_shift)

    maximum = tl.full([DECODE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([DECODE_ROWS], tl.float32)
    acc = tl.zeros([DECODE_ROWS, HEAD_DIM], tl.float32)
    for first in range(begin, end, BLOCK_N):
        is_seen = first + columns < end
        offsets = _pool_offsets(block_ids, first + columns, block_shift, num_kv_heads, kv_head, HEAD_DIM)
        block_ids = _load_block_ids(table, first + BLOCK_N + columns, first + BLOCK_N + columns < end, block_shift)
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=is_seen[:, None], other=0.0)
        scores = tl.where(is_seen[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        weights, correction, maximum, total = _softmax_step(scores, scale, maximum, total)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=is_seen[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None])

    mean = acc / total[:, None]
    if IS_SPLIT:
        # A split without positions has a total of 0, whose logarithm is -inf; its mean is NaN, and is not read.
        tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_head[:, None] & (begin < end))
        tl.store(partial_lse + parts, maximum + tl.log2(total), mask=is_head)
    else:
        out_offsets = (first_head + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + out_offsets, mean.to(out.dtype.element_ty), mask=is_head[:, None])
    if COMBINES:
        arrival = arrivals + request * num_kv_heads + kv_head
        # NOTE: one thread counts for all: the barrier puts every thread's stores before its release, and its acquire
        # before every thread's loads. Without either, the last split could read what is not written yet.
        tl.debug_barrier()
        num_before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if num_before == num_splits - 1:
            tl.store(arrival, 0)
            for head in range(group_size):
                lse = _load_lse(partial_lse, first_head + head, num_splits, MAX_SPLITS)
                _combine(partial, lse, out, first_head + head, num_splits, HEAD_DIM, MAX_SPLITS)


@triton.jit
def combine_splits(
    partial,
    partial_lse,
    header,
    out,
    num_splits,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """out[request][head] of each decode from what its splits left. grid (heads, requests, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    request = tl.program_id(1)
    head = request.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    num_decodes = tl.load(header + NUM_DECODES)
    lse = _load_lse(partial_lse, head, num_splits, MAX_SPLITS)  # of a request that is not there it is not used
    if request >= num_decodes:
        return
    _combine(partial, lse, out, head, num_splits, HEAD_DIM, MAX_SPLITS)


@triton.jit
def _load_lse(partial_lse, head, num_splits, MAX_SPLITS: tl.constexpr):
    splits = tl.arange(0, MAX_SPLITS)
    return tl.load(partial_lse + head * num_splits + splits, mask=splits < num_splits, other=float("-inf"))


@triton.jit
def _combine(partial, lse, out, head, num_splits, HEAD_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """One head of one request."""
    dims = tl.arange(0, HEAD_DIM)
    parts = head * num_splits + tl.arange(0, MAX_SPLITS)
    # An empty split's mean is what an earlier step left there.
    is_written = lse != float("-inf")
    means = tl.load(partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_written[:, None], other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 0))
    mean = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + head * HEAD_DIM + dims, mean.to(out.dtype.element_ty))


@triton.jit
def _find_chunk(query_starts, first_chunk, num_chunks, tokens_per_tile, tile):
    """The chunk of a prefill tile, and which of the chunk's tiles it is.

    Chunk i (counted from the first of several tokens) owns the tiles from (its first token) // tokens_per_tile + i on:
    enough for its tokens wherever it begins, and known from the query starts alone.
    """
    first_token = first_chunk  # each chunk before has one
    chunk = -1
    for base in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = base + tl.arange(0, CHUNKS_AT_ONCE)
        is_chunk = chunks < num_chunks
        starts = tl.load(query_starts + first_chunk + chunks, mask=is_chunk, other=0)
        first_tiles = (starts - first_token) // tokens_per_tile + chunks
        chunk += tl.sum((is_chunk & (first_tiles <= tile)).to(tl.int32), 0)
    start = tl.load(query_starts + first_chunk + chunk)
    return first_chunk + chunk, tile - (start - first_token) // tokens_per_tile - chunk


@triton.jit
def attend_prefill(
    qkv,
    keys,
    values,
    header,
    slots,
    block_tables,
    query_starts,
    context_lens,
    out,
    scale,
    num_kv_heads,
    group_size,
    block_shift,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """The chunks behind the decodes, in tiles of BLOCK_M // group_size tokens times the heads of a group.

    grid (num_kv_heads, tokens // (BLOCK_M // group_size) + chunks or more, 1), of all these chunks together.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    kv_head = tl.program_id(0)
    tokens_per_tile = BLOCK_M // group_size
    first_chunk = tl.load(header + NUM_DECODES)  # and its first token: each chunk before has one
    num_chunks = tl.load(header + NUM_CHUNKS) - first_chunk
    num_tiles = (tl.load(header + NUM_TOKENS) - first_chunk) // tokens_per_tile + num_chunks
    # The last tiles of a chunk see most of its context: they start first.
    tile = num_tiles - 1 - tl.program_id(1)
    if tile < 0:
        return
    chunk, chunk_tile = _find_chunk(query_starts, first_chunk, num_chunks, tokens_per_tile, tile)
    first_row = tl.load(query_starts + chunk)
    num_tokens = tl.load(query_starts + chunk + 1) - first_row
    first_token = chunk_tile * tokens_per_tile
    if first_token >= num_tokens:
        return
    context = tl.load(context_lens + chunk)
    first_position = context - num_tokens + first_token

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // group_size
    is_query = (tokens < tokens_per_tile) & (first_token + tokens < num_tokens)
    query_positions = first_position + tokens
    dims = tl.arange(0, HEAD_DIM)
    heads = rows % group_size
    token_rows = (first_row + first_token + tokens).to(tl.int64)
    q_offsets = (token_rows * num_kv_heads + kv_head) * ((group_size + 2) * HEAD_DIM) + heads * HEAD_DIM
    q = tl.load(qkv + q_offsets[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    table = _table_of(header, slots, block_tables, chunk)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # First what all queries of the tile see, then what some of them see.
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + tokens_per_tile, context)
    columns = tl.arange(0, BLOCK_N)
    block_ids = _load_block_ids(table, columns, columns < end, block_shift)
    for first in range(0, seen_by_all, BLOCK_N):
        offsets = _pool_offsets(block_ids, first + columns, block_shift, num_kv_heads, kv_head, HEAD_DIM)
        block_ids = _load_block_ids(table, first + BLOCK_N + columns, first + BLOCK_N + columns < end, block_shift)
        k = tl.load(keys + offsets[:, None] + dims[None, :])
        scores = tl.dot(q, tl.trans(k))
        weights, correction, maximum, total = _softmax_step(scores, scale, maximum, total)
        v = tl.load(values + offsets[:, None] + dims[None, :])
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None])
    for first in range(seen_by_all, end, BLOCK_N):
        positions = first + columns
        is_seen = positions < end
        block_ids = _load_block_ids(table, positions, is_seen, block_shift)
        offsets = _pool_offsets(block_ids, positions, block_shift, num_kv_heads, kv_head, HEAD_DIM)
        k = tl.load(keys + offsets[:, None] + dims[None, :], mask=is_seen[:, None], other=0.0)
        is_visible = is_seen[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(is_visible, tl.dot(q, tl.trans(k)), float("-inf"))
        weights, correction, maximum, total = _softmax_step(scores, scale, maximum, total)
        v = tl.load(values + offsets[:, None] + dims[None, :], mask=is_seen[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None])

    mean = (acc / total[:, None]).to(out.dtype.element_ty)
    out_offsets = ((token_rows * num_kv_heads + kv_head) * group_size + heads) * HEAD_DIM
    tl.store(out + out_offsets[:, None] + dims[None, :], mean, mask=is_query[:, None])


_HEAD_DIMS = (64, 128)
_POOL = {
    "qkv": "*T",
    "keys": "*T",
    "values": "*T",
    "header": "*i32",
    "slots": "*i32",
    "block_tables": "*i32",
}
_SIZES = {"scale": "fp32", "num_kv_heads": "i32", "group_size": "i32", "block_shift": "i32"}
# Parts of one buffer.
_PACKED_INPUTS = dict.fromkeys(("header", "slots", "block_tables", "query_starts", "context_lens"), 4)
_MAX_SPLITS = 64

SPECS = (
    KernelSpec(
        name="attend_decode",
        function="attend_decode",
        parameters=_POOL
        | {"context_lens": "*i32", "out": "*T", "partial": "*fp32", "partial_lse": "*fp32", "arrivals": "*i32"}
        | _SIZES,
        variants=tuple(
            Variant(
                {
                    "HEAD_DIM": head_dim,
                    "BLOCK_N": 64,
                    "IS_SPLIT": is_split,
                    "COMBINES": combines,
                    "MAX_SPLITS": _MAX_SPLITS,
                },
                num_warps=4,
                num_stages=3,
            )
            for head_dim in _HEAD_DIMS
            for is_split, combines in ((False, False), (True, False), (True, True))
        ),
        aligned={name: _PACKED_INPUTS[name] for name in ("header", "slots", "block_tables", "context_lens")},
    ),
    KernelSpec(
        name="combine_splits",
        function="combine_splits",
        parameters={"partial": "*fp32", "partial_lse": "*fp32", "header": "*i32", "out": "*T", "num_splits": "i32"},
        variants=tuple(Variant({"HEAD_DIM": head_dim, "MAX_SPLITS": _MAX_SPLITS}) for head_dim in _HEAD_DIMS),
        aligned={"header": 4},
    ),
    KernelSpec(
        name="attend_prefill",
        function="attend_prefill",
        parameters=_POOL | {"query_starts": "*i32", "context_lens": "*i32", "out": "*T"} | _SIZES,
        # BLOCK_N 64 needs 128 KiB of shared memory on sm_90; where there is less, and registers would spill, 32.
        variants=tuple(
            Variant({"HEAD_DIM": head_dim, "BLOCK_M": 128, "BLOCK_N": block_n}, num_warps=8, num_stages=3)
            for head_dim in _HEAD_DIMS
            for block_n in (64, 32)
        ),
        aligned=_PACKED_INPUTS,
    ),
)
