"""The projection kernels, run by the interpreter on poisoned memory, against fp64; and what consumes partial sums."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from server.kernels.catalog import variant_recipe
from server.kernels.spec import Variant
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.kernels import Kernel, Kernels
from tests.kernels.torch_reference import EPS, UNIT_ROUNDOFFS, assert_rounded_once
from tests.ops.host_driver import HostDriver, allocate_buffer, as_tensor, to_device
from tests.ops.host_kernels import host_image, host_images

DTYPES = (torch.bfloat16, torch.float16)
# fp32 sums of a hundred terms, in any order, in parts of the sum of their magnitudes.
SUM_ERROR = 2.0**-21
Constants = dict[str, int | bool]


class Bench:
    """Kernels of one dtype on a host driver. Outputs are poisoned and have a guard row before and behind."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        self._driver = HostDriver()
        self._kernels = Kernels(self._driver, self._driver.create_stream(), host_images())
        self._guards: list[Tensor] = []

    def tile(self, name: str, constants: Constants) -> Kernel:
        """One that no spec need list."""
        return self._kernels.load(host_image(variant_recipe(name, self.dtype_name, Variant(constants))))

    def kernel(self, name: str, **constants: int | bool) -> Kernel:
        return self._kernels.get(name, self.dtype_name, **constants)

    def device(self, tensor: Tensor) -> Buffer:
        return to_device(self._driver, tensor)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def out(self, *shape: int, dtype: str | None = None) -> Buffer:
        rows, width = shape[:-1], shape[-1]
        count = int(torch.tensor(rows).prod())
        whole = allocate_buffer(self._driver, (count + 2, width), dtype or self.dtype_name)
        bits = as_tensor(whole).view(torch.uint8)
        bits.fill_(0xFF)  # NaN in every dtype
        self._guards += [bits[0], bits[-1]]
        inner = whole.rows(1, count + 1)
        return Buffer(inner.address, shape, inner.dtype, inner.owner)

    def result(self, buffer: Buffer) -> Tensor:
        """Nothing beside it was written."""
        assert all(bool((guard == 0xFF).all()) for guard in self._guards), "a row beside the output was written"
        return as_tensor(buffer)


@pytest.fixture(params=DTYPES, ids=str)
def bench(request: pytest.FixtureRequest) -> Bench:
    torch.manual_seed(0)
    return Bench(request.param)


def constants(
    block_m: int, block_n: int, block_k: int, *, more_m: int = 0, more_n: int = 0, weights_first: bool = False
) -> Constants:
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "MORE_M": more_m, "MORE_N": more_n}
    return {**sizes, "MASKS_K": True, "WEIGHTS_FIRST": weights_first}


def grid(m: int, n: int, tile: Constants, num_splits: int = 1) -> tuple[int, int, int]:
    return -(-m // tile["BLOCK_M"]) * -(-n // tile["BLOCK_N"]), 1, num_splits


def products(x: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """In fp64, and what fp32 may have lost."""
    left, right = x.double(), weight.double()
    return left @ right.T, float((left.abs() @ right.abs().T).nan_to_num().max()) * SUM_ERROR


def assert_near(found: Tensor, exact: Tensor, sum_error: float) -> None:
    """Sums in fp32 that are rounded once."""
    torch.testing.assert_close(
        found.double(), exact, rtol=UNIT_ROUNDOFFS.get(found.dtype, 0.0) * 1.01, atol=sum_error, equal_nan=True
    )


TILES = {
    "one row": constants(1, 32, 64),
    "narrow": constants(8, 32, 32, weights_first=True),
    "rows": constants(16, 32, 64),
    "weights": constants(16, 64, 16, weights_first=True),
    "wide": constants(64, 32, 64),
    "more rows": constants(96, 32, 64, more_m=32),
    "more weights": constants(16, 24, 64, more_n=8),
    "more of both": constants(24, 40, 32, more_m=8, more_n=8, weights_first=True),
}


def rows_of_some_tiles(tile: Constants) -> int:
    """Few where each row is a tile: programs run one after the other here."""
    return 2 if tile["BLOCK_M"] == 1 else 19


def boundaries() -> Iterator[tuple[str, int, int, int]]:
    """Rows at both sides of each tile's end; n and k odd multiples of 8."""
    for name, tile in TILES.items():
        size = int(tile["BLOCK_M"])
        for m in sorted({1, 2, size - 1, size, size + 1, size - int(tile["MORE_M"])} - {0}):
            yield name, m, 40, 136


@pytest.mark.parametrize(
    ("name", "m", "n", "k"),
    [*boundaries(), ("rows", 15, 8, 8), ("rows", 17, 40, 64), ("weights", 129, 56, 24)],
)
def test_linear_is_that_of_fp64_rounded_once(bench: Bench, name: str, m: int, n: int, k: int) -> None:
    x, weight, bias = bench.random(m, k), bench.random(n, k), bench.random(n)
    exact, sum_error = products(x, weight)
    out, tile = bench.out(m, n), TILES[name]
    inputs = [bench.device(tensor) for tensor in (x, weight, bias)]
    bench.tile("linear", tile | {"HAS_BIAS": True})(grid(m, n, tile), *inputs, out, m, n, k)
    assert_near(bench.result(out), exact + bias.double(), sum_error)


@pytest.mark.parametrize("name", TILES)
def test_logits_stay_fp32_and_a_bias_that_is_none_is_not_read(bench: Bench, name: str) -> None:
    m, n, k = 5, 72, 40
    x, weight = bench.random(m, k), bench.random(n, k)
    exact, sum_error = products(x, weight)
    out, tile = bench.out(m, n, dtype="float32"), TILES[name]
    inputs = bench.device(x), bench.device(weight), 16  # an address that is nobody's
    bench.tile("linear_fp32", tile | {"HAS_BIAS": False})(grid(m, n, tile), *inputs, out, m, n, k)
    assert_near(bench.result(out), exact, sum_error)


@pytest.mark.parametrize("name", TILES)
def test_k_of_whole_tiles_needs_no_masks(bench: Bench, name: str) -> None:
    tile = TILES[name] | {"MASKS_K": False}
    m, n, k = rows_of_some_tiles(tile), 40, 128
    x, weight = bench.random(m, k), bench.random(n, k)
    exact, sum_error = products(x, weight)
    out = bench.out(m, n)
    inputs = bench.device(x), bench.device(weight), 16
    bench.tile("linear", tile | {"HAS_BIAS": False})(grid(m, n, tile), *inputs, out, m, n, k)
    assert_near(bench.result(out), exact, sum_error)


@pytest.mark.parametrize("kernel", ["linear", "gated_linear"])
@pytest.mark.parametrize("name", TILES)
def test_rows_that_are_not_finite_leave_their_neighbours_alone(bench: Bench, name: str, kernel: str) -> None:
    m, n, k = 6, 40, 72
    x, weight = bench.random(m, k), bench.random(2 * n, k)
    x[[0, 2, 5]] = torch.tensor([[torch.nan], [torch.inf], [torch.nan]], dtype=bench.dtype)
    out, tile = bench.out(m, n), TILES[name]
    if kernel == "linear":
        exact, sum_error = products(x, weight[:n])
        arguments = [bench.device(x), bench.device(weight[:n].clone()), 16, out, m, n, k]
        bench.tile(kernel, tile | {"HAS_BIAS": False})(grid(m, n, tile), *arguments)
    else:
        exact, sum_error = gated(x, weight, n)
        bench.tile(kernel, tile)(grid(m, n, tile), bench.device(x), bench.device(weight), out, m, n, k, n)
    finite = [row for row in range(m) if row not in (0, 2, 5)]
    found = bench.result(out)
    assert found[[0, 5]].isnan().all()
    assert_near(found[finite], exact[finite], sum_error)


@pytest.mark.parametrize("num_splits", [1, 3, 7])
@pytest.mark.parametrize("name", TILES)
def test_splits_of_k_leave_partial_sums_that_add_up(bench: Bench, name: str, num_splits: int) -> None:
    """Also where they do not divide k, or are more than its tiles: those leave zeros."""
    tile = TILES[name]
    m, n, k = rows_of_some_tiles(tile), 40, 136
    x, weight, bias = bench.random(m, k), bench.random(n, k), bench.random(n)
    exact, sum_error = products(x, weight)
    partials = bench.out(num_splits, m, n, dtype="float32")
    sizes = (m, n, k, num_splits)
    bench.tile("linear_split", tile)(
        grid(m, n, tile, num_splits), bench.device(x), bench.device(weight), partials, *sizes
    )
    assert_near(bench.result(partials).sum(0), exact, sum_error)
    for has_bias in (False, True):
        out = bench.out(m, n)
        reduce = bench.kernel("reduce_partials", HAS_BIAS=has_bias)
        reduce((m, 1, 1), partials, bench.device(bias) if has_bias else 16, out, m, n, num_splits)
        assert_near(bench.result(out), exact + (bias.double() if has_bias else 0.0), sum_error)


def gated(x: Tensor, weight: Tensor, block: int) -> tuple[Tensor, float]:
    """silu(gate) * up in fp64, and what fp32 may have lost."""
    both, sum_error = products(x, weight)
    gates, ups = both.unflatten(1, (-1, 2, block)).unbind(2)
    exact = (torch.nn.functional.silu(gates) * ups).flatten(1)
    largest = float(both.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return exact, 2 * sum_error * (largest + 1.0)


@pytest.mark.parametrize(("n", "block"), [(8, 8), (40, 40), (120, 24), (128, 64)])
@pytest.mark.parametrize("name", TILES)
def test_gated_linear_pairs_the_rows_of_each_block(bench: Bench, name: str, n: int, block: int) -> None:
    """Tiles within one block, across two, and across many."""
    tile = TILES[name]
    m, k = rows_of_some_tiles(tile), 72
    x, weight = bench.random(m, k), bench.random(2 * n, k)
    exact, sum_error = gated(x, weight, block)
    out = bench.out(m, n)
    bench.tile("gated_linear", tile)(grid(m, n, tile), bench.device(x), bench.device(weight), out, m, n, k, block)
    assert_near(bench.result(out), exact, sum_error)


def test_a_gate_that_is_far_below_zero_lets_nothing_through(bench: Bench) -> None:
    """exp of its negative is infinite."""
    x, weight = torch.full((1, 8), 100.0, dtype=bench.dtype), torch.ones(16, 8, dtype=bench.dtype)
    weight[:8] = -1.0
    out, tile = bench.out(1, 8), TILES["rows"]
    bench.tile("gated_linear", tile)((1, 1, 1), bench.device(x), bench.device(weight), out, 1, 8, 8, 8)
    assert torch.equal(bench.result(out), torch.zeros(1, 8, dtype=bench.dtype))


@pytest.mark.parametrize(("width", "num_splits"), [(8, 1), (512, 2), (1032, 9)])
def test_reduce_partials_adds_in_order_and_rounds_once(bench: Bench, width: int, num_splits: int) -> None:
    parts, bias = torch.randn(num_splits, 3, width), bench.random(width)
    exact = parts[0].clone()
    for part in parts[1:]:
        exact += part
    kernel = bench.kernel("reduce_partials", HAS_BIAS=True)
    tiles, out = -(-width // int(kernel.image.constants["BLOCK"])), bench.out(3, width)
    kernel((3, tiles, 1), bench.device(parts), bench.device(bias), out, 3, width, num_splits)
    assert torch.equal(bench.result(out), (exact + bias.float()).to(bench.dtype))


@pytest.mark.parametrize("num_splits", [1, 2, 9])
@pytest.mark.parametrize("hidden", [120, 4104, 8200])
def test_add_rms_norm_partials_adds_all_parts_and_norms_the_sum(bench: Bench, hidden: int, num_splits: int) -> None:
    residual, parts, weight = torch.randn(3, hidden), torch.randn(num_splits, 3, hidden), bench.random(hidden)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    total += residual
    summed, out = bench.out(3, hidden, dtype="float32"), bench.out(3, hidden)
    as_tensor(summed).copy_(residual)
    inputs = bench.device(parts), bench.device(weight)
    bench.kernel("add_rms_norm_partials")((3, 1, 1), summed, *inputs, out, 3, hidden, num_splits, EPS)
    assert torch.equal(bench.result(summed), total)
    scale = torch.rsqrt(total.double().square().mean(1, keepdim=True) + EPS)
    assert_rounded_once(bench.result(out), (total.double() * scale * weight.double()).float())
