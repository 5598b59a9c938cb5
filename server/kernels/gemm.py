"""Projections x @ weight.T with fp32 sums, for numbers of rows at which reading the weights is what takes the time.

Which tile suits which size is data (tiles/*.toml). Constants of every kernel:
BLOCK_M, BLOCK_N    rows and columns of `out` per program; one row is summed without tensor cores
BLOCK_K             columns of x and weight at a time
MORE_M, MORE_N      of BLOCK_M and BLOCK_N, what is in a second tile, which makes 192 of 128 + 64; 0 if they are one
MASKS_K             k need not be a multiple of BLOCK_K
WEIGHTS_FIRST       tensor cores compute weight @ x.T: their wide side (64 rows and more) is weights, x the narrow one

Tiles come by pointers: tensor descriptors that a kernel makes need scratch memory, which launches do not give.
"""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import Constant, KernelSpec, Variant


@triton.jit
def _tile_sums(
    x,
    weight,
    rows,
    more_rows,
    weight_rows,
    more_weight_rows,
    m,
    k,
    first_tile,
    end_tile,
    BLOCK_K: tl.constexpr,
    HAS_MORE_M: tl.constexpr,
    HAS_MORE_N: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """fp32 sums of x @ weight.T over some tiles of k, of four rectangles, of which those without more are 0:

    rows by weight_rows, more_rows by weight_rows, rows by more_weight_rows, more_rows by more_weight_rows.
    Instead of rows beyond the last, the last one is computed again: that needs no masks in the loop.
    """
    IS_ONE_ROW: tl.constexpr = rows.shape[0] == 1
    tl.static_assert(not (IS_ONE_ROW and HAS_MORE_N), "one row is summed with a single tile of weights")
    columns = tl.arange(0, BLOCK_K)
    weight_tile = _pointers(weight, weight_rows, columns, k)
    # Beside each row of weights its own copy of the one row of x: no thread needs what another one has read.
    x_rows = rows + weight_rows * 0 if IS_ONE_ROW else rows
    x_tile = _pointers(x, tl.minimum(x_rows, m - 1), columns, k)
    sums = _no_sums(rows.shape[0], weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
    if HAS_MORE_M:
        more_x_tile = _pointers(x, tl.minimum(more_rows, m - 1), columns, k)
        sums_m = _no_sums(more_rows.shape[0], weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
    if HAS_MORE_N:
        more_weight_tile = _pointers(weight, more_weight_rows, columns, k)
        sums_n = _no_sums(rows.shape[0], more_weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
        if HAS_MORE_M:
            sums_mn = _no_sums(more_rows.shape[0], more_weight_rows.shape[0], BLOCK_K, WEIGHTS_FIRST)
    # Of these, only x is what a kernel before has written: first tiles of weights could be requested before the wait.
    for tile in range(first_tile, end_tile):
        begin = tile * BLOCK_K
        in_row = (begin + columns < k)[None, :]
        weights = _load(weight_tile + begin, in_row, MASKS_K)
        values = _load(x_tile + begin, in_row, MASKS_K)
        sums = _add_products(sums, values, weights, IS_ONE_ROW, WEIGHTS_FIRST)
        if HAS_MORE_M:
            more_values = _load(more_x_tile + begin, in_row, MASKS_K)
            sums_m = _add_products(sums_m, more_values, weights, False, WEIGHTS_FIRST)
        if HAS_MORE_N:
            more_weights = _load(more_weight_tile + begin, in_row, MASKS_K)
            sums_n = _add_products(sums_n, values, more_weights, False, WEIGHTS_FIRST)
            if HAS_MORE_M:
                sums_mn = _add_products(sums_mn, more_values, more_weights, False, WEIGHTS_FIRST)
    sums = _by_row(sums, rows.shape[0], WEIGHTS_FIRST)
    sums_m = _by_row(sums_m, more_rows.shape[0], WEIGHTS_FIRST) if HAS_MORE_M else 0.0
    sums_n = _by_row(sums_n, rows.shape[0], WEIGHTS_FIRST) if HAS_MORE_N else 0.0
    sums_mn = _by_row(sums_mn, more_rows.shape[0], WEIGHTS_FIRST) if HAS_MORE_M and HAS_MORE_N else 0.0
    return sums, sums_m, sums_n, sums_mn


@triton.jit
def _pointers(matrix, rows, columns, width):
    return matrix + rows.to(tl.int64)[:, None] * width + columns[None, :]


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
def _add_products(sums, values, weights, IS_ONE_ROW: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    if IS_ONE_ROW:
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
def _first_of_program(m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column of `out` where a program's tile begins. Programs that share weights follow each other."""
    num_row_tiles = tl.cdiv(m, BLOCK_M)
    return tl.program_id(0) % num_row_tiles * BLOCK_M, tl.program_id(0) // num_row_tiles * BLOCK_N


@triton.jit
def _two_ranges(first, BLOCK: tl.constexpr, MORE: tl.constexpr):
    """`BLOCK` numbers from `first` on, the last `MORE` of them apart."""
    numbers = first + tl.arange(0, BLOCK - MORE)
    more_numbers = first + (BLOCK - MORE) + tl.arange(0, MORE) if MORE else first
    return numbers, more_numbers


@triton.jit
def _store(out, values, rows, columns, m, n):
    """values to out[rows, columns], where rows < m and columns < n."""
    where = _pointers(out, rows, columns, n)
    tl.store(where, values.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def _store_tile(
    out,
    sums,
    sums_m,
    sums_n,
    sums_mn,
    rows,
    more_rows,
    columns,
    more_columns,
    m,
    n,
    HAS_MORE_M: tl.constexpr,
    HAS_MORE_N: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """What _tile_sums gave, to the parts of `out` that it is of."""
    _store(out, _gated(sums) if IS_GATED else sums, rows, columns, m, n)
    if HAS_MORE_M:
        _store(out, _gated(sums_m) if IS_GATED else sums_m, more_rows, columns, m, n)
    if HAS_MORE_N:
        _store(out, _gated(sums_n) if IS_GATED else sums_n, rows, more_columns, m, n)
        if HAS_MORE_M:
            _store(out, _gated(sums_mn) if IS_GATED else sums_mn, more_rows, more_columns, m, n)


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
    MORE_N: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """out [m, n] = x [m, k] @ weight [n, k].T + bias [n]. grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    first_row, first_column = _first_of_program(m, BLOCK_M, BLOCK_N)
    rows, more_rows = _two_ranges(first_row, BLOCK_M, MORE_M)
    columns, more_columns = _two_ranges(first_column, BLOCK_N, MORE_N)
    weight_rows, more_weight_rows = tl.minimum(columns, n - 1), tl.minimum(more_columns, n - 1)
    sums, sums_m, sums_n, sums_mn = _tile_sums(
        *(x, weight, rows, more_rows, weight_rows, more_weight_rows, m, k, 0, tl.cdiv(k, BLOCK_K)),
        *(BLOCK_K, MORE_M > 0, MORE_N > 0, MASKS_K, WEIGHTS_FIRST),
    )
    if HAS_BIAS:
        biases = tl.load(bias + weight_rows).to(tl.float32)[None, :]
        sums, sums_m = sums + biases, sums_m + biases
        if MORE_N:
            more_biases = tl.load(bias + more_weight_rows).to(tl.float32)[None, :]
            sums_n, sums_mn = sums_n + more_biases, sums_mn + more_biases
    _store_tile(
        *(out, sums, sums_m, sums_n, sums_mn, rows, more_rows, columns, more_columns, m, n),
        *(MORE_M > 0, MORE_N > 0, False),
    )


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
    MORE_N: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """partials [num_splits, m, n]: x @ weight.T, k cut into num_splits parts of whole tiles; 0 where none is left.

    grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, num_splits).
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    first_row, first_column = _first_of_program(m, BLOCK_M, BLOCK_N)
    rows, more_rows = _two_ranges(first_row, BLOCK_M, MORE_M)
    columns, more_columns = _two_ranges(first_column, BLOCK_N, MORE_N)
    weight_rows, more_weight_rows = tl.minimum(columns, n - 1), tl.minimum(more_columns, n - 1)
    num_tiles, split = tl.cdiv(k, BLOCK_K), tl.program_id(2)
    # Parts differ by a tile at most.
    begin, end = num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits
    sums, sums_m, sums_n, sums_mn = _tile_sums(
        *(x, weight, rows, more_rows, weight_rows, more_weight_rows, m, k, begin, end),
        *(BLOCK_K, MORE_M > 0, MORE_N > 0, MASKS_K, WEIGHTS_FIRST),
    )
    of_split = partials + split.to(tl.int64) * m * n
    _store_tile(
        *(of_split, sums, sums_m, sums_n, sums_mn, rows, more_rows, columns, more_columns, m, n),
        *(MORE_M > 0, MORE_N > 0, False),
    )


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
    MORE_N: tl.constexpr,
    MASKS_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """out [m, n] = silu(x @ gate.T) * (x @ up.T). grid (ceil(n / BLOCK_N) * ceil(m / BLOCK_M), 1, 1).

    weight [2 n, k]: per `block` columns of `out`, their rows of gate, then those of up. A tile may lie across blocks.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    first_row, first_column = _first_of_program(m, BLOCK_M, BLOCK_N)
    rows, more_rows = _two_ranges(first_row, BLOCK_M, MORE_M)
    columns, more_columns = _two_ranges(first_column, BLOCK_N, MORE_N)
    halves, more_halves = _two_ranges(first_column * 2, 2 * BLOCK_N, 2 * MORE_N)
    weight_rows, more_weight_rows = _gate_and_up(halves, n, block), _gate_and_up(more_halves, n, block)
    sums, sums_m, sums_n, sums_mn = _tile_sums(
        *(x, weight, rows, more_rows, weight_rows, more_weight_rows, m, k, 0, tl.cdiv(k, BLOCK_K)),
        *(BLOCK_K, MORE_M > 0, MORE_N > 0, MASKS_K, WEIGHTS_FIRST),
    )
    _store_tile(
        *(out, sums, sums_m, sums_n, sums_mn, rows, more_rows, columns, more_columns, m, n),
        *(MORE_M > 0, MORE_N > 0, True),
    )


@triton.jit
def _gate_and_up(halves, n, block):
    """Rows of weights. A column's two are neighbours in the tile, so that one thread gets both sums."""
    columns = tl.minimum(halves // 2, n - 1)
    return (columns // block * 2 + halves % 2) * block + columns % block


@triton.jit
def _gated(sums):
    """[rows, columns], of sums in which each column of gate is followed by that of up."""
    gates, ups = tl.split(tl.reshape(sums, (sums.shape[0], sums.shape[1] // 2, 2)))
    return gates / (1.0 + tl.exp(-gates)) * ups


_SIZES = {"m": "i32", "n": "i32", "k": "i32"}
_ALIGNED = {"n": 8, "k": 8}
# Any shape can be run by this one, which tests use; those that are fast are named by tables.
_GENERAL: dict[str, Constant] = {
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 64,
    "MORE_M": 0,
    "MORE_N": 0,
    "MASKS_K": True,
    "WEIGHTS_FIRST": False,
}


def _linear(name: str, out: str, *has_biases: bool) -> KernelSpec:
    return KernelSpec(
        name=name,
        function="linear",
        parameters={"x": "*T", "weight": "*T", "bias": "*T", "out": out, **_SIZES},
        variants=tuple(Variant(_GENERAL | {"HAS_BIAS": has_bias}, num_stages=3) for has_bias in has_biases),
        aligned=_ALIGNED,
    )


SPECS = (
    _linear("linear", "*T", True, False),
    _linear("linear_fp32", "*fp32", False),
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
