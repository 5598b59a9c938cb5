"""What runs of `bench startup` mean: medians and worst values against targets, starts stage by stage, as tables."""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

import server
from server.bench.startup import Run

# Of Qwen2-7B (15.2 GB) on one H200, by backend; elsewhere they say nothing.
_TORCH_TARGETS = {("warm", "answer"): 4.0}
_CUDA_TARGETS = {
    ("warm", "answer"): 1.5,
    ("warm", "first_health"): 1.0,
    ("first-ever", "answer"): 2.0,
    ("cold", "times_floor"): 1.15,
    ("warm after cold", "answer"): 1.5,
    ("kill", "pause"): 0.6,
    ("kill-many", "first_pause"): 0.8,
    ("kill-arbiter", "pause"): 0.8,
    ("requests", "difference"): 0.01,
}
TARGETS = {"cuda": _CUDA_TARGETS, "torch": _TORCH_TARGETS}
TARGETS_HOLD_FOR = "H200"
RESUME_TOKENS_PER_S = 40_000.0


class Line(msgspec.Struct, frozen=True):
    """One measure over all runs of its kind. `target` null: there is none here. `met`: by the worst of them."""

    kind: str
    measure: str
    num_runs: int
    median: float
    worst: float
    target: float | None
    met: bool | None


class Report(msgspec.Struct, frozen=True):
    """Everything, as it is written to the JSON file."""

    version: str
    date: str
    machine: dict[str, Any]
    command: str
    summary: list[Line]
    failures: dict[str, str]
    runs: list[Run]


def make_report(runs: Sequence[Run], failures: Mapping[str, str], command: str) -> Report:
    """Summed up, with the machine that it was measured on."""
    devices = {run.startup["device"] for run in runs if run.startup}
    device = next(iter(sorted(devices, reverse=True)), "")
    lines = list(_summarise(runs, _targets_of(runs) if TARGETS_HOLD_FOR in device else {}))
    return Report(server.__version__, now_text(), machine_of(device), command, lines, dict(failures), list(runs))


def machine_of(device: str) -> dict[str, Any]:
    """Where something was measured. `device` "": a CPU, or not known."""
    return {
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def now_text() -> str:
    """The date and time of a report."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _targets_of(runs: Sequence[Run]) -> Mapping[tuple[str, str], float]:
    backends = {run.startup["backend"] for run in runs if run.startup}
    return TARGETS[backends.pop()] if len(backends) == 1 else {}


def _summarise(runs: Sequence[Run], targets: Mapping[tuple[str, str], float]) -> Iterable[Line]:
    for kind in dict.fromkeys(run.kind for run in runs):
        own = [run for run in runs if run.kind == kind]
        for measure in dict.fromkeys(name for run in own for name in run.values):
            values = [run.values[measure] for run in own if measure in run.values]
            target = _target(kind, measure, own, targets)
            worst = max(values, key=abs)
            met = None if target is None else abs(worst) <= target
            yield Line(kind, measure, len(values), median(values), worst, target, met)


def _target(kind: str, measure: str, runs: Sequence[Run], targets: Mapping[tuple[str, str], float]) -> float | None:
    first_s = targets.get((kind, "first_pause"))
    if (kind, measure) == ("kill-many", "last_pause") and first_s is not None:  # all that was known is computed again
        return first_s + max(int(run.notes["known_tokens"]) for run in runs) / RESUME_TOKENS_PER_S
    return targets.get((kind, measure))


def median_run(runs: Sequence[Run], kind: str, measure: str = "answer") -> Run | None:
    """The run in the middle."""
    own = sorted(
        (run for run in runs if run.kind == kind and measure in run.values), key=lambda run: run.values[measure]
    )
    return own[len(own) // 2] if own else None


def format_report(report: Report) -> str:
    """Tables for a terminal."""
    device = report.machine["device"] or "CPU"
    head = f"{report.command}\n{device}, {report.machine['cores']} cores; seconds unless named otherwise"
    parts = [
        head,
        format_table(("what", "measure", "runs", "median", "worst", "target", ""), map(_cells, report.summary)),
    ]
    shown = [
        ("warm", "answer"),
        ("first-ever", "answer"),
        ("cold", "answer"),
        ("kill", "pause"),
        ("kill-arbiter", "pause"),
    ]
    for kind, measure in shown:
        run = median_run(report.runs, kind, measure)
        if run is not None and run.startup is not None:
            parts.append(f"stages of the median run of {kind} ({run.values[measure]:.3f} s; *: everyone waited for it)")
            parts.append(format_stages(run, kind))
    parts += [f"{kind} could not be measured: {reason}" for kind, reason in report.failures.items()]
    return "\n\n".join(parts)


def _cells(line: Line) -> tuple[str, ...]:
    verdict = "" if line.met is None else "met" if line.met else "MISSED"
    target = "" if line.target is None else f"{line.target:.3f}"
    return line.kind, line.measure, str(line.num_runs), f"{line.median:.4f}", f"{line.worst:.4f}", target, verdict


def format_stages(run: Run, kind: str) -> str:
    """The server's own account of a start, or of the restart that a kill has caused."""
    assert run.startup is not None
    rows = run.startup["stages"]
    if kind.startswith("kill"):
        restarts = run.startup["restarts"]
        rows = [row for restart in restarts.values() for row in restart["stages"] if restart["began_s"] is not None]
        last = max((row["begin_s"] for row in rows), default=0.0)
        rows = sorted((row for row in rows if last - row["begin_s"] < _ONE_RESTART_S), key=lambda row: row["begin_s"])
    header = ("process", "stage", "begin", "end", "took", "expected", "GB/s", "", "check")
    return "\n".join([format_table(header, [_stage_cells(row) for row in rows]), _critical_sums(rows)]).rstrip()


def _critical_sums(rows: Sequence[dict[str, Any]]) -> str:
    """How much of the waiting is accounted for by expectations. A stage is counted whole, waits are not expected."""
    critical = [row for row in rows if row["is_critical"] and row["expected_s"] is not None]
    if not critical:
        return ""
    took_s, expected_s = (sum(row[name] for row in critical) for name in ("seconds", "expected_s"))
    return (
        f"stages that everyone waited for and of which a time is expected: {took_s:.3f} s, expected {expected_s:.3f} s"
    )


_ONE_RESTART_S = 60.0  # what began earlier belongs to another one


def _stage_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["role"],
        row["stage"],
        f"{row['begin_s']:.3f}",
        "" if row["end_s"] is None else f"{row['end_s']:.3f}",
        f"{row['seconds']:.3f}",
        "" if row["expected_s"] is None else f"{row['expected_s']:.3f}",
        "" if not row["rate"] else f"{row['rate'] / 1e9:.2f}",
        "*" if row["is_critical"] else "",
        {True: "passed: ", False: "FAILED: ", None: "running: "}[row["passed"]] + row["check"],
    )


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").replace(".", "", 1).isdigit()
