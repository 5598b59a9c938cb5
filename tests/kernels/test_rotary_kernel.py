"""The rotary kernel, run by the interpreter, against the torch backend's operation in fp32 and against float64."""

import pytest
import torch
from torch import Tensor

from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.kernels import Kernels
from server.ops.torch.operations import TorchOperations
from tests.kernels.torch_reference import EPS, LIMITS, assert_rounded_once, begin_step, reference
from tests.ops.host_driver import HostDriver, as_tensor, to_device
from tests.ops.host_kernels import host_images

POSITIONS = [0, 1, 77, 131071]
KV_ROWS = [9, 30, 8, 17]
NUM_KV_HEADS = 2
POISON = 0xFF
CANCELLATION = 3e-6  # elements are a few units large, and sums of two products


class Rotation:
    """What one launch made of random qkv: the input in fp32, and qkv, keys and values after it."""

    def __init__(self, ops: TorchOperations, dtype: torch.dtype, norms: tuple[Tensor, Tensor] | None) -> None:
        driver = HostDriver()
        kernels = Kernels(driver, driver.create_stream(), host_images())
        facts = ops._facts
        group_size, head_dim = facts.group_size, facts.head_dim
        qkv = torch.randn(len(POSITIONS), NUM_KV_HEADS, group_size + 2, head_dim).to(dtype)
        self.qkv_before = qkv.float()
        pool = torch.empty(LIMITS.num_blocks * LIMITS.block_size, NUM_KV_HEADS, head_dim, dtype=dtype)
        pool.view(torch.uint8).fill_(POISON)
        buffers = [to_device(driver, tensor) for tensor in (qkv, pool, pool)]
        inputs = [torch.tensor(POSITIONS, dtype=torch.int32), torch.tensor(KV_ROWS, dtype=torch.int32)]
        frequencies = to_device(driver, torch.tensor(inverse_frequencies(facts), dtype=torch.float32))
        weights: list[Buffer | int] = [to_device(driver, norm) for norm in norms] if norms else [0, 0]
        kernel = kernels.get(
            "rotate_and_store", str(dtype).removeprefix("torch."), HEAD_DIM=head_dim, HAS_NORM=norms is not None
        )
        arrays = [to_device(driver, array) for array in inputs]
        kernel(
            (len(POSITIONS), NUM_KV_HEADS, 1),
            *(buffers[0], *arrays, frequencies, *weights, *buffers[1:], NUM_KV_HEADS, group_size, EPS),
        )
        self.qkv, self.keys, self.values = (as_tensor(buffer) for buffer in buffers)
        self._memory = driver, buffers


@pytest.mark.parametrize(
    ("group_size", "head_dim", "has_norm", "dtype"),
    [
        *((group_size, 64, False, torch.bfloat16) for group_size in range(1, 9)),
        *((group_size, 128, True, torch.float16) for group_size in range(1, 9)),
        (20, 64, True, torch.bfloat16),
        (7, 128, False, torch.float16),
        (16, 128, True, torch.bfloat16),
        (15, 64, False, torch.float16),
    ],
)
def test_heads_are_rotated_and_stored_as_torch_does(
    group_size: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(group_size)
    ops = reference(num_kv_heads=NUM_KV_HEADS, group_size=group_size, head_dim=head_dim, qk_norm=has_norm)
    norms = (1 + torch.randn(2, head_dim) / 4).to(dtype).unbind() if has_norm else None
    found = Rotation(ops, dtype, norms)
    exact = found.qkv_before.flatten(1)
    begin_step(ops, POSITIONS, KV_ROWS)
    ops.rotate_and_store(0, exact, *(norm.float() for norm in norms or ()) if norms else (None, None))
    assert_rounded_once(found.qkv, exact.view(found.qkv.shape), CANCELLATION)
    assert torch.equal(found.keys[KV_ROWS], found.qkv[:, :, group_size])
    assert torch.equal(found.values[KV_ROWS], found.qkv[:, :, group_size + 1])
    others = [row for row in range(found.keys.shape[0]) if row not in KV_ROWS]
    for pool in (found.keys, found.values):
        assert (pool[others].view(torch.uint8) == POISON).all(), "a row of the pool that is nobody's was written"


def test_angles_at_large_positions_are_those_of_float64() -> None:
    """The angle is rounded to fp32, as everywhere; its sine and cosine are then exact but for fp32 itself."""
    torch.manual_seed(0)
    ops = reference(num_kv_heads=NUM_KV_HEADS, group_size=1, head_dim=64)
    found = Rotation(ops, torch.float16, None)
    frequencies = torch.tensor(inverse_frequencies(ops._facts), dtype=torch.float32)
    angles = (torch.tensor(POSITIONS, dtype=torch.float32)[:, None] * frequencies).double()[:, None, None]
    low, high = found.qkv_before[:, :, :2].double().chunk(2, dim=-1)
    exact = torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)
    assert_rounded_once(found.qkv[:, :, :2], exact.float(), CANCELLATION)
