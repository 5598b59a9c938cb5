"""Attention of the cuda backend on a GPU, from built kernels: long ragged steps against float64, recording, and times.

The times are printed (pytest -s) and hold nothing: what a machine reaches is for benchmarks to say.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from server.kernels.manifest import built_folder, read_manifest
from server.models.facts import ModelFacts
from server.ops.cuda import attention
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DeviceFacts, Driver, KernelImage
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.interface import BatchLimits, StepInputs, StepSize
from tests.ops.attention_rig import (
    AttentionRig,
    Chunk,
    assert_exact,
    attention_facts,
    make_batch,
    step_shape,
)

LIMITS = BatchLimits(16384, 320, 8200, 3000, 16)
QWEN2_7B = attention_facts(num_kv_heads=4, group_size=7, head_dim=128, dtype="bfloat16")


@dataclass(frozen=True)
class Gpu:
    driver: Driver
    images: tuple[KernelImage, ...]

    def rig(
        self,
        facts: ModelFacts,
        limits: BatchLimits = LIMITS,
        device: DeviceFacts | None = None,
        *,
        last_split_combines: bool | None = None,
    ) -> AttentionRig:
        return AttentionRig(self.driver, self.images, facts, limits, device, last_split_combines=last_split_combines)


@pytest.fixture(scope="module")
def gpu(device: str) -> Gpu:
    driver = NvidiaDriver.open()
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"{built_folder()} is missing: run scripts/build-kernels")
    return Gpu(driver, manifest.images(driver.facts.arch))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def attend(rig: AttentionRig, chunks: list[Chunk], num_decodes: int, sharpness: float = 1.0) -> None:
    batch = make_batch(rig.facts, rig.limits, chunks, num_decodes, sharpness)
    assert_exact(rig.attend(batch), batch, "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", range(1, 9))
def test_long_mixed_step(gpu: Gpu, group_size: int, head_dim: int, dtype: str) -> None:
    block_size = (8, 16, 32, 64)[group_size % 4]
    limits = replace(LIMITS, block_size=block_size, num_blocks=65536 // block_size)
    rig = gpu.rig(attention_facts(num_kv_heads=2, group_size=group_size, head_dim=head_dim, dtype=dtype), limits)
    decodes = [(8191, 1), (0, 1), (63, 1), (64, 1), (4095, 1), (4097, 1)]
    attend(rig, [*decodes, (0, 700), (5000, 300), (8100, 91), (77, 1), (0, 2000)], len(decodes))


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_both_tiles_of_prefill(gpu: Gpu, arch: str) -> None:
    rig = gpu.rig(QWEN2_7B, device=replace(gpu.driver.facts, arch=arch))
    attend(rig, [(0, 8192), (31, 33), (1000, 127)], 0)


@pytest.mark.parametrize("num_decodes", [1, 2, 7, 32, 100, 256, 300])
def test_decodes_of_every_batch_size(gpu: Gpu, num_decodes: int) -> None:
    longest = min(8000, 600_000 // num_decodes)
    starts = (torch.rand(num_decodes) ** 4 * longest).int().tolist()
    limits = replace(LIMITS, num_blocks=sum(start // 16 + 1 for start in starts) + 1)
    attend(gpu.rig(QWEN2_7B, limits), [(start, 1) for start in starts], num_decodes, sharpness=4.0)


@pytest.mark.parametrize("num_decodes", [1, 3, 32, 100])
def test_the_last_split_combines_what_a_kernel_of_its_own_would(gpu: Gpu, num_decodes: int) -> None:
    """To the bit, many times over: whichever split is last, and with what the launch before left."""
    starts = (torch.rand(num_decodes) ** 4 * 6000).int().tolist()
    limits = replace(LIMITS, num_blocks=sum(start // 16 + 1 for start in starts) + 1)
    batch = make_batch(QWEN2_7B, limits, [(start, 1) for start in starts], num_decodes)
    expected = gpu.rig(QWEN2_7B, limits, last_split_combines=False).attend(batch)
    rig = gpu.rig(QWEN2_7B, limits, last_split_combines=True)
    rig.attention.plan(batch.shape.size)
    assert rig.attention._plan.num_splits > 1
    loaded = rig.load(batch)
    for _ in range(200):
        rig.launch(loaded)
    assert torch.equal(rig.result(loaded), expected)
    assert not rig.read(rig.attention.arrivals).any()
    loaded.free(rig.driver)


def test_launches_for_a_larger_step_give_the_attention_of_a_smaller(gpu: Gpu) -> None:
    size = StepSize(num_tokens=256, num_decodes=128, num_prefills=32, num_samples=128)
    rig = gpu.rig(QWEN2_7B)
    for chunks, num_decodes in (
        ([(500 + 13 * index, 1) for index in range(99)] + [(0, 100), (3000, 57)], 99),
        ([(0, 128)], 0),
        ([(index, 1) for index in range(128)], 128),
        ([(5, 1)] + [(index, 1 + index % 9) for index in range(1, 33)], 1),
    ):
        batch = make_batch(rig.facts, rig.limits, chunks, num_decodes)
        assert_exact(rig.attend(batch, size), batch, "cuda")


def test_many_short_chunks(gpu: Gpu) -> None:
    attend(gpu.rig(QWEN2_7B), [(index % 70, 1 + index % 40) for index in range(320)], 0)


def test_recorded_decodes_follow_new_contexts(gpu: Gpu) -> None:
    rig = gpu.rig(QWEN2_7B)
    first = make_batch(rig.facts, rig.limits, [(0, 1)] * 5, 5)
    loaded = rig.load(first)
    rig.attention.plan(first.shape.size)
    rig.driver.begin_capture(rig.stream)
    rig.launch(loaded)
    graph = rig.driver.end_capture(rig.stream)
    for contexts in ((8000, 65, 1, 500, 2), (1, 1, 7000, 64, 1)):
        batch = make_batch(rig.facts, rig.limits, [(context - 1, 1) for context in contexts], 5)
        rig.reload(loaded, batch)
        rig.driver.launch_graph_async(graph, rig.stream)
        assert_exact(rig.result(loaded), batch, "cuda")
    rig.driver.destroy_graph(graph)
    loaded.free(rig.driver)


class Stopwatch:
    """Times attention over layers with a pool each, so that no layer finds its K and V in the cache."""

    def __init__(self, rig: AttentionRig, num_layers: int) -> None:
        self.rig = rig
        facts, limits, driver = rig.facts, rig.limits, rig.driver
        num_rows = limits.num_blocks * limits.block_size
        width = facts.num_kv_heads * facts.head_dim
        self.pools = [(self._random(num_rows, width), self._random(num_rows, width)) for _ in range(num_layers)]
        self.qkv = self._random(limits.max_batched_tokens, facts.qkv_rows)
        num_bytes = limits.max_batched_tokens * facts.num_heads * facts.head_dim * 2
        self.out = Buffer(driver.allocate(num_bytes), (num_bytes // 2,), facts.dtype)

    def _random(self, num_rows: int, width: int) -> Buffer:
        """Random numbers, repeated; bits that change cost power, and so time."""
        rig = self.rig
        piece = rig.upload(torch.randn(min(num_rows, 1 << 14), width).bfloat16())
        buffer = Buffer(rig.driver.allocate(num_rows * width * 2), (num_rows, width), rig.facts.dtype)
        for begin in range(0, num_rows, piece.shape[0]):
            rows = buffer.rows(begin, min(begin + piece.shape[0], num_rows))
            rig.driver.copy_on_device_async(rows.address, piece.address, rows.num_bytes, rig.stream)
        rig.driver.synchronize(rig.stream)
        rig.driver.free(piece.address)
        return buffer

    def microseconds(self, chunks: list[Chunk], num_decodes: int, size: StepSize | None = None) -> float:
        """Of one layer, the median of seven replays of all layers; launched for `size` if given."""
        rig, shape, limits = self.rig, step_shape(chunks, num_decodes), self.rig.limits
        contexts = torch.tensor([sum(chunk) for chunk in chunks], dtype=torch.int32)
        blocks = -(-contexts // limits.block_size)
        ids = (torch.randperm(limits.num_blocks - 1) + 1).int()
        columns = 1 << (int(blocks.max()) - 1).bit_length()
        tables = torch.zeros(len(chunks), columns, dtype=torch.int32)
        for row, end, count in zip(tables, blocks.cumsum(0).tolist(), blocks.tolist(), strict=True):
            row[:count] = ids[end - count : end]
        header = torch.tensor([num_decodes, len(chunks), shape.size.num_tokens, columns], dtype=torch.int32)
        starts = torch.tensor([0, *shape.lengths]).cumsum(0).int()
        slots = torch.arange(len(chunks), dtype=torch.int32)
        arrays = [rig.upload(array) for array in (header, starts, contexts, slots, tables)]
        none = Buffer(0, (0,), "int32")
        inputs = StepInputs(
            arrays[0], none, none, none, none, arrays[1], arrays[2], arrays[3], none, none, none, none, arrays[4]
        )
        rig.attention.plan(shape.size if size is None else size)
        rig.driver.begin_capture(rig.stream)
        for keys, values in self.pools:
            rig.attention.attend(self.qkv, keys, values, inputs, self.out)
        graph = rig.driver.end_capture(rig.stream)
        times = sorted(self._seconds(lambda: rig.driver.launch_graph_async(graph, rig.stream)) for _ in range(7))
        rig.driver.destroy_graph(graph)
        for array in arrays:
            rig.driver.free(array.address)
        return times[3] / len(self.pools) * 1e6

    def _seconds(self, launch: Callable[[], None]) -> float:
        begin = time.perf_counter()
        launch()
        self.rig.driver.synchronize(self.rig.stream)
        return time.perf_counter() - begin

    def free(self) -> None:
        for buffer in (self.qkv, self.out, *(buffer for pool in self.pools for buffer in pool)):
            self.rig.driver.free(buffer.address)


def report_decodes(watch: Stopwatch, num_requests: int, context: int) -> str:
    facts = watch.rig.facts
    us = watch.microseconds([(context - 1, 1)] * num_requests, num_requests)
    num_bytes = num_requests * context * facts.num_kv_heads * facts.head_dim * 4
    splits = watch.rig.attention._plan.num_splits
    return f"decode {num_requests} x {context}: {us:.1f} us, {num_bytes / us / 1e3:.0f} GB/s, {splits} splits"


def report_prefill(watch: Stopwatch, num_chunks: int, start: int, length: int) -> str:
    facts = watch.rig.facts
    us = watch.microseconds([(start, length)] * num_chunks, 0)
    flops = 4 * facts.num_heads * facts.head_dim * num_chunks * length * (start + (length + 1) / 2)
    return f"prefill {num_chunks} x {length} after {start}: {us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s"


@contextmanager
def stopwatch(gpu: Gpu, device: DeviceFacts) -> Iterator[Stopwatch]:
    watch = Stopwatch(gpu.rig(QWEN2_7B, replace(LIMITS, num_blocks=12600), device), num_layers=8)
    yield watch
    watch.free()


def test_times_of_padded_and_combined_launches(gpu: Gpu) -> None:
    """What launches cost that find nothing to do, and the last split's combining against a kernel for it."""
    for combines in (False, True):
        rig = gpu.rig(QWEN2_7B, replace(LIMITS, num_blocks=12600), last_split_combines=combines)
        watch = Stopwatch(rig, num_layers=8)
        cases = [(1, 200), (1, 2000), (8, 200), (32, 200), (32, 2000), (64, 200)]
        report(f"last split combines: {combines}, {report_decodes(watch, *case)}" for case in cases)
        for num_tokens, num_requests in ((64, 8), (128, 8), (256, 8), (256, 128)):
            size = StepSize(num_tokens, num_requests, min(num_requests, 32), num_requests)
            for chunks, num_decodes in (([(0, num_tokens // 2)], 0), ([(200, 1)] * 8, 8), ([(200, 1), (0, 60)], 1)):
                exact, padded = (watch.microseconds(chunks, num_decodes, to) for to in (None, size))
                name = f"{num_decodes} decodes, {len(chunks) - num_decodes} chunks of {chunks[-1][1]}"
                report([f"{name} for {num_tokens} tokens of {num_requests}: {padded:.1f} us, exact {exact:.1f} us"])
        watch.free()


def report(lines: Iterable[str]) -> None:
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


def test_times_of_decode(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(1, 200), (1, 2000), (1, 8000), (32, 200), (32, 2000), (100, 200), (100, 2000), (256, 200)]
    with stopwatch(gpu, gpu.driver.facts) as watch:
        for programs in (3, 6, 12):
            monkeypatch.setattr(attention, "PROGRAMS_PER_MULTIPROCESSOR", programs)
            report(f"{programs} programs/SM, {report_decodes(watch, *case)}" for case in cases)


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_times_of_prefill(gpu: Gpu, arch: str) -> None:
    cases = [(1, 0, 8192), (1, 0, 2048), (64, 0, 128), (1, 2000, 50), (1, 7000, 50)]
    with stopwatch(gpu, replace(gpu.driver.facts, arch=arch)) as watch:
        report(f"tiles of {arch}, {report_prefill(watch, *case)}" for case in cases)
