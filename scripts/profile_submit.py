#!/usr/bin/env python3
"""Host time of one `ModelRunner.submit` on a driver that does nothing: what filling inputs and issuing a step costs.

Left out: what the driver's own calls take (copy there, graph or launches, copy back). Needs no GPU.

    scripts/profile_submit.py [--steps 200] [--profile CASE]
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.engine.messages import SamplingParams
from server.kernels.catalog import all_specs, expand
from server.models.facts import ModelFacts
from server.ops.cuda.arguments import PackedArguments
from server.ops.cuda.backend import create_backend
from server.ops.cuda.driver import DeviceFacts, KernelImage, PinnedMemory
from server.ops.cuda.weights import weight_buffers
from server.ops.interface import BatchLimits
from server.runner.model_runner import ModelRunner
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from server.weights.layout import weight_layout

QWEN2_7B = ModelFacts(
    "Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, None, True, False, False, False,
    "bfloat16",
)  # fmt: skip
LIMITS = BatchLimits(256, 256, 32768, 1 << 16, 16, max_mixed_tokens=256)
NUM_OUTPUTS, NUM_PROMPT = 128, 128
SAMPLING = SamplingParams(max_tokens=NUM_OUTPUTS, ignore_eos=True)


@dataclass
class _Function:
    image: KernelImage
    packed: PackedArguments


class NullDriver:
    """Takes every call and does nothing; addresses are numbers, pinned memory is real."""

    facts = DeviceFacts("nothing", "sm_90", 132, 1 << 37, 1 << 21, False)

    def __init__(self) -> None:
        import ctypes

        self._ctypes = ctypes
        self._kept: list[Any] = []
        self._next_address = 1 << 32
        self.calls: Counter[str] = Counter()
        self.num_uploaded_bytes = 0

    def allocate(self, num_bytes: int) -> int:
        address = self._next_address
        self._next_address += -(-num_bytes // 4096) * 4096
        return address

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        memory = (self._ctypes.c_ubyte * num_bytes)()
        self._kept.append(memory)
        return PinnedMemory(self._ctypes.addressof(memory), memoryview(memory).cast("B"))

    def load(self, image: KernelImage) -> _Function:
        return _Function(image, PackedArguments(image.parameters))

    def launch_async(self, function: _Function, grid: Any, values: Sequence[Any], stream: int) -> None:
        self.calls["launch_async"] += 1
        function.packed.write(values)

    def copy_to_device_async(self, dest: int, source: int, num_bytes: int, stream: int) -> None:
        self.calls["copy_to_device_async"] += 1
        self.num_uploaded_bytes += num_bytes

    def is_done(self, event: int) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*_args: Any, **_options: Any) -> int:
            self.calls[name] += 1
            return 1

        return call


class _User:
    """A request on its way through its tokens; its table is another tuple when it has grown, as the scheduler's is."""

    def __init__(self, slot: int, request_id: int, position: int) -> None:
        self.slot, self.request_id, self.position = slot, request_id, position
        self.blocks: tuple[int, ...] = ()
        self._fit(position)

    def _fit(self, position: int) -> None:
        while len(self.blocks) * LIMITS.block_size <= position:
            self.blocks = (*self.blocks, 1 + (self.slot * 64 + len(self.blocks)) % (LIMITS.num_blocks - 1))

    def decode(self) -> TokenChunk:
        self._fit(self.position)
        chunk = TokenChunk(self.slot, self.request_id, self.position, 1, (), self.blocks, samples=True)
        self.position += 1
        return chunk

    def prompt(self) -> TokenChunk:
        return TokenChunk(
            self.slot, self.request_id, 0, NUM_PROMPT, tuple(range(NUM_PROMPT)), self.blocks, samples=True
        )


def decodes(num_users: int) -> Iterator[StepPlan]:
    """The same users for ever, spread over their outputs; contexts start over when they end."""
    users = [_User(slot, slot, NUM_PROMPT + slot * NUM_OUTPUTS // num_users) for slot in range(num_users)]
    resets = tuple(SlotReset(user.slot, user.request_id, (1,), 1, SAMPLING) for user in users)
    for step in itertools.count(1):
        yield StepPlan(step, resets, tuple(user.decode() for user in users))
        resets = ()
        for user in users:
            if user.position == NUM_PROMPT + NUM_OUTPUTS:
                user.blocks, user.position = user.blocks[: NUM_PROMPT // LIMITS.block_size], NUM_PROMPT


def mixed(num_users: int) -> Iterator[StepPlan]:
    """A steady state: in each step the oldest user leaves, and a new one's prompt comes behind the decodes."""
    users = deque(_User(slot, slot, NUM_PROMPT + slot) for slot in range(num_users))
    resets = tuple(SlotReset(user.slot, user.request_id, (1,), 1, SAMPLING) for user in users)
    request_ids = itertools.count(num_users)
    for step in itertools.count(1):
        old = users.popleft()
        new = _User(old.slot, next(request_ids), NUM_PROMPT)
        resets += (SlotReset(new.slot, new.request_id, tuple(range(NUM_PROMPT)), NUM_PROMPT, SAMPLING),)
        yield StepPlan(step, resets, (*(user.decode() for user in users), new.prompt()))
        resets = ()
        users.append(new)


CASES: dict[str, Callable[[], Iterator[StepPlan]]] = {
    "1 decode": lambda: decodes(1),
    "32 decodes": lambda: decodes(32),
    "100 decodes": lambda: decodes(100),
    "256 decodes": lambda: decodes(256),
    "31 decodes and a prompt": lambda: mixed(32),
    "99 decodes and a prompt": lambda: mixed(100),
}


def source_images() -> tuple[KernelImage, ...]:
    """Every kernel as its source describes it, not compiled."""
    return tuple(
        KernelImage(r.name, r.source, r.constants, r.parameters, r.function, r.num_warps, 0, Path("none"))
        for spec in all_specs()
        for r in expand(spec)
    )


def make_runner(driver: Any) -> ModelRunner[Any]:
    """Qwen2-7B, with all graphs."""
    layout = weight_layout(QWEN2_7B)
    ops = create_backend(
        QWEN2_7B, weight_buffers(driver.allocate(layout.total_bytes), layout), LIMITS, vocab_limit=QWEN2_7B.vocab_size,
        driver=driver, stream=driver.create_stream(), images=source_images(),
    )  # fmt: skip
    runner = ModelRunner(QWEN2_7B, ops, ())
    while runner.prepare():
        pass
    return runner


def measure(runner: ModelRunner[Any], driver: NullDriver, plans: Iterator[StepPlan], num_steps: int) -> str:
    """Times of steps after some to warm up (the lowest tenth is what a busy machine leaves alone), bytes, launches."""
    times, num_bytes, launches = [], 0, 0
    for step, plan in enumerate(itertools.islice(plans, 20 + num_steps)):
        driver.num_uploaded_bytes, before = 0, driver.calls["launch_async"]
        begin = time.perf_counter()
        pending = runner.submit(plan)
        seconds = time.perf_counter() - begin
        pending.wait()
        if step >= 20:
            times.append(seconds * 1e6)
            num_bytes, launches = driver.num_uploaded_bytes, driver.calls["launch_async"] - before
    tenths = statistics.quantiles(times, n=10)
    return (
        f"P10 {tenths[0]:7.1f}  P50 {tenths[4]:7.1f}  P90 {tenths[8]:7.1f} us  {num_bytes:9,} bytes there  "
        f"{launches:4} launches"
    )


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="measured steps per case")
    parser.add_argument("--profile", choices=CASES, help="profile this case instead")
    options = parser.parse_args()
    driver = NullDriver()
    runner = make_runner(driver)
    if options.profile:
        plans = list(itertools.islice(CASES[options.profile](), options.steps))
        profile = cProfile.Profile()
        for plan in plans:
            profile.runcall(runner.submit, plan)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for name, plans in CASES.items():
        sys.stdout.write(f"{name:26} {measure(runner, driver, plans(), options.steps)}\n")


if __name__ == "__main__":
    main()
