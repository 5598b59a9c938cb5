"""Projections x @ weight.T with fp32 sums, for numbers of rows at which reading the weights is what takes the time.

Which tile suits which size is data (tiles/*.toml). Constants of every kernel:
BLOCK_M, BLOCK_N    rows and columns of `out` per program; one row is summed without tensor cores
BLOCK_K             columns of x and weight at a time
MORE_M              of BLOCK_M, the rows in a second tile, which makes 96 of 64 + 32 or 192 of 128 + 64; mostly 0
MASKS_K             k need not be a multiple of BLOCK_K
WEIGHTS_FIRST       tensor cores compute weight @ x.T: their wide side (64 rows and more) is weights, x the narrow one
"""

import triton
import triton.language as tl

from server.kernels.spec import Constant, KernelSpec, Variant


@triton.jit
def _tile_sums(
    x,
    weight,
    rows,
    more_rows,
    weight_rows,
    m,
    k,
    first_tile,
    end_tile,
    BLOCK_K: tl.constexpr,
    HAS_MORE: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """fp32 sums of x @ weight[weight_rows].T over some tiles of k: [rows, weight rows], and of more_rows if HAS_MORE.

    Instead of rows beyond the last, the last one is computed again: that needs no masks in the loop.
    """
    columns = tl.arange(0, BLOCK_K)
    weight_tile = weight + weight_rows.to(tl.int64)[:, None] * k + columns[None, :]
    x_tile = x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * k + columns[None, :]
    sums = _no_sums(rows.shape[0], weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
    if HAS_MORE:
        more_tile = x + tl.minimum(more_rows, m - 1).to(tl.int64)[:, None] * k + columns[None, :]
        more_sums = _no_sums(more_rows.shape[0], weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
    # Inputs of the kernel before are read from here on: x, not the weights.
    for tile in range(first_tile, end_tile):
        begin = tile * BLOCK_K
        in_row = (begin + columns < k)[None, :]
        weights = _load(weight_tile + begin, in_row, MASKS_K)
        sums = _add_products(sums, _load(x_tile + begin, in_row, MASKS_K), weights, WEIGHTS_FIRST)
        if HAS_MORE:
            more_sums = _add_products(more_sums, _load(more_tile + begin, in_row, MASKS_K), weights, WEIGHTS_FIRST)
    sums = _by_row(sums, rows.shape[0], WEIGHTS_FIRST)
    more_sums = _by_row(more_sums, more_rows.shape[0], WEIGHTS_FIRST) if HAS_MORE else 0.0
    return sums, more_sums


@triton.jit
def _no_sums(NUM_ROWS: tl.constexpr, NUM_WEIGHTS: tl.constexpr, BLOCK_K: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    if NUM_ROWS == 1:
        sums = tl.zeros((NUM_WEIGHTS, BLOCK_K), tl.float32)
    elif WEIGHTS_FIRST:
        sums = tl.zeros((NUM_WEIGHTS, NUM_ROWS), tl.float32)
    else:
        sums = tl.zeros((NUM_ROWS, NUM_WEIGHTS), tl.float32)
    return sums


@triton.jit
def _add_products(sums, values, weights, WEIGHTS_FIRST: tl.constexpr):
    if values.shape[0] == 1:
        sums += weights.to(tl.float32) * values.to(tl.float32)
    elif WEIGHTS_FIRST:
        sums = tl.dot(weights, tl.trans(values), sums)
    else:
        sums = tl.dot(values, tl.trans(weights), sums)
    return sums


@triton.jit
def _by_row(sums, NUM_ROWS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """[rows, weight rows], whatever was summed."""
    if NUM_ROWS == 1:
        sums = tl.sum(sums, 1)[None, :]
    elif WEIGHTS_FIRST:
        sums = tl.trans(sums)
    return sums


@triton.jit
def _load(pointers, in_row, MASKS_K: tl.constexpr):
    return tl.load(pointers, mask=in_row, other=0.0) if MASKS_K else tl.load(pointers)


@triton.jit
def _rows_of_program(m, BLOCK_M: tl.constexpr, MORE_M: tl.constexpr):
    """Rows of `out` in the first tile and in the second one. Programs that share weights follow each other."""
    first_row = tl.program_id(0) % tl.cdiv(m, BLOCK_M) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M - MORE_M)
    more_rows = first_row + (BLOCK_M - MORE_M) + tl.arange(0, MORE_M) if MORE_M else first_row
    return rows, more_rows


@triton.jit
def _first_column_of_program(m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.program_id(0) // tl.cdiv(m, BLOCK_M) * BLOCK_N


@triton.jit
def _store(out, values, first_row, rows, columns, m, n):
    """values to out[first_row + rows, columns], where rows < m and columns < n."""
    where = out + (first_row + rows.to(tl.int64))[:, None] * n + columns[None, :]
    tl.store(where, values.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def linear(
    x,
    weight,
    bias,
    out,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MORE_M: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """out [m, n] = x [m, k] @ weight [n, k].T + bias [n]. grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, 1)."""
    HAS_MORE: tl.constexpr = MORE_M > 0
    rows, more_rows = _rows_of_program(m, BLOCK_M, MORE_M)
    columns = _first_column_of_program(m, BLOCK_M, BLOCK_N) + tl.arange(0, BLOCK_N)
    weight_rows, num_tiles = tl.minimum(columns, n - 1), tl.cdiv(k, BLOCK_K)
    sums, more_sums = _tile_sums(
        x, weight, rows, more_rows, weight_rows, m, k, 0, num_tiles, BLOCK_K, HAS_MORE, MASKS_K, WEIGHTS_FIRST
    )
    if HAS_BIAS:
        biases = tl.load(bias + weight_rows).to(tl.float32)[None, :]
        sums, more_sums = sums + biases, more_sums + biases
    _store(out, sums, 0, rows, columns, m, n)
    if HAS_MORE:
        _store(out, more_sums, 0, more_rows, columns, m, n)


@triton.jit
def linear_split(
    x,
    weight,
    partials,
    m,
    n,
    k,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MORE_M: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """partials [num_splits, m, n]: x @ weight.T, k cut into num_splits parts of whole tiles; 0 where none is left.

    grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, num_splits).
    """
    HAS_MORE: tl.constexpr = MORE_M > 0
    rows, more_rows = _rows_of_program(m, BLOCK_M, MORE_M)
    columns = _first_column_of_program(m, BLOCK_M, BLOCK_N) + tl.arange(0, BLOCK_N)
    weight_rows, num_tiles, split = tl.minimum(columns, n - 1), tl.cdiv(k, BLOCK_K), tl.program_id(2)
    # Parts differ by a tile at most.
    begin, end = num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits
    sums, more_sums = _tile_sums(
        x, weight, rows, more_rows, weight_rows, m, k, begin, end, BLOCK_K, HAS_MORE, MASKS_K, WEIGHTS_FIRST
    )
    first_row = split.to(tl.int64) * m
    _store(partials, sums, first_row, rows, columns, m, n)
    if HAS_MORE:
        _store(partials, more_sums, first_row, more_rows, columns, m, n)


@triton.jit
def gated_linear(
    x,
    weight,
    out,
    m,
    n,
    k,
    block,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MORE_M: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """out [m, n] = silu(x @ gate.T) * (x @ up.T). grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, 1).

    weight [2 n, k]: per `block` columns of `out`, their rows of gate, then those of up. A tile may lie across blocks.
    """
    HAS_MORE: tl.constexpr = MORE_M > 0
    rows, more_rows = _rows_of_program(m, BLOCK_M, MORE_M)
    first_column = _first_column_of_program(m, BLOCK_M, BLOCK_N)
    # A column's two rows of weights are neighbours in the tile, so that one thread gets both sums.
    halves = tl.arange(0, 2 * BLOCK_N)
    of_half = tl.minimum(first_column + halves // 2, n - 1)
    weight_rows = (of_half // block * 2 + halves % 2) * block + of_half % block
    num_tiles = tl.cdiv(k, BLOCK_K)
    sums, more_sums = _tile_sums(
        x, weight, rows, more_rows, weight_rows, m, k, 0, num_tiles, BLOCK_K, HAS_MORE, MASKS_K, WEIGHTS_FIRST
    )
    columns = first_column + tl.arange(0, BLOCK_N)
    _store(out, _gated(sums, BLOCK_M - MORE_M, BLOCK_N), 0, rows, columns, m, n)
    if HAS_MORE:
        _store(out, _gated(more_sums, MORE_M, BLOCK_N), 0, more_rows, columns, m, n)


@triton.jit
def _gated(sums, NUM_ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[rows, columns], of sums in which each column of gate is followed by that of up."""
    gates, ups = tl.split(tl.reshape(sums, (NUM_ROWS, BLOCK_N, 2)))
    return gates / (1.0 + tl.exp(-gates)) * ups


_SIZES = {"m": "i32", "n": "i32", "k": "i32"}
_ALIGNED = {"n": 8, "k": 8}
# Any shape can be run by this one, which tests use; those that are fast are named by tables.
_GENERAL: dict[str, Constant] = {
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 64,
    "MORE_M": 0,
    "MASKS_K": True,
    "WEIGHTS_FIRST": False,
}


def _linear(name: str, out: str) -> KernelSpec:
    return KernelSpec(
        name=name,
        function="linear",
        parameters={"x": "*T", "weight": "*T", "bias": "*T", "out": out, **_SIZES},
        variants=(Variant(_GENERAL | {"HAS_BIAS": True}, num_stages=3),),
        aligned=_ALIGNED,
    )


SPECS = (
    _linear("linear", "*T"),
    _linear("linear_fp32", "*fp32"),
    KernelSpec(
        name="linear_split",
        function="linear_split",
        parameters={"x": "*T", "weight": "*T", "partials": "*fp32", **_SIZES, "num_splits": "i32"},
        variants=(Variant(_GENERAL, num_stages=3),),
        aligned=_ALIGNED,
    ),
    KernelSpec(
        name="gated_linear",
        function="gated_linear",
        parameters={"x": "*T", "weight": "*T", "out": "*T", **_SIZES, "block": "i32"},
        variants=(Variant(_GENERAL, num_stages=3),),
        aligned=_ALIGNED | {"block": 8},
    ),
)
