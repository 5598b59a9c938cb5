"""Every tile that tuning may choose, on a GPU, at the shapes of Qwen2-7B, against fp64."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.cli.make_model import SHAPES
from server.kernels.candidates import Candidate
from server.kernels.tuning.__main__ import glue_recipes, recipes_of
from server.kernels.tuning.cases import GemmCase, cases_of
from server.kernels.tuning.compiled import CandidateFolder
from server.models.facts import facts_from_config
from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import Driver, KernelImage, Stream
from server.ops.cuda.gemms import tile_grid
from server.ops.cuda.kernels import Kernel, Kernels
from server.ops.cuda.nvidia import NvidiaDriver
from tests.kernels.torch_reference import EPS, UNIT_ROUNDOFFS, assert_rounded_once

ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384)
DTYPES = ("bfloat16", "float16")
# fp32 sums of thousands of terms on tensor cores, in parts of the sum of their magnitudes.
SUM_ERROR = 2.0**-18


def cases(dtype: str) -> list[GemmCase]:
    return cases_of(facts_from_config(SHAPES["qwen2-7b"] | {"dtype": dtype}))


@dataclass(frozen=True)
class Gpu:
    """Launches on tensors of torch, which shares the context; every launch is waited for."""

    driver: Driver
    stream: Stream
    folder: CandidateFolder
    dtype: BufferDType

    def tiles(self, case: GemmCase, m: int) -> Iterator[tuple[Candidate, KernelImage]]:
        """Those that were compiled, of which there must be some."""
        recipes = recipes_of(case, m, self.driver.facts.arch)
        images = [(candidate, self.folder.image(recipe)) for candidate, recipe in recipes]
        assert any(image for _, image in images), f"{case}, {m} rows: no candidate was compiled"
        yield from ((candidate, image) for candidate, image in images if image)

    def load(self, image: KernelImage) -> Kernel:
        return Kernel(self.driver, self.stream, image)

    def kernel(self, name: str, **constants: bool) -> Kernel:
        """One of those that add up partial sums."""
        images = [image for recipe in glue_recipes(self.dtype) if (image := self.folder.image(recipe))]
        return Kernels(self.driver, self.stream, images).get(name, self.dtype, **constants)

    def run(self, kernel: Kernel, grid: tuple[int, int, int], *args: Tensor | float) -> None:
        torch.cuda.synchronize()
        kernel(grid, *(_buffer(arg) if isinstance(arg, Tensor) else arg for arg in args))
        self.driver.synchronize(self.stream)


def _buffer(tensor: Tensor) -> Buffer:
    assert tensor.is_contiguous()
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), _name(tensor.dtype), tensor)


def _name(dtype: torch.dtype) -> BufferDType:
    return str(dtype).removeprefix("torch.")


@pytest.fixture(scope="module", params=DTYPES)
def gpu(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    """Compiled by a process of its own: in this one kernels are Python."""
    torch.manual_seed(0)
    driver, folder = NvidiaDriver.open(), tmp_path_factory.mktemp("candidates")
    arch = driver.facts.arch
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"] | {"torch_dtype": request.param}))
    command = [sys.executable, "-m", "server.kernels.tuning", "--compile-only", folder, "--config", folder]
    command += ["--arch", arch, *(word for m in ROWS for word in ("--m", str(m)))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    return Gpu(driver, driver.create_stream(), CandidateFolder(folder, arch), request.param)


def poison(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def random(gpu: Gpu, *shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, gpu.dtype))


def products(x: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """In fp64, in slices that fit, and what fp32 may have lost."""
    parts = [x.double() @ part.double().T for part in weight.split(16384)]
    lost = SUM_ERROR * float((x[:1].abs().double() @ weight[:1024].abs().double().T).max()) * 2
    return torch.cat(parts, 1), lost


def assert_near(found: Tensor, exact: Tensor, lost: float, what: str) -> None:
    allowed = exact.abs() * UNIT_ROUNDOFFS.get(found.dtype, 0.0) * 1.01 + lost
    worst = ((found.double() - exact).abs() / allowed).max()
    assert worst <= 1.0, f"{what}: {float(worst):.2f} of what is allowed"  # NaN is not <= 1 either


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("index", [0, 4], ids=["qkv", "head"])
def test_linear_and_logits(gpu: Gpu, index: int, m: int, device: str) -> None:
    """Also with fewer rows than the tile has, behind which nothing is written."""
    case = cases(gpu.dtype)[index]
    n, k = case.shape.n, case.shape.k
    x, weight, bias = (random(gpu, *shape, device=device) for shape in ((m, k), (n, k), (n,)))
    exact, lost = products(x, weight)
    exact += bias.double() if case.shape.has_bias else 0.0
    for candidate, image in gpu.tiles(case, m):
        if candidate.kernel == "linear_split":
            continue
        out_dtype = torch.float32 if candidate.kernel == "linear_fp32" else x.dtype
        for num_rows in {m, max(1, m - 3)}:
            out = poison(m + 1, n, dtype=out_dtype, device=device)
            grid = tile_grid(image)(num_rows, n, 1)
            gpu.run(gpu.load(image), grid, x[:num_rows], weight, bias, out, num_rows, n, k)
            assert_near(out[:num_rows], exact[:num_rows], lost, f"{num_rows} rows by {candidate}")
            assert out[num_rows:].isnan().all(), candidate


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("index", [0, 1, 3], ids=["qkv", "out", "down"])
def test_partial_sums(gpu: Gpu, index: int, m: int, device: str) -> None:
    case = cases(gpu.dtype)[index]
    n, k = case.shape.n, case.shape.k
    x, weight = random(gpu, m, k, device=device), random(gpu, n, k, device=device)
    exact, lost = products(x, weight)
    for candidate, image in gpu.tiles(case, m):
        if candidate.kernel != "linear_split":
            continue
        num_splits = candidate.num_splits
        for num_rows in {m, max(1, m - 3)}:
            partials = poison(num_splits + 1, num_rows, n, dtype=torch.float32, device=device)
            grid = tile_grid(image)(num_rows, n, num_splits)
            gpu.run(gpu.load(image), grid, x[:num_rows], weight, partials, num_rows, n, k, num_splits)
            assert_near(partials[:-1].sum(0), exact[:num_rows], lost, f"{num_rows} rows by {candidate}")
            assert partials[-1].isnan().all(), candidate


@pytest.mark.parametrize("m", ROWS)
def test_gated_linear(gpu: Gpu, m: int, device: str) -> None:
    case = cases(gpu.dtype)[2]
    n, k, block = case.out_columns, case.shape.k, case.block
    x, weight = random(gpu, m, k, device=device), random(gpu, 2 * n, k, device=device) * 0.02
    both, lost = products(x, weight)
    gates, ups = both.unflatten(1, (-1, 2, block)).unbind(2)
    exact = (torch.nn.functional.silu(gates) * ups).flatten(1)
    lost *= 2 * (float(both.abs().max()) + 1.0)
    for candidate, image in gpu.tiles(case, m):
        for num_rows in {m, max(1, m - 3)}:
            out = poison(m + 1, n, dtype=x.dtype, device=device)
            grid = tile_grid(image)(num_rows, n, 1)
            gpu.run(gpu.load(image), grid, x[:num_rows], weight, out, num_rows, n, k, block)
            assert_near(out[:num_rows], exact[:num_rows], lost, f"{num_rows} rows by {candidate}")
            assert out[num_rows:].isnan().all(), candidate


@pytest.mark.parametrize("m", [3, 64, 130])
def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(gpu: Gpu, m: int, device: str) -> None:
    case, bad_row = cases(gpu.dtype)[2], m // 2
    n, k, block = case.out_columns, case.shape.k, case.block
    x, weight = random(gpu, m, k, device=device), random(gpu, 2 * n, k, device=device) * 0.02
    spoiled = x.clone()
    spoiled[bad_row] = float("nan")
    others = [row for row in range(m) if row != bad_row]
    size = next(rows for rows in ROWS if rows >= m)
    for candidate, image in gpu.tiles(case, size):
        results = [poison(m, n, dtype=x.dtype, device=device) for _ in range(2)]
        for values, out in zip((x, spoiled), results, strict=True):
            gpu.run(gpu.load(image), tile_grid(image)(m, n, 1), values, weight, out, m, n, k, block)
        assert torch.equal(results[0][others], results[1][others]), candidate
        assert results[1][bad_row].isnan().all(), candidate


@pytest.mark.parametrize("num_splits", [1, 2, 5, 9, 14])
@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("n", [3584, 4608, 8200])
def test_partial_sums_are_added_up(gpu: Gpu, n: int, m: int, num_splits: int, device: str) -> None:
    parts = torch.randn(num_splits, m, n, device=device)
    weight, residual = random(gpu, n, device=device), torch.randn(m, n, device=device) * 10
    for has_bias in (False, True):
        kernel, out = gpu.kernel("reduce_partials", HAS_BIAS=has_bias), poison(m, n, dtype=weight.dtype, device=device)
        grid = (m, -(-n // int(kernel.image.constants["BLOCK"])), 1)
        gpu.run(kernel, grid, parts, weight, out, m, n, num_splits)
        exact = parts.double().sum(0) + (weight.double() if has_bias else 0.0)
        assert_near(out, exact, 2.0**-20 * num_splits, f"reduce_partials, bias {has_bias}")
    summed, out = residual.clone(), poison(m, n, dtype=weight.dtype, device=device)
    gpu.run(gpu.kernel("add_rms_norm_partials"), (m, 1, 1), summed, parts, weight, out, m, n, num_splits, EPS)
    total = residual.double() + parts.double().sum(0)
    torch.testing.assert_close(summed.double(), total, rtol=1e-6, atol=1e-5)
    scale = torch.rsqrt(summed.double().square().mean(1, keepdim=True) + EPS)
    assert_rounded_once(out, (summed.double() * scale * weight.double()).float())
