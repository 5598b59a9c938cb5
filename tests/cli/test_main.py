"""The command as a process: how it ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def obey_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_command_leaves_nothing_behind(tmp_path: Path, signal_number: int, exit_code: int) -> None:
    run = "from server.cli.main import app; app()"
    command = [sys.executable, "-c", run, "make-model", "llama3-8b", str(tmp_path / "model")]
    # A test run started in the background ignores SIGINT, and a child would inherit that.
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=obey_sigint) as process:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".model.partial-*/*.safetensors")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal_number)
        assert process.wait(30) == exit_code
    assert list(tmp_path.iterdir()) == []
