#!/usr/bin/env python3
"""Where the time of a step of Qwen2-7B goes on a GPU: kernel by kernel, idle between them, and what switches change.

Needs a GPU, built kernels and a torch with CUDA, whose profiler listens; no checkpoint: the weights are random. Wall
and host times are measured apart, without the profiler. Kernels that begin early overlap: their own times then hold
what they wait, and only busy, idle and wall times can be compared. Each variant is a process of its own.

    scripts/gpu/step_profile.py [--size 1x1 512x256 ...] [--with early_launch server.ops.cuda.attention.BRANCHES=True]
"""

import argparse
import ast
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu.graph_times import limits_of, make_operations, plans, time_steps
from scripts.profile_submit import QWEN2_7B
from server.ops.interface import BatchLimits, StepSize
from server.runner.graphs import graph_sizes
from server.runner.model_runner import ModelRunner

EARLY_LAUNCH = "early_launch"
FIRST_OF_STEP, LAST_OF_STEP = "embed", "sample_finish"
NUM_WARM_UP = 3
SHOWN_NAME = 60  # cuBLAS gives long ones
# CUPTI forgets graphs that were instantiated before it was torn down.
ENVIRONMENT = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


@dataclass(frozen=True)
class Activity:
    """A kernel, a copy or a fill on the device."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Kernel:
    """All launches of one name: how many a step has, and the microseconds a step that they take together."""

    name: str
    num_launches: float
    us: float


@dataclass(frozen=True)
class Gaps:
    """Microseconds a step: in which something runs, nothing within a step, and nothing between two steps."""

    busy_us: float
    idle_within_us: float
    idle_between_us: float

    @property
    def idle_between_share(self) -> float:
        """Of the whole."""
        return self.idle_between_us / max(1e-9, self.busy_us + self.idle_within_us + self.idle_between_us)


@dataclass(frozen=True)
class Profile:
    """A step of one size by one variant."""

    variant: str
    size: str
    is_replayed: bool
    wall_ms: float
    host_us: float
    gaps: Gaps
    kernels: tuple[Kernel, ...]


def by_kernel(activities: Sequence[Activity], num_steps: int) -> tuple[Kernel, ...]:
    """What takes most comes first."""
    groups: dict[str, list[int]] = {}
    for activity in activities:
        groups.setdefault(activity.name, []).append(activity.end_ns - activity.start_ns)
    kernels = (Kernel(name, len(ns) / num_steps, sum(ns) / 1e3 / num_steps) for name, ns in groups.items())
    return tuple(sorted(kernels, key=lambda kernel: -kernel.us))


def measure_gaps(activities: Sequence[Activity], num_steps: int) -> Gaps:
    """What overlaps counts once. Between steps is what lies behind a step's last kernel and before the next's first."""
    busy = within = between = 0
    end, in_step = None, False
    for activity in sorted(activities, key=lambda activity: activity.start_ns):
        gap = 0 if end is None else max(0, activity.start_ns - end)
        if in_step:
            within += gap
        else:
            between += gap
        busy += max(0, activity.end_ns - max(activity.start_ns, end or 0))
        end = max(end or 0, activity.end_ns)
        if activity.name in (FIRST_OF_STEP, LAST_OF_STEP):
            in_step = activity.name == FIRST_OF_STEP
    return Gaps(*(ns / 1e3 / num_steps for ns in (busy, within, between)))


def record(runner: ModelRunner[Any], steps: Iterator[Any], num_steps: int) -> list[Activity]:
    """What the device does in steps of which each is submitted before the one before is waited for."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    pending = runner.submit(next(steps))
    for _ in range(NUM_WARM_UP):
        pending = _follow(runner, steps, pending)
    pending.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as listener:
        pending = runner.submit(next(steps))
        for _ in range(num_steps - 1):
            pending = _follow(runner, steps, pending)
        pending.wait()
    assert listener.profiler is not None
    events = listener.profiler.kineto_results.events()
    found = [
        Activity(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]
    if not any(activity.name == FIRST_OF_STEP for activity in found):
        sys.exit(f"torch's profiler saw no kernel {FIRST_OF_STEP} among {len(found)} activities: is it without CUPTI?")
    return found


def _follow(runner: ModelRunner[Any], steps: Iterator[Any], pending: Any) -> Any:
    following = runner.submit(next(steps))
    pending.wait()
    return following


def start_listening() -> None:
    """Before anything is recorded: kernels of graphs are then seen one by one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")


def switch_on(setting: str) -> None:
    """Set "module.NAME=value" in this process."""
    where, _, value = setting.partition("=")
    module_name, _, name = where.rpartition(".")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        sys.exit(f"{module_name} has no {name}")
    setattr(module, name, ast.literal_eval(value))


def profiles(variant: str, options: argparse.Namespace) -> Iterator[Profile]:
    """Of every size, replayed and then issued one by one. `variant`: settings, separated by commas; none: as it is."""
    settings = [setting for setting in variant.split(",") if setting]
    for setting in settings:
        if setting != EARLY_LAUNCH:
            switch_on(setting)
    if not options.on_nothing:
        start_listening()
    limits = limits_of(options.requests, options.context, options.mixed_tokens)
    ops = make_operations(limits, on_nothing=options.on_nothing, early_launch=EARLY_LAUNCH in settings)
    sizes = _sizes(options, limits)
    for is_replayed in (True, False):
        if not is_replayed:
            ops.max_graph_requests = 0
        runner: ModelRunner[Any] = ModelRunner(QWEN2_7B, ops, ())
        while runner.prepare():
            pass
        for size in sizes:
            steps = plans(size, options.context, 1)
            wall_ms, host_us = time_steps(runner, steps, options.steps)
            found = [] if options.on_nothing else record(runner, steps, options.steps)
            kernels, gaps = by_kernel(found, options.steps), measure_gaps(found, options.steps)
            yield Profile(variant or "as it is", _title(size), is_replayed, wall_ms, host_us, gaps, kernels)


def _sizes(options: argparse.Namespace, limits: BatchLimits) -> list[StepSize]:
    sizes: dict[str, StepSize] = {}
    for size in graph_sizes(options.requests, limits):
        sizes.setdefault(
            _title(size), size
        )  # decodes alone come first, and mixed steps of the same counts are left out
    unknown = [title for title in options.size if title not in sizes]
    if unknown:
        sys.exit(f"no steps of {', '.join(unknown)} are recorded; there are {', '.join(sizes)}")
    return [sizes[title] for title in options.size]


def _title(size: StepSize) -> str:
    return f"{size.num_tokens}x{size.num_samples}"


def describe(profile: Profile, num_kernels: int) -> str:
    """A short table."""
    gaps, num_launches = profile.gaps, sum(kernel.num_launches for kernel in profile.kernels)
    lines = [
        f"{profile.size} {'replayed' if profile.is_replayed else 'issued'}, {profile.variant}: "
        f"wall {profile.wall_ms * 1e3:.0f} us, host {profile.host_us:.0f} us; busy {gaps.busy_us:.0f} us, "
        f"idle {gaps.idle_within_us:.0f} us within steps, {gaps.idle_between_us:.0f} us "
        f"({gaps.idle_between_share:.1%}) between; {num_launches:.0f} launches"
    ]
    for kernel in profile.kernels[:num_kernels]:
        each = kernel.us / kernel.num_launches
        lines.append(f"  {kernel.us:8.1f} us = {kernel.num_launches:6.1f} x {each:7.2f}  {kernel.name[:SHOWN_NAME]}")
    return "\n".join(lines)


def main() -> None:
    """Print a table per size and variant, and write all of them if asked to."""
    options = _parser().parse_args()
    if options.variant is not None:
        for profile in profiles(options.variant, options):
            sys.stdout.write(f"{json.dumps(asdict(profile))}\n")
            sys.stdout.flush()
        return
    found = []
    for variant in ("", *options.variants):
        for profile in _in_own_process(variant):
            found.append(asdict(profile))
            sys.stdout.write(f"{describe(profile, options.top)}\n")
            sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def _in_own_process(variant: str) -> Iterator[Profile]:
    command = [sys.executable, __file__, *sys.argv[1:], f"--variant={variant}"]
    environment = os.environ | ENVIRONMENT
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield from map(read_profile, itertools.filterfalse(str.isspace, process.stdout))
    if process.returncode:
        sys.exit(process.returncode)


def read_profile(line: str) -> Profile:
    """What a process of one variant printed."""
    fields = json.loads(line)
    gaps, kernels = Gaps(**fields.pop("gaps")), tuple(Kernel(**kernel) for kernel in fields.pop("kernels"))
    return Profile(**fields, gaps=gaps, kernels=kernels)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["1x1", "32x32", "256x256", "512x256"], metavar="TOKENSxREQUESTS")
    parser.add_argument(
        "--with", nargs="*", dest="variants", default=[EARLY_LAUNCH], metavar="SETTING[,SETTING...]",
        help=f"variants to compare with what is: {EARLY_LAUNCH}, or module.NAME=value",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=200, help="tokens that each decode has behind it")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--mixed-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="that are profiled, and in each round that is timed")
    parser.add_argument("--top", type=int, default=20, help="kernels to print")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--on-nothing", action="store_true", help="on a driver that does nothing: try this script")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
