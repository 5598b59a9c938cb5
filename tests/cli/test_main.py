"""The command as a process: how it ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_command_leaves_nothing_behind(tmp_path: Path, signal_number: int, exit_code: int) -> None:
    run = "from server.cli.main import app; app()"
    command = [sys.executable, "-c", run, "make-model", "llama3-8b", str(tmp_path / "model")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".model.partial-*/*.safetensors")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal_number)
        assert process.wait(30) == exit_code
    assert list(tmp_path.iterdir()) == []
