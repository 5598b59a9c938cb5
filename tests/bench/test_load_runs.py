"""Loads against small servers: users send their rounds, arrivals keep their times, failures do not end a run."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from server.bench.load import Load, LoadPlan, LoadRun, measure_load, poisson_times
from server.bench.load_report import LoadReport, format_load_report, make_load_report
from server.bench.load_requests import Shape
from server.bench.server_memory import MemoryWatch, device_bytes, pss_bytes
from server.bench.server_process import BenchFailed, ServerCommand, ServerProcess
from tests.bench.fake_server import EVENT, HEAD, chunked, plain, serving, stream

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 4


def plan_of(*loads: Load, **changes: object) -> LoadPlan:
    settings = {"num_rounds": 3, "num_requests": 20, "timeout_s": 5.0} | changes
    return LoadPlan(loads, Shape(8, NUM_TOKENS), range(10, 20), **settings)  # type: ignore[arg-type]


def run_against(answer: Callable[[int], list[bytes]], plan: LoadPlan) -> list[LoadRun]:
    with serving(answer) as address:
        return list(measure_load(address, plan, None))


def good(_: int) -> list[bytes]:
    return [stream(NUM_TOKENS)]


def test_each_user_sends_its_rounds_in_each_repetition() -> None:
    runs = run_against(good, plan_of(Load(1, 0, True), Load(5, 0, True), num_repeats=2))
    assert [(run.load, run.repeat) for run in runs] == [("1 user", 0), ("5 users", 0), ("1 user", 1), ("5 users", 1)]
    for run in runs:
        assert run.errors == {}
        assert run.all is not None
        assert run.all.num_requests == 3 * run.users
        assert run.all.tokens_per_s == pytest.approx(NUM_TOKENS * run.all.requests_per_s)
        assert run.all.ttft_ms is not None
        assert run.all.ttft_ms.p50 <= run.all.latency_ms.p50
        assert (run.health, run.disturbance, run.memory) == (None, None, None)


def test_users_send_until_the_time_is_over() -> None:
    [run] = run_against(good, plan_of(Load(2, 0, True), duration_s=0.2, spreads_start=True))
    assert run.all is not None
    assert 0.19 < run.all.seconds < 2
    assert run.all.num_requests > 6
    assert run.steady is not None


def test_an_open_loop_sends_all_and_counts_from_their_times() -> None:
    [run] = run_against(good, plan_of(Load(0, 500, True), num_requests=100))
    assert run.all is not None
    assert (run.load, run.all.num_requests, run.errors) == ("500 requests/s", 100, {})
    assert run.steady is not None
    assert run.client.max_late_ms >= 0
    assert run.all.latency_ms.max >= run.client.max_late_ms


def test_arrivals_are_poisson_and_come_again_with_their_seed() -> None:
    times = poisson_times(50, (1, 2), 20_000, 0)
    assert times == sorted(times) == poisson_times(50, (1, 2), 20_000, 0) != poisson_times(50, (1, 3), 20_000, 0)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.05)
    timed = poisson_times(50, (1,), 7, 100.0)
    assert len(timed) == pytest.approx(5000, rel=0.05)
    assert timed == sorted(timed)
    assert timed[0] >= 0
    assert timed[-1] <= 100


def test_failures_are_told_by_kind_and_the_others_counted() -> None:
    answers = {
        4: [plain(503, b'{"error":"loading"}')],
        5: [HEAD + chunked(EVENT), b""],
        6: [stream(NUM_TOKENS - 1)],
        7: [HEAD + chunked(b'data: {"error":{"message":"gone"}}\n\n') + b"0\r\n\r\n"],
        8: [plain(429, b"{}")],
    }
    [run] = run_against(lambda number: answers.get(number, good(number)), plan_of(Load(2, 0, True), num_rounds=5))
    assert {kind: failures.count for kind, failures in run.errors.items()} == {
        "status 503": 1,
        "connection lost": 1,
        "wrong number of tokens": 1,
        "error event": 1,
        "status 429": 1,
    }
    assert run.errors["wrong number of tokens"].example == "3 instead of 4"
    assert run.all is not None
    assert run.all.num_requests == 5


def test_a_server_that_answers_nothing_well_fails_the_measurement_at_once() -> None:
    with pytest.raises(BenchFailed, match=r"no request of the warm-up.*status 400: \{\"error\":\"no such id\"\}"):
        run_against(lambda _: [plain(400, b'{"error":"no such id"}')], plan_of(Load(3, 0, True)))


def test_health_is_probed_beside_the_load_and_long_prompts_disturb_it() -> None:
    command = ServerCommand((sys.executable, "-m", "server.bench.replay", "{port}", "20"), folder=ROOT, is_ours=False)
    with ServerProcess(command) as server:
        server.wait_ready(20)
        plan = plan_of(Load(3, 0, True), probes_health=True, disturb_tokens=64, disturb_every_s=0.02)
        [run] = measure_load(server.address, plan, server.pid)
        assert pss_bytes(server.pid) > 1 << 20
    assert run.health is not None
    assert run.health.num_good >= 3
    assert run.health.errors == {}
    assert run.disturbance is not None
    assert run.disturbance.num_good >= 3
    assert run.all is not None
    assert run.all.itl_ms is not None
    assert run.all.itl_ms.p50 > 10  # of 20 ms; busy cores may make it any longer
    assert run.memory is not None
    assert run.memory.host.max >= run.memory.host.begin > 1 << 20
    assert len(run.memory.processes) == 1
    text = format_load_report(make_load_report([run], "", "command", "", {}))
    assert "GET /health" in text
    assert "times its median" in text
    assert "host memory" in text


def test_memory_of_a_device_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 100\necho 28\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert device_bytes() == 128 << 20
    with MemoryWatch(-1, every_s=60) as watch:
        pass
    assert watch.result().device is not None
    program.write_text("#!/bin/sh\nexit 9\n")
    assert device_bytes() is None
    assert pss_bytes(1 << 30) == 0


def test_a_report_shows_medians_of_the_runs_and_is_the_same_in_json() -> None:
    runs = run_against(good, plan_of(Load(2, 0, True), Load(0, 300, True), num_repeats=3))
    report = make_load_report(runs, "", "model-server bench load", "H200", {"seed": 5})
    assert msgspec.json.decode(msgspec.json.encode(report), type=LoadReport) == report
    closed = [line for line in report.summary if line.load == "2 users"]
    assert [line.which for line in closed] == ["all", "steady"]
    middle = sorted(run.all.latency_ms.p95 for run in runs if run.users and run.all)[1]
    assert closed[0].figures is not None
    assert closed[0].figures.latency_ms.p95 == middle
    text = format_load_report(report)
    assert "H200" in text
    assert "seed 5" in text
    assert "300 requests/s, streamed: requests were sent at most" in text


def test_a_run_without_a_good_answer_is_shown_too() -> None:
    runs = run_against(
        lambda number: good(number) if number < 1 else [b""], plan_of(Load(1, 0, True), num_warmup_rounds=0)
    )
    text = format_load_report(make_load_report(runs, "", "c", "", {}))
    assert runs[0].all is None
    assert "3 x connection lost" in text
