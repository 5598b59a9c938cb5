"""`model-server bench load` on the real server with the demo model, and on none: one short run, and nothing left."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.bench.server_process import living_members
from tests.process.harness import ROOT, children


def bench(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from server.cli.main import app; app()", "bench", "load", *arguments]


def test_the_demo_model_is_measured_with_streams_and_without(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = (
        *("--users", "1,4", "--rate", "20", "--rounds", "2", "--requests", "6", "--repeat", "1"),
        *("--input-tokens", "24", "--shared-prefix", "16", "--output-tokens", "6", "--answers", "streamed,whole"),
        *("--probe-health", "--disturb-tokens", "64", "--disturb-every", "0.05", "--seed", "3", "--json", str(file)),
    )
    result = subprocess.run(bench(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    assert report["failure"] == ""
    assert report["conditions"]["token ids"] == "0:4093"
    assert report["conditions"]["model"] == "demo"
    assert [(run["load"], run["is_stream"]) for run in report["runs"]] == [
        (load, is_stream) for load in ("1 user", "4 users", "20 requests/s") for is_stream in (True, False)
    ]
    for run in report["runs"]:
        assert run["errors"] == {}
        assert run["all"]["num_requests"] == (2 * run["users"] or 6)
        assert run["memory"]["host"]["max"] > 50 << 20
        assert run["health"]["num_good"] > 0
        assert run["health"]["errors"] == {}
        if run["is_stream"]:
            assert 0 < run["all"]["ttft_ms"]["p50"] <= run["all"]["latency_ms"]["p50"]
        else:
            assert run["all"]["ttft_ms"] is None
    assert "TTFT P50" in result.stdout


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_load_that_is_stopped_takes_its_server_with_it(tiny_model: Path, signal_number: int) -> None:
    # Many short runs: the first that is reported says that the next one has begun.
    many = ("--rounds", "1", "--repeat", "100000", "--output-tokens", "16")
    command = bench("--profile", "test", "--model", str(tiny_model), "--users", "2", *many)
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=obey_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("2 users, streamed, run 1: 2 requests")
        [server] = children(process.pid)
        process.send_signal(signal_number)
        process.stdout.read()
        assert process.wait(20) != 0
    deadline = time.monotonic() + 3
    while living := living_members(server):
        assert time.monotonic() < deadline, living


def obey_interrupts() -> None:
    """In the child: whoever runs tests in the background may have had SIGINT ignored, and a child inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_load_arguments_without_sense_are_refused_in_one_line() -> None:
    result = subprocess.run(bench("--users", "x"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4, result.stdout + result.stderr
    assert result.stderr == "model-server: --users x: numbers of at least 1 are expected, separated by commas\n"


def test_a_load_with_errors_ends_with_exit_code_1(tiny_model: Path) -> None:
    arguments = ("--profile", "test", "--model", str(tiny_model), "--token-ids", "99999:100000", "--users", "1")
    result = subprocess.run(bench(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "no request of the warm-up was answered well; the first: status 400" in result.stdout
