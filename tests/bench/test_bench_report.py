"""Runs are summed up per kind and measure, and judged by the worst of them where a target holds."""

import msgspec
import pytest

from server.bench.report import format_report, make_report, median_run
from server.bench.startup import Run


def startup(device: str, backend: str) -> dict[str, object]:
    row = {
        "role": "loader",
        "stage": "weights",
        "begin_s": 0.4,
        "end_s": 0.8,
        "seconds": 0.4,
        "bytes": 15 * 10**9,
        "rate": 37.5e9,
        "expected_s": 0.32,
        "check": "every byte",
        "passed": True,
        "is_critical": True,
    }
    return {
        "device": device,
        "backend": backend,
        "stages": [row],
        "restarts": {"model": {"began_s": 1.0, "stages": [row]}},
    }


def runs(device: str, backend: str = "cuda") -> list[Run]:
    starts = [Run("warm", {"answer": seconds}, {}, startup(device, backend)) for seconds in (1.1, 1.6, 1.2)]
    kills = [
        Run("kill-many", {"first_pause": 0.5, "last_pause": 1.2}, {"known_tokens": 20_000}, startup(device, backend))
    ]
    return [*starts, *kills, Run("requests", {"difference": -0.02}), Run("requests", {"difference": 0.001})]


def test_median_worst_and_targets() -> None:
    report = make_report(runs("NVIDIA H200"), {}, "us")
    lines = {(line.kind, line.measure): line for line in report.summary}
    answer = lines["warm", "answer"]
    assert (answer.num_runs, answer.median, answer.worst, answer.target, answer.met) == (3, 1.2, 1.6, 1.5, False)
    last = lines["kill-many", "last_pause"]
    assert last.target == pytest.approx(0.8 + 0.5)
    assert last.met
    assert lines["kill-many", "first_pause"].met
    difference = lines["requests", "difference"]
    assert (difference.worst, difference.met) == (-0.02, False)


def test_the_torch_backend_has_a_target_of_its_own() -> None:
    report = make_report(runs("NVIDIA H200", "torch"), {}, "us")
    targets = {(line.kind, line.measure): line.target for line in report.summary if line.target is not None}
    assert targets == {("warm", "answer"): 4.0}


def test_there_are_no_targets_on_other_machines() -> None:
    report = make_report(runs("NVIDIA L4"), {}, "us")
    assert {line.target for line in report.summary} == {None}
    assert {line.met for line in report.summary} == {None}


def test_the_median_run_shows_its_stages() -> None:
    found = median_run(runs(""), "warm")
    assert found is not None
    assert found.values["answer"] == 1.2
    assert median_run(runs(""), "cold") is None
    text = format_report(make_report(runs("NVIDIA H200"), {"cold": "tmpfs"}, "us"))
    assert "MISSED" in text
    assert "37.50" in text
    assert "0.400 s, expected 0.320 s" in text
    assert "cold could not be measured: tmpfs" in text


def test_a_report_is_json() -> None:
    report = make_report(runs("NVIDIA H200"), {}, "us")
    assert msgspec.json.decode(msgspec.json.encode(report))["runs"][0]["values"] == {"answer": 1.1}
