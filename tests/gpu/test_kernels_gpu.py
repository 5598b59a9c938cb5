"""The elementwise kernels on a GPU, as scripts/build-kernels made them, against the torch backend in fp32 and float64.

They are loaded twice: from the device's own cubins, and from the PTX that devices without own cubins get.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from server.kernels.manifest import PORTABLE_ARCH, built_folder, read_manifest
from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, Stream
from server.ops.cuda.kernels import Argument, Kernels
from server.ops.cuda.nvidia import NvidiaDriver
from tests.kernels.torch_reference import EPS, assert_rounded_once, reference

TOKENS = (1, 257)
CANCELLATION = 3e-6  # elements of q and k are a few units large, and sums of two products


@dataclass(frozen=True)
class Gpu:
    """Launches on tensors of torch, which shares the context; every launch is waited for."""

    driver: Driver
    stream: Stream
    kernels: Kernels

    def run(
        self, name: str, dtype: torch.dtype, grid: tuple[int, int, int], *args: Tensor | float, **constants: int
    ) -> None:
        torch.cuda.synchronize()
        self.kernels.get(name, _name(dtype), **constants)(grid, *map(_argument, args))
        self.driver.synchronize(self.stream)


def _argument(arg: Tensor | float) -> Argument:
    if not isinstance(arg, Tensor):
        return arg
    assert arg.is_contiguous()
    return Buffer(arg.data_ptr(), tuple(arg.shape), _name(arg.dtype), arg)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture(scope="module", params=["cubin", "ptx"])
def gpu(request: pytest.FixtureRequest, device: str) -> Gpu:
    driver = NvidiaDriver.open()
    manifest = read_manifest(built_folder())
    arch = driver.facts.arch if request.param == "cubin" else PORTABLE_ARCH
    if manifest is None or arch not in manifest.archs:
        pytest.skip(f"no kernels for {arch} in {built_folder()}: run scripts/build-kernels --arch {arch}")
    stream = driver.create_stream()
    return Gpu(driver, stream, Kernels(driver, stream, manifest.images(arch)))


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def poison(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [64, 896, 3584, 8200])
def test_embed(gpu: Gpu, dtype: torch.dtype, hidden: int, num_tokens: int, device: str) -> None:
    table = torch.randn(20000, hidden, device=device).to(dtype)
    token_ids = torch.randint(20000, (num_tokens,), dtype=torch.int32, device=device)
    last_tokens = torch.randint(20000, (8,), dtype=torch.int32, device=device)
    slots = torch.randint(-1, 8, (num_tokens,), dtype=torch.int32, device=device)
    out = poison(num_tokens, hidden, dtype=torch.float32, device=device)
    gpu.run("embed", dtype, (num_tokens, 1, 1), token_ids, slots, last_tokens, table, out, hidden)
    ids = torch.where(slots < 0, token_ids, last_tokens[slots.clamp(min=0).long()])
    assert torch.equal(out, table[ids.long()].float())


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [64, 896, 3584, 4096, 8200])
def test_norms(gpu: Gpu, dtype: torch.dtype, hidden: int, num_tokens: int, device: str) -> None:
    ops = reference(hidden_size=hidden, device=device)
    weight = torch.randn(hidden, device=device).to(dtype)
    delta = torch.randn(num_tokens, hidden, device=device).to(dtype)
    residual = torch.randn(num_tokens, hidden, device=device) * 10
    summed, exact = residual.clone(), torch.empty_like(residual)
    out = poison(num_tokens, hidden, dtype=dtype, device=device)
    grid = (num_tokens, 1, 1)
    ops.rms_norm(residual, weight.float(), exact)
    gpu.run("rms_norm", dtype, grid, residual, weight, out, hidden, EPS)
    assert_rounded_once(out, exact)
    out.fill_(float("nan"))
    gpu.run("add_rms_norm", dtype, grid, summed, delta, weight, out, hidden, EPS)
    ops.add_rms_norm(residual, delta.float(), weight.float(), exact)
    assert torch.equal(summed, residual)
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("num_programs", [1, 20, 100])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("intermediate", "num_blocks"), [(4864, 2), (18944, 4), (96, 2), (3080, 1)])
def test_gate(
    gpu: Gpu, dtype: torch.dtype, intermediate: int, num_blocks: int, num_tokens: int, num_programs: int, device: str
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * intermediate, device=device) * 4).to(dtype)
    gate_up[0, :8] = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 100.0, 1e3])
    exact = torch.empty(num_tokens, intermediate, device=device)
    out = poison(num_tokens, intermediate, dtype=dtype, device=device)
    reference(intermediate_size=intermediate, num_kv_heads=num_blocks, device=device).gate(gate_up.float(), exact)
    gpu.run("gate", dtype, (num_tokens, num_programs, 1), gate_up, out, intermediate, intermediate // num_blocks)
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("width", [64, 3584, 8200])
def test_gather_rows(gpu: Gpu, dtype: torch.dtype, width: int, device: str) -> None:
    x = torch.randn(300, width, device=device).to(dtype)
    rows = torch.randint(300, (40,), dtype=torch.int32, device=device)
    out = poison(40, width, dtype=dtype, device=device)
    gpu.run("gather_rows", dtype, (40, 1, 1), x, rows, out, width)
    assert torch.equal(out, x[rows.long()])


def test_gather_rows_beyond_two_billion_elements(gpu: Gpu, device: str) -> None:
    width = 8192
    x = torch.zeros((1 << 31) // width + 8, width, dtype=torch.float16, device=device)
    x[-3] = torch.randn(width, device=device)
    rows = torch.tensor([x.shape[0] - 3], dtype=torch.int32, device=device)
    out = poison(1, width, dtype=torch.float16, device=device)
    gpu.run("gather_rows", torch.float16, (1, 1, 1), x, rows, out, width)
    assert torch.equal(out[0], x[-3])


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", range(1, 9))
def test_rotate_and_store(
    gpu: Gpu, dtype: torch.dtype, group_size: int, head_dim: int, has_norm: bool, device: str
) -> None:
    """Against float64 on angles rounded to fp32, at positions up to 131,071."""
    num_tokens, num_kv_heads = 300, 4
    facts = reference(group_size=group_size, head_dim=head_dim, device=device)._facts
    frequencies = torch.tensor(inverse_frequencies(facts), dtype=torch.float32, device=device)
    positions = torch.randint(1 << 17, (num_tokens,), dtype=torch.int32, device=device)
    positions[:3] = torch.tensor([0, 1, (1 << 17) - 1])
    kv_rows = torch.randperm(500, device=device)[:num_tokens].to(torch.int32)
    qkv = torch.randn(num_tokens, num_kv_heads, group_size + 2, head_dim, device=device).to(dtype)
    q_norm, k_norm = (1 + torch.randn(2, head_dim, device=device) / 4).to(dtype).unbind()
    keys, values = poison(2, 500, num_kv_heads, head_dim, dtype=dtype, device=device).unbind()
    exact, value = _rotated(qkv, positions, frequencies, (q_norm, k_norm) if has_norm else None), qkv[:, :, -1].clone()
    inputs = qkv, positions, kv_rows, frequencies, q_norm, k_norm, keys, values
    constants = {"HEAD_DIM": head_dim, "HAS_NORM": has_norm}
    gpu.run(
        "rotate_and_store", dtype, (num_tokens, num_kv_heads, 1), *inputs, num_kv_heads, group_size, EPS, **constants
    )
    assert_rounded_once(qkv[:, :, :-1], exact.float(), CANCELLATION)
    assert torch.equal(qkv[:, :, -1], value)
    assert torch.equal(keys[kv_rows.long()], qkv[:, :, group_size])
    assert torch.equal(values[kv_rows.long()], value)
    is_other = torch.ones(500, dtype=torch.bool, device=device)
    is_other[kv_rows.long()] = False
    assert keys[is_other].isnan().all()
    assert values[is_other].isnan().all()


def test_rotate_and_store_beyond_two_billion_elements(gpu: Gpu, device: str) -> None:
    num_kv_heads, head_dim = 8, 128
    num_rows = (1 << 31) // (num_kv_heads * head_dim) + 8
    pools = torch.zeros(2, num_rows, num_kv_heads, head_dim, dtype=torch.float16, device=device)
    qkv = torch.randn(1, num_kv_heads, 3, head_dim, device=device).half()
    position = torch.zeros(1, dtype=torch.int32, device=device)
    kv_row = torch.tensor([num_rows - 2], dtype=torch.int32, device=device)
    frequencies = torch.ones(head_dim // 2, device=device)
    inputs = qkv, position, kv_row, frequencies, 0, 0, *pools
    gpu.run(
        *("rotate_and_store", torch.float16, (1, num_kv_heads, 1)),
        *(*inputs, num_kv_heads, 1, EPS),
        **{"HEAD_DIM": head_dim, "HAS_NORM": False},
    )
    assert torch.equal(pools[0, -2], qkv[0, :, 1])
    assert torch.equal(pools[1, -2], qkv[0, :, 2])


def _rotated(qkv: Tensor, positions: Tensor, frequencies: Tensor, norms: tuple[Tensor, Tensor] | None) -> Tensor:
    """q and k of qkv in float64, normed and turned by angles that are rounded to fp32."""
    heads = qkv[:, :, :-1].double()
    if norms is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()
        heads[:, :, :-1] *= norms[0].double()
        heads[:, :, -1] *= norms[1].double()
    angles = (positions.float()[:, None] * frequencies).double()[:, None, None]
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)
