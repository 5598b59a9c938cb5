"""`model-server bench startup` on the real server: one run of each kind, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from server.bench.server_process import living_members
from tests.process.harness import ROOT, children

OTHER_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def bench(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from server.cli.main import app; app()", "bench", "startup", *arguments]


def run_bench(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The report and what was printed."""
    file = tmp_path / "report.json"
    command = bench("--json", str(file), "--runs", "1", *arguments)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(file.read_text()), result.stdout


def test_starts_and_first_requests_are_measured(tmp_path: Path, tiny_model: Path) -> None:
    report, text = run_bench(
        tmp_path, "--profile", "test", "--model", str(tiny_model), "--what", "warm,first-ever,requests"
    )
    assert report["failures"] == {}
    warm, first_ever, requests = report["runs"]
    for run in (warm, first_ever):
        values = run["values"]
        assert run["notes"]["resident_before"] == 1
        assert 0 < values["first_health"] <= values["health_200"]
        assert values["own_ready"] <= values["answer"]
        assert run["startup"]["ready_s"] == values["own_ready"]
    assert requests["values"]["difference"] == pytest.approx(
        requests["values"]["first"] - requests["values"]["hundredth"]
    )
    assert "everyone waited for it" in text
    assert "first token" in text


def test_kills_are_measured_at_streams_that_lose_nothing(tmp_path: Path, tiny_model: Path) -> None:
    kinds = ("kill", "kill-many", "kill-arbiter")
    report, text = run_bench(
        tmp_path, "--profile", "test", "--model", str(tiny_model), "--what", ",".join(kinds), "--streams", "4"
    )
    assert report["failures"] == {}
    assert [run["kind"] for run in report["runs"]] == list(kinds)
    one, many, arbiter = report["runs"]
    assert one["values"]["pause"] > 0
    assert many["notes"]["num_streams"] == many["notes"]["num_running_at_kill"] == 4
    assert many["values"]["last_pause"] >= many["values"]["first_pause"] > 0
    assert arbiter["values"]["pause"] >= arbiter["startup"]["restarts"]["arbiter"]["down_s"]
    assert "dying" in text


def test_another_server_is_measured_in_the_same_way_also_cold(tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(OTHER_SERVER)
    command = f"{sys.executable} {script} {{port}}"
    # Beside this file: the temporary folder may be memory, which cannot be cold.
    with tempfile.TemporaryDirectory(prefix=".files-", dir=Path(__file__).parent) as files:
        (Path(files) / "weights").write_bytes(os.urandom(8 << 20))
        report, _ = run_bench(tmp_path, "--command", command, "--files", files, "--what", "warm,cold", "--body", "{}")
    warm, cold, after = report["runs"]
    assert [run["kind"] for run in (warm, cold, after)] == ["warm", "cold", "warm after cold"]
    assert (warm["notes"]["resident_before"], cold["notes"]["resident_before"]) == (1, 0)
    assert cold["values"]["times_floor"] == pytest.approx(cold["values"]["answer"] / cold["values"]["disk_floor"])
    for run in report["runs"]:
        assert run["values"]["answer"] > 0
        assert "health_200" not in run["values"]
        assert run["startup"] is None


def obey_signals() -> None:
    """In the child: whoever runs tests in the background may have had SIGINT or SIGHUP ignored (nohup), and a child
    inherits that."""
    for signal_number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_DFL)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_is_stopped_takes_its_server_with_it(tiny_model: Path, signal_number: int) -> None:
    command = bench("--profile", "test", "--model", str(tiny_model), "--what", "warm")
    with (
        tempfile.TemporaryDirectory(prefix="t-") as folder,  # a killed bench leaves its folder
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=obey_signals,
        ) as process,
    ):
        while not (servers := children(process.pid)) or not children(servers[0]):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal_number)
        assert process.wait(20) != 0
    deadline = time.monotonic() + 3
    while living := living_members(servers[0]):
        assert time.monotonic() < deadline, living


def test_a_report_that_cannot_be_written_is_shown_all_the_same(tiny_model: Path) -> None:
    arguments = (
        "--profile",
        "test",
        "--model",
        str(tiny_model),
        "--what",
        "warm",
        "--runs",
        "1",
        "--json",
        "/dev/full",
    )
    result = subprocess.run(bench(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert "everyone waited for it" in result.stdout
    assert result.stderr == "model-server: --json /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--what", "lukewarm"], "there are warm, cold"),
        (["--command", "x", "--what", "kill"], "with --command there are warm and cold"),
        (["--command", "x", "--what", "warm"], "--files is needed"),
        (["--body", "[]"], "must be a JSON object"),
        (["--set", "nonsense"], "SECTION.FIELD=VALUE"),
        (["--json", "/nowhere/report.json"], "there is no folder /nowhere"),
    ],
)
def test_arguments_without_sense_are_refused_in_one_line(arguments: list[str], reason: str) -> None:
    result = subprocess.run(bench(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 4
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
