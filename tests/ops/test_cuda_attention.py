"""Attention's launches on a GPU in host memory: ragged steps against float64 and torch, plans, workspace, recording."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.ops.cuda.arena import BufferSpec
from server.ops.cuda.attention import (
    MAX_SPLITS,
    PREFILL_BLOCK_M,
    _num_splits,
    _workspace_specs,
    attention_bytes,
)
from server.ops.cuda.driver import DeviceFacts
from server.ops.interface import BatchLimits, StepSize
from tests.ops.attention_rig import (
    AttentionRig,
    Chunk,
    assert_exact,
    attention_facts,
    exact_attention,
    make_batch,
    torch_attention,
)
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images

SMALL = DeviceFacts("one multiprocessor", "sm_86", 1, 1 << 30, 1 << 21, False)
LARGE = replace(SMALL, arch="sm_90", num_multiprocessors=6)


def limits_of(block_size: int, max_num_requests: int = 8) -> BatchLimits:
    return BatchLimits(512, max_num_requests, 1024, 2048 // block_size, block_size)


def make_rig(
    *,
    num_kv_heads: int = 1,
    group_size: int = 2,
    head_dim: int = 64,
    dtype: str = "float16",
    limits: BatchLimits | None = None,
    device: DeviceFacts = SMALL,
    last_split_combines: bool = False,
) -> AttentionRig:
    facts = attention_facts(num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim, dtype=dtype)
    limits = limits or limits_of(16)
    return AttentionRig(HostDriver(), host_images(), facts, limits, device, last_split_combines=last_split_combines)


def attend(rig: AttentionRig, chunks: list[Chunk], num_decodes: int, sharpness: float = 1.0) -> Tensor:
    """Attend over a random batch of these chunks, and hold the result to float64."""
    batch = make_batch(rig.facts, rig.limits, chunks, num_decodes, sharpness)
    found = rig.attend(batch)
    assert_exact(found, batch)
    return found


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("group_size", "head_dim", "block_size", "dtype", "device"),
    [
        (1, 64, 8, "float16", SMALL),
        (2, 128, 16, "bfloat16", LARGE),
        (3, 64, 32, "float16", LARGE),
        (4, 128, 64, "float16", SMALL),
        (5, 64, 16, "bfloat16", LARGE),
        (6, 128, 32, "float16", SMALL),
        (7, 128, 16, "float16", LARGE),
        (8, 64, 64, "bfloat16", SMALL),
    ],
)
def test_mixed_step_is_attended_as_torch_does(
    group_size: int, head_dim: int, block_size: int, dtype: str, device: DeviceFacts
) -> None:
    limits = limits_of(block_size)
    rig = make_rig(
        num_kv_heads=1 + group_size % 2,
        group_size=group_size,
        head_dim=head_dim,
        dtype=dtype,
        limits=limits,
        device=device,
    )
    chunks = [(0, 1), (block_size - 1, 1), (block_size, 1), (150, 1), (0, 5), (block_size + 3, 20), (30, 1)]
    batch = make_batch(rig.facts, limits, chunks, num_decodes=4)
    assert_exact(rig.attend(batch), batch)
    exact, _ = exact_attention(batch)
    torch.testing.assert_close(torch_attention(batch, limits).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", [SMALL, LARGE], ids=["unsplit", "split"])
def test_decodes_at_every_border_of_tiles_and_splits(device: DeviceFacts) -> None:
    limits = limits_of(8, max_num_requests=6)
    rig = make_rig(limits=limits, device=device)
    num_splits = _num_splits(6, 1, device.num_multiprocessors)
    assert (num_splits == 1) == (device is SMALL)
    contexts = [63, 64, 65, 64 * num_splits, 64 * num_splits + 1, 1]
    attend(rig, [(context - 1, 1) for context in contexts], num_decodes=6)


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("device", [SMALL, LARGE], ids=["tiles of 32", "tiles of 64"])
def test_chunks_at_every_border_of_tiles(group_size: int, device: DeviceFacts) -> None:
    rig = make_rig(group_size=group_size, device=device)
    most = PREFILL_BLOCK_M // group_size
    attend(rig, [(0, most - 1), (33, 2), (64, most), (31, most + 1)], num_decodes=0)


def test_chunks_are_found_among_more_than_are_looked_at_at_once() -> None:
    limits = BatchLimits(512, 140, 64, 200, 8)
    rig = make_rig(group_size=1, limits=limits)
    attend(rig, [(3, 1)] + [(index % 5, 1 + index % 3) for index in range(66)], num_decodes=1)


def test_scores_of_any_size_are_weighed_without_overflow() -> None:
    rig = make_rig(device=LARGE)
    attend(rig, [(200, 1), (100, 1), (40, 60)], num_decodes=2, sharpness=100.0)


def test_request_whose_values_are_nan_disturbs_no_other() -> None:
    rig = make_rig(device=LARGE)
    batch = make_batch(rig.facts, rig.limits, [(100, 1), (90, 1), (20, 30), (10, 30)], num_decodes=2)
    before = rig.attend(batch)
    for chunk in (0, 2):
        batch.pool[:, batch.pool_rows[chunk]] = torch.nan
    after = rig.attend(batch)
    is_poisoned = torch.tensor([True, False] + [True] * 30 + [False] * 30)
    assert after[is_poisoned].isnan().all()
    assert after[~is_poisoned].equal(before[~is_poisoned])


def test_recorded_decodes_follow_new_contexts_and_blocks() -> None:
    rig = make_rig(device=LARGE)
    short = make_batch(rig.facts, rig.limits, [(0, 1), (1, 1), (2, 1)], num_decodes=3)
    loaded = rig.load(short)
    rig.attention.plan(short.shape.size)
    rig.driver.begin_capture(rig.stream)
    rig.launch(loaded)
    graph = rig.driver.end_capture(rig.stream)
    for contexts in ((300, 65, 1), (1, 1, 700)):
        batch = make_batch(rig.facts, rig.limits, [(context - 1, 1) for context in contexts], num_decodes=3)
        rig.reload(loaded, batch)
        rig.driver.launch_graph_async(graph, rig.stream)
        assert_exact(rig.result(loaded), batch)


@pytest.mark.parametrize("device", [SMALL, LARGE], ids=["unsplit", "split"])
@pytest.mark.parametrize("last_split_combines", [False, True])
def test_launches_for_a_larger_step_give_the_same_bits_and_leave_the_rest_alone(
    device: DeviceFacts, last_split_combines: bool
) -> None:
    """The counts of chunks stand in memory: what is launched for chunks that are not there does nothing."""
    rig = make_rig(device=device, last_split_combines=last_split_combines)
    size = StepSize(num_tokens=96, num_decodes=6, num_prefills=8, num_samples=8)
    rig.attention.plan(size)
    num_splits = rig.attention._plan.num_splits
    for chunks, num_decodes in (
        ([(70, 1), (3, 1), (40, 30), (0, 33)], 2),
        ([(64, 1), (300, 1), (0, 1), (5, 1), (63, 1), (8, 1)], 6),
        ([(0, 64), (100, 2), (9, 1)], 0),
    ):
        batch = make_batch(rig.facts, rig.limits, chunks, num_decodes)
        padded = rig.attend(batch, size)
        assert_exact(padded, batch)
        exact = StepSize(batch.num_tokens, num_decodes, len(chunks) - num_decodes, 0)
        if not num_decodes or _num_splits(num_decodes, 1, device.num_multiprocessors) == num_splits:
            assert torch.equal(padded, rig.attend(batch, exact))


def test_a_recorded_mixed_step_follows_other_counts_of_decodes_and_chunks() -> None:
    rig = make_rig(device=LARGE)
    size = StepSize(num_tokens=64, num_decodes=6, num_prefills=4, num_samples=8)
    first = make_batch(rig.facts, rig.limits, [(0, 64)], num_decodes=0)
    loaded = rig.load(first)
    rig.attention.plan(size)
    rig.driver.begin_capture(rig.stream)
    rig.launch(loaded)
    graph = rig.driver.end_capture(rig.stream)
    for chunks, num_decodes in (
        ([(250, 1), (15, 1), (0, 20), (100, 42)], 2),
        ([(9, 60), (0, 1), (3, 2), (7, 1)], 0),
        ([(0, 1), (600, 63)], 1),
    ):
        batch = make_batch(rig.facts, rig.limits, chunks, num_decodes)
        assert batch.num_tokens == 64
        rig.reload(loaded, batch)
        rig.driver.launch_graph_async(graph, rig.stream)
        assert_exact(rig.result(loaded), batch)


def test_step_without_decodes_or_without_prefills_launches_only_what_it_has() -> None:
    rig = make_rig(device=LARGE)
    for chunks, num_decodes, num_launches in (([(5, 1)], 1, 2), ([(5, 3)], 0, 1), ([(5, 1), (5, 3)], 1, 3)):
        before = rig.driver.calls["launch_async"]
        attend(rig, chunks, num_decodes)
        assert rig.driver.calls["launch_async"] - before == num_launches


@pytest.mark.parametrize("num_multiprocessors", [1, 58, 132, 148, 1000])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 40])
def test_workspace_holds_the_splits_of_every_step(num_multiprocessors: int, num_kv_heads: int) -> None:
    limits = limits_of(16, max_num_requests=300)
    facts = attention_facts(num_kv_heads=num_kv_heads, group_size=3, head_dim=64)
    means, weights, _ = _workspace_specs(facts, limits)
    assert weights.shape == means.shape[:1]
    for num_decodes in range(1, limits.max_num_requests + 1):
        num_splits = _num_splits(num_decodes, num_kv_heads, num_multiprocessors)
        assert 1 <= num_splits <= MAX_SPLITS
        if num_splits > 1:
            assert num_decodes * num_kv_heads * 3 * num_splits <= means.shape[0]


def test_attention_takes_from_the_arena_what_it_said() -> None:
    rig = make_rig()
    with pytest.raises(AssertionError, match="the arena ends before"):
        rig.arena.take(BufferSpec((1,), "uint8"))
    assert attention_bytes(rig.facts, rig.limits) % 256 == 0
