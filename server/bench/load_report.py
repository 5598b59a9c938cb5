"""What runs of `bench load` say together: medians over the repetitions, as tables and as JSON."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

import server
from server.bench.load import LoadPlan, LoadRun
from server.bench.load_figures import Figures, Spread
from server.bench.load_probes import Probes
from server.bench.load_requests import Shape
from server.bench.load_targets import NUM_TOKENS, Comparison, compare
from server.bench.report import format_table, machine_of, now_text
from server.bench.server_memory import Extent

_HEADER = (
    "load", "answers", "which", "runs", "requests", "P50", "P95", "P99", "TTFT P50", "P95", "P99",
    "ITL P50", "P95", "P99", "max", "tokens/s", "requests/s", "errors",
)  # fmt: skip
_SPREADS = ("latency_ms", "ttft_ms", "itl_ms")
_BUSY_CLIENT = 0.7  # of a core: beyond it the client's own delays are no longer small


class Line(msgspec.Struct, frozen=True):
    """One load over all its repetitions. `which`: all, or steady. Figures are medians of the runs' figures; `errors`
    is of all runs together."""

    load: str
    is_stream: bool
    which: str
    num_runs: int
    num_errors: int
    figures: Figures | None


class LoadReport(msgspec.Struct, frozen=True):
    """Everything, as it is written to the JSON file. `conditions`: what was sent, and to whom. `targets`: none are held
    against other machines."""

    version: str
    date: str
    machine: dict[str, Any]
    command: str
    conditions: dict[str, Any]
    summary: list[Line]
    targets: list[Comparison]
    failure: str
    runs: list[LoadRun]


def make_load_report(
    runs: Sequence[LoadRun],
    failure: str,
    command: str,
    device: str,
    conditions: dict[str, Any],
    targets: Sequence[Comparison] = (),
) -> LoadReport:
    """Summed up, with the machine that it was measured on."""
    return LoadReport(
        version=server.__version__,
        date=now_text(),
        machine=machine_of(device),
        command=command,
        conditions=conditions,
        summary=list(_summarise(runs)),
        targets=list(targets),
        failure=failure,
        runs=list(runs),
    )


def compare_with_targets(runs: Sequence[LoadRun], plan: LoadPlan) -> list[Comparison]:
    """The medians of all runs beside what they should be on the machine that the targets are for."""
    medians = {
        (own[0].users, own[0].rate, own[0].is_stream): figures
        for own in _by_load(runs)
        if (figures := _median_figures([run.all for run in own if run.all is not None])) is not None
    }
    is_usual = plan.shape == Shape(NUM_TOKENS, NUM_TOKENS) and not plan.disturb_tokens and not plan.spreads_start
    return list(compare(medians, runs, is_usual))


def _summarise(runs: Sequence[LoadRun]) -> Iterable[Line]:
    for own in _by_load(runs):
        num_errors = sum(failures.count for run in own for failures in run.errors.values())
        for which in ("all", "steady"):
            figures = [found for run in own if (found := getattr(run, which)) is not None]
            yield Line(own[0].load, own[0].is_stream, which, len(own), num_errors, _median_figures(figures))


def _by_load(runs: Sequence[LoadRun]) -> Iterable[list[LoadRun]]:
    groups: dict[tuple[str, bool], list[LoadRun]] = {}
    for run in runs:
        groups.setdefault((run.load, run.is_stream), []).append(run)
    return groups.values()


def _median_figures(all_figures: Sequence[Figures]) -> Figures | None:
    """Each figure's own median."""
    if not all_figures:
        return None

    def spread(name: str) -> Spread | None:
        known = [value for figures in all_figures if (value := getattr(figures, name)) is not None]
        parts = ("p50", "p95", "p99", "max")
        return Spread(*(median(getattr(one, part) for one in known) for part in parts)) if known else None

    tails = [figures.itl_tail for figures in all_figures if figures.itl_tail is not None]
    latency = spread("latency_ms")
    assert latency is not None, "figures always have a latency"
    return Figures(
        num_requests=round(median(figures.num_requests for figures in all_figures)),
        seconds=median(figures.seconds for figures in all_figures),
        tokens_per_s=median(figures.tokens_per_s for figures in all_figures),
        requests_per_s=median(figures.requests_per_s for figures in all_figures),
        latency_ms=latency,
        ttft_ms=spread("ttft_ms"),
        itl_ms=spread("itl_ms"),
        itl_tail=median(tails) if tails else None,
    )


def format_load_report(report: LoadReport) -> str:
    """Tables for a terminal."""
    machine = report.machine
    head = [
        f"model-server {report.version}, {report.date}, {machine['device'] or 'CPU'}, {machine['cores']} cores",
        report.command,
        ", ".join(f"{name} {value}" for name, value in report.conditions.items()),
        "milliseconds; medians of the runs' figures",
    ]
    parts = ["\n".join(head), format_table(_HEADER, map(_cells, report.summary))]
    if report.targets:
        header = ("load", "answers", "measure", "median", "target", "vLLM 0.25.1", "")
        parts.append(format_table(header, map(_target_cells, report.targets)))
    parts += ["\n".join(notes) for own in _by_load(report.runs) if (notes := list(_notes(own)))]
    if report.failure:
        parts.append(f"not all could be measured: {report.failure}")
    return "\n\n".join(parts)


def _cells(line: Line) -> tuple[str, ...]:
    begin = (line.load, "streamed" if line.is_stream else "whole", line.which, str(line.num_runs))
    figures = line.figures
    if figures is None:
        return (*begin, "0", *("-" for _ in range(12)), str(line.num_errors))
    return (
        *begin,
        str(figures.num_requests),
        *_spread_cells(figures.latency_ms)[:3],
        *_spread_cells(figures.ttft_ms)[:3],
        *_spread_cells(figures.itl_ms),
        f"{figures.tokens_per_s:.1f}",
        f"{figures.requests_per_s:.2f}",
        str(line.num_errors),
    )


def _target_cells(one: Comparison) -> tuple[str, ...]:
    numbers = [_number(one.value), _number(one.target), "" if one.peer is None else _number(one.peer)]
    kind, verdict = "streamed" if one.is_stream else "whole", "met" if one.met else "MISSED"
    return (one.load, kind, one.measure, *numbers, verdict)


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _spread_cells(spread: Spread | None) -> Sequence[str]:
    if spread is None:
        return ("-",) * 4
    return [_number(value) for value in msgspec.structs.astuple(spread)]


def _notes(runs: Sequence[LoadRun]) -> Iterable[str]:
    """What the table has no room for, of one load."""
    name = f"{runs[0].load}, {'streamed' if runs[0].is_stream else 'whole'}"
    for kind in dict.fromkeys(kind for run in runs for kind in run.errors):
        found = [run.errors[kind] for run in runs if kind in run.errors]
        yield f"{name}: {sum(one.count for one in found)} x {kind}, e.g. {found[0].example}"
    tails = [run.all.itl_tail for run in runs if run.all and run.all.itl_tail is not None]
    disturbances = [run.disturbance for run in runs if run.disturbance is not None]
    if disturbances and tails:
        yield f"{name}: with long prompts in between, ITL P99 is {median(tails):.2f} times its median"
    yield from _probe_notes(f"{name}: long prompts, to their first token", disturbances)
    yield from _probe_notes(f"{name}: GET /health", [run.health for run in runs if run.health is not None])
    memories = [run.memory for run in runs if run.memory is not None]
    if memories:
        yield f"{name}: host memory (PSS of all processes), {_extent_text([one.host for one in memories])}"
        devices = [one.device for one in memories if one.device is not None]
        if devices:
            yield f"{name}: device memory, {_extent_text(devices)}"
    busiest = max(run.client.cpu_share for run in runs)
    if busiest > _BUSY_CLIENT:
        yield f"{name}: the client itself used {busiest:.0%} of a core: its own delays are part of the times"
    latest = max(run.client.max_late_ms for run in runs)
    if not runs[0].users:
        yield f"{name}: requests were sent at most {latest:.1f} ms after their time"


def _probe_notes(what: str, all_probes: Sequence[Probes]) -> Iterable[str]:
    spreads = [probes.ms for probes in all_probes if probes.ms is not None]
    if not all_probes:
        return
    num_good = sum(probes.num_good for probes in all_probes)
    failures = {kind: failures for probes in all_probes for kind, failures in probes.errors.items()}
    times = ""
    if spreads:
        p50, p95, p99 = (median(getattr(one, part) for one in spreads) for part in ("p50", "p95", "p99"))
        times = f", P50 {p50:.2f}, P95 {p95:.2f}, P99 {p99:.2f}, max {max(one.max for one in spreads):.2f} ms"
    failed = "".join(f"; {kind}: {found.example}" for kind, found in failures.items())
    yield f"{what}: {num_good} answered{times}{failed or ', no errors'}"


def _extent_text(extents: Sequence[Extent]) -> str:
    """From the first run's begin to the last one's end."""
    begin, most, end = extents[0].begin, max(one.max for one in extents), extents[-1].end
    return ", ".join(f"{what} {size / 1e9:.3f} GB" for what, size in (("begin", begin), ("most", most), ("end", end)))
