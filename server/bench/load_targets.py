"""What a load on one H200 with Qwen2-7B should give, and what vLLM 0.25.1 gave there; elsewhere they say nothing.

Latencies and rates are of 128 tokens in and 128 out, all users started together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from server.bench.load import LoadRun
from server.bench.load_figures import Figures
from server.bench.report import TARGETS_HOLD_FOR

BACKEND = "cuda"
NUM_TOKENS = 128
_HEALTH_P99_MS = 10.0
_ITL_TAIL = 3.0
_HOST_GB = 6.0
_STREAMED_SHARE = 0.97


@dataclass(frozen=True, slots=True)
class _Goal:
    """`peer` None: was not recorded."""

    measure: str
    limit: float
    peer: float | None
    is_floor: bool = False


def _goals(p50: float, p95: float, rate: float, peer: tuple[float, float | None, float]) -> tuple[_Goal, ...]:
    return (
        _Goal("P50 ms", p50, peer[0]),
        _Goal("P95 ms", p95, peer[1]),
        _Goal("tokens/s", rate, peer[2], is_floor=True),
    )


_CLOSED = {
    1: _goals(550, 560, 232, (613, None, 209)),
    32: _goals(690, 720, 5_900, (775, None, 5_350)),
    100: _goals(850, 900, 15_000, (1_097, 1_133, 11_600)),
    256: _goals(1_750, 1_850, 18_700, (2_046, None, 15_970)),
}
_OPEN_TTFT_P95_MS = {60.0: 35.0, 100.0: 80.0}

LoadKey = tuple[int, float, bool]  # users, rate, is_stream


class Comparison(msgspec.Struct, frozen=True):
    """One figure beside what it should be. `peer` null: was not recorded."""

    load: str
    is_stream: bool
    measure: str
    value: float
    target: float
    peer: float | None
    met: bool


def targets_hold(device: str, backend: str) -> bool:
    """Whether it was measured where the targets are meant for."""
    return TARGETS_HOLD_FOR in device and backend == BACKEND


def compare(figures: Mapping[LoadKey, Figures], runs: Sequence[LoadRun], is_usual: bool) -> Iterable[Comparison]:
    """`figures`: medians of all repetitions. `is_usual`: 128 tokens in and out, begun together, no long prompts beside.

    Latencies are of good requests alone: how many were not is a measure of its own.
    """
    names = {(run.users, run.rate, run.is_stream): run.load for run in runs}
    for key, own in figures.items():
        of_load = [run for run in runs if (run.users, run.rate, run.is_stream) == key]
        goals = [(_Goal("errors", 0, None), float(sum(run.num_failed for run in of_load))), *_probe_goals(of_load, own)]
        if is_usual:
            goals += _latency_goals(key, own)
            goals += _streaming_goals(key, own, figures)
        for goal, value in goals:
            met = value >= goal.limit if goal.is_floor else value <= goal.limit
            yield Comparison(names[key], key[2], goal.measure, value, goal.limit, goal.peer, met)


def _latency_goals(key: LoadKey, figures: Figures) -> Iterable[tuple[_Goal, float]]:
    users, rate, _ = key
    values = (figures.latency_ms.p50, figures.latency_ms.p95, figures.tokens_per_s)
    yield from zip(_CLOSED.get(users, ()), values, strict=False)  # no goals for other numbers of users
    if rate in _OPEN_TTFT_P95_MS and figures.ttft_ms is not None:
        yield _Goal("TTFT P95 ms", _OPEN_TTFT_P95_MS[rate], None), figures.ttft_ms.p95


def _streaming_goals(key: LoadKey, own: Figures, figures: Mapping[LoadKey, Figures]) -> Iterable[tuple[_Goal, float]]:
    whole = figures.get((key[0], key[1], False))
    if key[0] and key[2] and whole is not None:
        yield (
            _Goal("tokens/s streamed / whole", _STREAMED_SHARE, None, is_floor=True),
            (own.tokens_per_s / whole.tokens_per_s),
        )


def _probe_goals(runs: Sequence[LoadRun], figures: Figures) -> Iterable[tuple[_Goal, float]]:
    health = [run.health.ms.p99 for run in runs if run.health is not None and run.health.ms is not None]
    if health:
        yield _Goal("GET /health P99 ms", _HEALTH_P99_MS, None), max(health)
    if figures.itl_tail is not None and any(run.disturbance is not None and run.disturbance.num_good for run in runs):
        yield _Goal("ITL P99 / median, long prompts", _ITL_TAIL, None), figures.itl_tail
    memories = [run.memory.host.max for run in runs if run.memory is not None]
    if memories:
        yield _Goal("host memory GB", _HOST_GB, None), max(memories) / 1e9
