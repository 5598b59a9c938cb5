#!/usr/bin/env python3
"""Time steps of Qwen2-7B of every recorded size on a GPU: replayed, and issued one by one without padding.

Needs a GPU and built kernels, no checkpoint and no torch: the weights are random. Steps go through the runner as in a
service, each submitted before the one before is waited for, so a time is what a step takes whoever limits it; `host` is
what submitting it takes. The table tells which token counts are worth padding to (runner/graphs.mixed_token_counts)
and where the knee of the token budget is.

    scripts/gpu/graph_times.py [--context 200] [--mixed-tokens 512] [--size 128x8 ...] [--switch-on NAME ...] ...
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.profile_submit import QWEN2_7B, NullDriver, source_images
from server.engine.messages import SamplingParams
from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda import attention
from server.ops.cuda.backend import create_backend
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.cuda.operations import CudaOperations
from server.ops.cuda.tiles import NO_TABLE
from server.ops.cuda.weights import weight_buffers
from server.ops.interface import BatchLimits, StepSize
from server.runner.graphs import graph_sizes
from server.runner.model_runner import ModelRunner
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from server.weights.layout import weight_layout

BLOCK_SIZE = 16
PIECE_BYTES = 8 << 20
SWITCHES = ("LAST_SPLIT_COMBINES", "BRANCHES")
GREEDY = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Row:
    """Milliseconds a step, and microseconds of the host a step."""

    num_tokens: int
    num_requests: int
    num_prompts: int
    replayed_ms: float
    replayed_host_us: float
    issued_ms: float
    issued_host_us: float

    def __str__(self) -> str:
        return (
            f"{self.num_tokens:5} tokens, {self.num_requests:4} requests, {self.num_prompts} prompts: replayed "
            f"{self.replayed_ms:7.3f} ms (host {self.replayed_host_us:5.0f} us), issued {self.issued_ms:7.3f} ms "
            f"(host {self.issued_host_us:5.0f} us)"
        )


def fill_randomly(driver: Any, stream: Any, buffer: Buffer) -> None:
    """bf16 of either sign between 2^-8 and 2^-6: as a model's weights, and bits that change cost power as theirs do."""
    pinned = driver.allocate_pinned(PIECE_BYTES)
    data = bytearray(PIECE_BYTES)
    data[0::2] = os.urandom(PIECE_BYTES // 2)
    data[1::2] = os.urandom(PIECE_BYTES // 2).translate(bytes(0x3B + (byte & 1) + (byte & 0x80) for byte in range(256)))
    pinned.view[:] = data
    for begin in range(0, buffer.num_bytes, PIECE_BYTES):
        num_bytes = min(PIECE_BYTES, buffer.num_bytes - begin)
        driver.copy_to_device_async(buffer.address + begin, pinned.address, num_bytes, stream)
    driver.synchronize(stream)
    driver.free_pinned(pinned)


def plans(size: StepSize, context: int, first_step: int) -> Iterator[StepPlan]:
    """The same step for ever, as full as `size` allows: decodes at `context`, and for mixed sizes one prompt."""
    num_decodes = size.num_decodes if not size.num_prefills else min(size.num_samples - 1, size.num_tokens - 2)
    num_blocks = context // BLOCK_SIZE + 1

    def blocks(slot: int, count: int) -> tuple[int, ...]:
        return tuple(range(1 + slot * num_blocks, 1 + slot * num_blocks + count))

    chunks = [
        TokenChunk(slot, slot, context, 1, (), blocks(slot, num_blocks), samples=True) for slot in range(num_decodes)
    ]
    if size.num_prefills:
        length = size.num_tokens - num_decodes
        table = blocks(num_decodes, -(-length // BLOCK_SIZE))
        chunks.append(TokenChunk(num_decodes, num_decodes, 0, length, (7,) * length, table, samples=True))
    resets = tuple(SlotReset(chunk.slot, chunk.slot, (7,), 1, GREEDY) for chunk in chunks)
    while True:
        yield StepPlan(first_step, resets, tuple(chunks))
        resets, first_step = (), first_step + 1


def time_steps(runner: ModelRunner[Any], steps: Iterator[StepPlan], num_steps: int) -> tuple[float, float]:
    """Milliseconds a step, and microseconds of the host to submit one: medians of five rounds."""
    pending = runner.submit(next(steps))
    rounds, hosts = [], []
    for _ in range(5):
        pending.wait()
        begin, in_submit = time.perf_counter(), 0.0
        for _ in range(num_steps):
            submitted = time.perf_counter()
            following = runner.submit(next(steps))
            in_submit += time.perf_counter() - submitted
            pending.wait()
            pending = following
        pending.wait()
        rounds.append((time.perf_counter() - begin) / num_steps)
        hosts.append(in_submit / num_steps)
    return statistics.median(rounds) * 1e3, statistics.median(hosts) * 1e6


def measure(ops: CudaOperations, sizes: Sequence[StepSize], context: int, num_steps: int) -> Iterator[Row]:
    """A row per size."""
    runner = ModelRunner(QWEN2_7B, ops, ())
    while runner.prepare():
        pass
    replayed = []
    for size in sizes:
        replayed.append(time_steps(runner, plans(size, context, 1), num_steps))
        assert runner.graph_size == size.num_tokens, f"{size} was not replayed"
    ops.max_graph_requests = 0
    runner = ModelRunner(QWEN2_7B, ops, ())
    for size, times in zip(sizes, replayed, strict=True):
        issued = time_steps(runner, plans(size, context, 1), num_steps)
        yield Row(size.num_tokens, size.num_samples, int(size.num_prefills > 0), *times, *issued)


def limits_of(num_requests: int, context: int, max_mixed_tokens: int) -> BatchLimits:
    """Of steps of Qwen2-7B with room for `context` tokens, or a prompt of a whole step, of each request."""
    num_blocks = 1 + num_requests * (max(context, max_mixed_tokens) // BLOCK_SIZE + 2)
    max_tokens = max(max_mixed_tokens, num_requests)
    return BatchLimits(max_tokens, num_requests, 32768, num_blocks, BLOCK_SIZE, max_mixed_tokens=max_mixed_tokens)


def make_operations(limits: BatchLimits, *, on_nothing: bool, early_launch: bool = False) -> CudaOperations:
    """Of the machine's GPU, or of a driver that does nothing."""
    layout = weight_layout(QWEN2_7B)
    if on_nothing:
        driver: Any = NullDriver()
        images, gemms = source_images(), NO_TABLE
    else:
        driver = NvidiaDriver.open(early_launch=early_launch)
        manifest = read_manifest(built_folder())
        if manifest is None:
            sys.exit(f"no kernels are in {built_folder()}: run scripts/build-kernels")
        images, gemms = manifest.images(driver.facts.arch), manifest.gemm_table(driver.facts.arch)
    stream = driver.create_stream()
    weights = Buffer(driver.allocate(layout.total_bytes), (layout.total_bytes,), "uint8")
    if not on_nothing:
        fill_randomly(driver, stream, weights)
    ops = create_backend(
        QWEN2_7B,
        weight_buffers(weights.address, layout),
        limits,
        vocab_limit=QWEN2_7B.vocab_size,
        driver=driver,
        stream=stream,
        images=images,
        gemms=gemms,
    )
    assert isinstance(ops, CudaOperations)
    driver.fill_async(ops.kv_pool.address, 0, ops.kv_pool.num_bytes, stream)
    return ops


def main() -> None:
    """Print a line per size, and write all of them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=200, help="tokens that each decode has behind it")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--mixed-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="of each of five rounds")
    parser.add_argument("--size", nargs="*", default=[], metavar="TOKENSxREQUESTS", help="these alone; 8x8: decodes")
    parser.add_argument("--switch-on", nargs="*", default=[], choices=SWITCHES, help="of server/ops/cuda/attention.py")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on-nothing", action="store_true", help="on a driver that does nothing: try this script")
    options = parser.parse_args()
    limits = limits_of(options.requests, options.context, options.mixed_tokens)
    for name in options.switch_on:
        setattr(attention, name, True)
    ops = make_operations(limits, on_nothing=options.on_nothing)
    sizes = [
        size
        for size in graph_sizes(options.requests, limits)
        if not options.size or f"{size.num_tokens}x{size.num_samples}" in options.size
    ]
    rows = []
    for row in measure(ops, sizes, options.context, options.steps):
        rows.append(asdict(row))
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
