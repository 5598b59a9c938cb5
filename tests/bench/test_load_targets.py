"""Targets are held against the loads that they are for, and only on the machine and backend that they are for."""

from dataclasses import replace

from msgspec.structs import replace as changed

from server.bench.load import ClientShare, LoadPlan, LoadRun
from server.bench.load_figures import Failures, Figures, Spread
from server.bench.load_probes import Probes
from server.bench.load_report import compare_with_targets, format_load_report, make_load_report
from server.bench.load_requests import Shape
from server.bench.load_targets import Comparison, targets_hold
from server.bench.server_memory import Extent, Memory

USUAL = LoadPlan((), Shape(128, 128), range(300, 4000))
DISTURBED = replace(USUAL, disturb_tokens=4000)


def run_of(
    users: int, p50: float, tokens_per_s: float, *, rate: float = 0.0, is_stream: bool = True, tail: float = 2.0,
    disturbance: Probes | None = None,
) -> LoadRun:  # fmt: skip
    spread = Spread(p50, p50 + 10, p50 + 10, p50 + 20)
    figures = Figures(10, 1.0, tokens_per_s, 10.0, spread, spread if is_stream else None, spread, tail)
    return LoadRun(
        load=f"{users} users" if users else f"{rate:g} requests/s",
        users=users,
        rate=rate,
        is_stream=is_stream,
        repeat=0,
        all=figures,
        steady=None,
        errors={},
        client=ClientShare(0.1, 10.0, 0.0),
        memory=Memory(Extent(1, 7 * 10**9, 1), None, {}),
        health=Probes(5, Spread(1, 2, 9, 10), {}),
        disturbance=disturbance,
    )


def verdicts(comparisons: list[Comparison]) -> dict[tuple[str, bool, str], bool]:
    return {(one.load, one.is_stream, one.measure): one.met for one in comparisons}


def test_each_measure_has_its_target() -> None:
    runs = [run_of(100, 845, 15_100), run_of(100, 800, 16_000, is_stream=False), run_of(0, 30, 1, rate=60.0)]
    found = verdicts(compare_with_targets(runs, USUAL))
    assert found["100 users", True, "P50 ms"]
    assert found["100 users", True, "P95 ms"]
    assert found["100 users", True, "tokens/s"]
    assert not found["100 users", True, "tokens/s streamed / whole"]
    assert not found["60 requests/s", True, "TTFT P95 ms"]
    assert found["60 requests/s", True, "GET /health P99 ms"]
    assert not found["60 requests/s", True, "host memory GB"]
    assert not any(measure == "ITL P99 / median, long prompts" for _, _, measure in found)


def test_medians_of_the_runs_are_compared() -> None:
    runs = [run_of(1, p50, rate) for p50, rate in ((500, 100), (540, 240), (900, 250))]
    [p50] = [one for one in compare_with_targets(runs, USUAL) if one.measure == "P50 ms"]
    assert (p50.value, p50.target, p50.peer, p50.met) == (540, 550, 613, True)


def test_other_lengths_and_numbers_have_no_targets_of_latency() -> None:
    latency = {"P50 ms", "P95 ms", "tokens/s"}
    assert not latency & {
        one.measure for one in compare_with_targets([run_of(32, 1, 1)], replace(USUAL, shape=Shape(128, 64)))
    }
    assert not latency & {one.measure for one in compare_with_targets([run_of(33, 1, 1)], USUAL)}


def test_long_prompts_are_judged_by_the_gaps_of_the_streams() -> None:
    runs = [run_of(32, 700, 5_000, tail=3.5, disturbance=Probes(3, None, {}))]
    found = verdicts(compare_with_targets(runs, DISTURBED))
    assert not found["32 users", True, "ITL P99 / median, long prompts"]
    assert ("32 users", True, "P50 ms") not in found


def test_what_failed_meets_no_target() -> None:
    refused = {"status 422": Failures(9, "too long")}
    run = run_of(32, 600, 6_000, tail=1.1, disturbance=Probes(0, None, refused))
    run = changed(run, errors={"status 429": Failures(2, "")}, health=Probes(1, Spread(1, 2, 3, 4), refused))
    [errors] = [one for one in compare_with_targets([run], DISTURBED) if one.measure == "errors"]
    assert (errors.value, errors.met) == (20, False)
    found = verdicts(compare_with_targets([run], DISTURBED))
    assert ("32 users", True, "ITL P99 / median, long prompts") not in found
    assert verdicts(compare_with_targets([run_of(32, 600, 6_000)], USUAL))["32 users", True, "errors"]


def test_users_that_begin_one_after_the_other_have_no_targets() -> None:
    found = verdicts(compare_with_targets([run_of(32, 600, 6_000)], replace(USUAL, spreads_start=True)))
    assert ("32 users", True, "P50 ms") not in found


def test_targets_hold_on_one_machine_and_are_shown_with_the_peer() -> None:
    assert targets_hold("NVIDIA H200", "cuda")
    assert not targets_hold("NVIDIA H200", "torch")
    assert not targets_hold("", "torch")
    runs = [run_of(256, 1_800, 19_000)]
    text = format_load_report(make_load_report(runs, "", "c", "NVIDIA H200", {}, compare_with_targets(runs, USUAL)))
    [line] = [line for line in text.splitlines() if "P50 ms" in line]
    assert line.split() == ["256", "users", "streamed", "P50", "ms", "1800.0", "1750.0", "2046.0", "MISSED"]
    assert "vLLM" not in format_load_report(make_load_report(runs, "", "c", "", {}))
