"""Which kernels scripts/tune-kernels tries for a GEMM. Imports no Triton, and nothing that serves imports it.

Rules of thumb that keep the list short enough to time all of it: it should hold the fastest, not only fast ones. All
for Qwen2-7B was compiled once for sm_90, and none spills registers (scripts/gpu/gemm_bench.py resources).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from server.kernels.spec import Constant
from server.ops.cuda.sizes import GEMM_WORKSPACE
from server.ops.cuda.tiles import GemmOperation

ITEM_BYTES = 2  # of x and weights
MAX_SPLITS = 16
MIN_SPLIT_COLUMNS = 256  # of k: less is all ramp
MAX_SUMS_PER_THREAD = 160  # of the 255 registers
_THREADS = 32  # of a warp
_PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148}
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
_HAS_WIDE_CORES = ("sm_90", "sm_100")  # 64 rows of one operand and more; others take 16 by 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel of gemm.py by name, its constants and launch; `num_splits`: parts of k that are summed apart."""

    kernel: str
    constants: Mapping[str, Constant]
    num_warps: int
    num_stages: int
    num_splits: int = 1


@dataclass(frozen=True, slots=True)
class _Tile:
    """`rows` of x by `weights` rows of weights; of each, how many are in a second tile."""

    rows: int
    weights: int
    block_k: int
    num_warps: int
    num_stages: int
    weights_first: bool = False
    more_rows: int = 0
    more_weights: int = 0

    @property
    def shared_bytes(self) -> int:
        """Of what is on its way; 0 where it goes to registers."""
        is_staged = self.rows > 1
        return is_staged * self.num_stages * (self.rows + self.weights) * self.block_k * ITEM_BYTES

    @property
    def sums_per_thread(self) -> int:
        """Registers that the sums take."""
        height = self.block_k if self.rows == 1 else self.rows
        return height * self.weights // (self.num_warps * _THREADS)


def max_shared_bytes(arch: str) -> int:
    """What a block may have."""
    return _SHARED_BYTES.get(arch, 48 << 10)


def candidates(
    operation: GemmOperation, m: int, n: int, k: int, *, has_bias: bool, block: int, arch: str
) -> list[Candidate]:
    """For m rows by weights [n, k]; `block`: columns of a block of gate and then of up, 0 for other operations.

    Few enough to time each: none for a gate with a bias, which no kernel adds.
    """
    found: list[Candidate] = []
    for tile in _tiles(m, arch):
        num_programs = -(-m // tile.rows) * -(-n // tile.weights)
        if not _fits(tile, k, arch) or not _is_worth_its_second_tile(tile, num_programs, arch):
            continue
        splits = _splits(num_programs, m, n, k, arch)
        by_splits = [_candidate("linear_split", tile, k, num_splits=count) for count in splits]
        if operation == "gated_linear":
            found += [] if has_bias else [_candidate("gated_linear", tile, k, columns=2)]
        elif operation == "logits":
            found.append(_candidate("linear_fp32", tile, k, HAS_BIAS=has_bias))
        elif operation == "linear_add_norm":
            found += [_candidate("linear", tile, k, HAS_BIAS=True)] if has_bias else by_splits
        else:
            whole = _candidate("linear", tile, k, HAS_BIAS=has_bias)
            in_parts = [candidate for candidate in by_splits if candidate.num_splits > 1]
            # Where a projection has enough programs by itself, parts of k are only more work.
            is_enough, is_plenty = (num_programs >= share * _processors(arch) for share in (0.5, 3))
            found += [whole] if is_enough or not in_parts else []
            found += [] if is_plenty else in_parts
    return found


def _candidate(
    kernel: str, tile: _Tile, k: int, *, columns: int = 1, num_splits: int = 1, **more: Constant
) -> Candidate:
    """`columns`: rows of weights that make one column of `out`."""
    constants: dict[str, Constant] = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.weights // columns,
        "BLOCK_K": tile.block_k,
        "MORE_M": tile.more_rows,
        "MORE_N": tile.more_weights // columns,
        "MASKS_K": k % tile.block_k != 0,
        "WEIGHTS_FIRST": tile.weights_first,
    }
    return Candidate(kernel, constants | more, tile.num_warps, tile.num_stages, num_splits)


# Tiles


def _tiles(m: int, arch: str) -> Iterator[_Tile]:
    if m == 1:
        yield from _ONE_ROW
    tiles = [tile for rows, more_rows in _row_tiles(m) for tile in _of_rows(rows, more_rows)]
    if arch not in _HAS_WIDE_CORES:
        tiles = [replace(tile, weights_first=tile.rows == 8) for tile in tiles]
    yield from dict.fromkeys(tiles)


# Straight from memory to registers: as many loads on their way as there are registers for.
_ONE_ROW = (
    _Tile(1, 4, 512, 2, 1),
    _Tile(1, 4, 512, 4, 1),
    _Tile(1, 8, 512, 4, 1),
    _Tile(1, 8, 512, 8, 1),
    _Tile(1, 8, 256, 4, 1),
    _Tile(1, 16, 256, 4, 1),
)
_ROW_SIZES = ((8, 0), (16, 0), (32, 0), (48, 16), (64, 0), (96, 32), (128, 0), (160, 32), (192, 64), (256, 0))


def _row_tiles(m: int) -> list[tuple[int, int]]:
    """The size that holds all rows, so that weights are read once, and those that do it in two and three tiles."""
    counts = [1, *([2] if m > 64 else []), *([3] if m > 128 else [])]
    sizes = [_covering(-(-m // count)) for count in counts]
    sizes += [(16, 0)] if m <= 8 else []  # the least of wgmma
    sizes += [(128, 0)] if m > 256 else []
    return list(dict.fromkeys(sizes))


def _covering(num_rows: int) -> tuple[int, int]:
    return next((size for size in _ROW_SIZES if size[0] >= num_rows), _ROW_SIZES[-1])


def _of_rows(rows: int, more_rows: int) -> Iterator[_Tile]:
    """By the size of what is read at a time (few rows), or by reuse of what is in shared memory (many)."""
    if rows <= 32:
        yield from _of_few_rows(rows)
    elif rows <= 96:
        yield from _of_some_rows(rows, more_rows)
    else:
        yield from _of_many_rows(rows, more_rows)


_WEIGHTS_FIRST = ((64, 64, 3), (64, 64, 5), (64, 128, 3), (64, 128, 5), (64, 256, 3), (128, 64, 4), (128, 128, 3))
_ROWS_FIRST = ((32, 128, 4), (32, 256, 3), (64, 64, 3), (64, 64, 5), (64, 128, 3), (128, 64, 3), (128, 128, 3))


def _of_few_rows(rows: int) -> Iterator[_Tile]:
    """Weights are all that counts: 8 to 32 KiB at a time, 3 to 5 times that on their way, several programs at once."""
    for weights, block_k, num_stages in _WEIGHTS_FIRST:
        yield _Tile(rows, weights, block_k, 4, num_stages, weights_first=True)
    if rows >= 16:
        for weights, block_k, num_stages in _ROWS_FIRST:
            yield _Tile(rows, weights, block_k, 4, num_stages)


def _of_some_rows(rows: int, more_rows: int) -> Iterator[_Tile]:
    for weights, block_k, num_warps, num_stages in (
        (64, 64, 4, 5),
        (64, 128, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (256, 64, 8, 4),
    ):
        yield _Tile(rows, weights, block_k, num_warps, num_stages, weights_first=True, more_rows=more_rows)
        if rows == 64:
            yield _Tile(rows, weights, block_k, num_warps, num_stages)
    if rows == 64:
        yield from _of_two_tiles_of_weights(rows, 0)


def _of_many_rows(rows: int, more_rows: int) -> Iterator[_Tile]:
    """Traffic from the L2 cache is what limits these: the larger both sides, the better, as registers allow."""
    # A second tile of 32 rows is too low for wgmma's wide side.
    sides = (True,) if 0 < more_rows < 64 else (False, True)
    for weights, block_k, num_warps, num_stages in (
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
    ):
        for weights_first in sides:
            yield _Tile(rows, weights, block_k, num_warps, num_stages, weights_first, more_rows)
    if more_rows in (0, 64):
        yield from _of_two_tiles_of_weights(rows, more_rows)


def _of_two_tiles_of_weights(rows: int, more_rows: int) -> Iterator[_Tile]:
    """For numbers of weights that divide badly among multiprocessors otherwise."""
    for weights, more_weights in ((96, 32), (144, 16), (288, 32)):
        yield _Tile(rows, weights, 64, 8, 4, False, more_rows, more_weights)


# What is left out


def _fits(tile: _Tile, k: int, arch: str) -> bool:
    """Into shared memory, registers and k: only the smallest tiles mask its end."""
    return (
        tile.shared_bytes <= max_shared_bytes(arch)
        and tile.sums_per_thread <= MAX_SUMS_PER_THREAD
        and (k % tile.block_k == 0 or tile.block_k <= 64 or tile.rows == 1)
    )


def _is_worth_its_second_tile(tile: _Tile, num_programs: int, arch: str) -> bool:
    """Few waves, and the last one nearly full."""
    is_short = num_programs <= 4 * _processors(arch)
    return not tile.more_weights or (is_short and _fullness(num_programs, arch) > 0.95)


def _splits(num_programs: int, m: int, n: int, k: int, arch: str) -> Sequence[int]:
    """Into how many parts k may be cut: of those that fill one, two and three waves, the two that do it best."""
    most = min(MAX_SPLITS, k // MIN_SPLIT_COLUMNS, GEMM_WORKSPACE.num_bytes // (4 * m * n))
    if not most:
        return []
    fillings = (waves * _processors(arch) // num_programs for waves in (1, 2, 3))
    counts = sorted({max(1, min(most, filling)) for filling in fillings})
    return sorted(sorted(counts, key=lambda count: -_fullness(num_programs * count, arch))[:2])


def _fullness(num_programs: int, arch: str) -> float:
    """Share of multiprocessors that work, over all waves."""
    num_waves = -(-num_programs // _processors(arch))
    return num_programs / (num_waves * _processors(arch))


def _processors(arch: str) -> int:
    return _PROCESSORS.get(arch, 100)
