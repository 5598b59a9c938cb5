"""No process of a server under test outlives its measurement."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.bench.server_process import (
    BenchFailed,
    ServerCommand,
    ServerProcess,
    living_members,
    path_without_compilers,
)

FORKING_SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "deaf" else signal.SIG_DFL)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child of", sys.argv[2], flush=True)
time.sleep(600)
"""


# The main thread ends by itself (system call exit of x86-64 and arm64), the other one goes on.
LEADER_THAT_ENDS_FIRST = """
import ctypes, platform, sys, threading, time
threading.Thread(target=sys.stdin.readline).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def forking(manner: str) -> ServerCommand:
    return ServerCommand((sys.executable, "-c", FORKING_SERVER, manner, "{port}"), is_ours=False)


def wait_for_fork(server: ServerProcess) -> None:
    deadline = time.monotonic() + 30
    while len(living_members(server.pid)) < 2:
        server.check_alive()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADER_THAT_ENDS_FIRST], stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 30
        while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert living_members(process.pid) == [process.pid]
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        while living_members(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert process.returncode is None  # nobody has taken its end yet: a zombie of no threads is dead


def test_children_that_ignore_the_stop_are_killed() -> None:
    with ServerProcess(forking("polite")) as server:
        wait_for_fork(server)
        pid = server.pid
    assert living_members(pid) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_a_failure_or_ctrl_c_nothing_is_asked_and_nothing_lives(error: type[BaseException]) -> None:
    pids = []

    def fail() -> None:
        with ServerProcess(forking("deaf")) as server:
            wait_for_fork(server)
            pids.append(server.pid)
            raise error

    with pytest.raises(error):
        fail()
    assert living_members(pids[0]) == []


def reason_of(command: ServerCommand) -> str:
    """What is said of a server that ends by itself."""
    with ServerProcess(command) as server:
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        try:
            server.check_alive()
        except BenchFailed as failure:
            return str(failure).replace(str(server.address[1]), "PORT")
    raise AssertionError("it was taken for alive")


def test_a_server_that_ends_by_itself_shows_its_last_lines() -> None:
    command = ServerCommand((sys.executable, "-c", "import sys; sys.exit('the reason')"), is_ours=False)
    assert reason_of(command) == "the server ended with exit code 1; its last lines:\n  the reason"


def test_our_server_gets_a_port_and_a_folder_of_its_own_and_foreign_variables_stay_out() -> None:
    show = "import os, sys; sys.exit(os.environ['MODEL_SERVER_OVERRIDES'] + os.environ.get('CC', 'no CC'))"
    command = ServerCommand((sys.executable, "-c", show), overrides={"server.port": 1, "model.path": "m"})
    text = reason_of(command.with_environ({"CC": ""}))
    assert '"server.port": PORT' in text
    assert '"model.path": "m"' in text
    assert "no CC" in text


def test_a_path_without_compilers_holds_everything_else(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gcc", "gcc-12", "x86_64-linux-gnu-gcc-12", "cc", "clang++-15", "python3", "accept", "gccgo.txt"):
        (programs / name).touch()
    clean = tmp_path / "clean"
    clean.mkdir()
    path = path_without_compilers(f"{programs}:{clean}:/does/not/exist", tmp_path / "links")
    first, second = path.split(":")
    assert {entry.name for entry in Path(first).iterdir()} == {"python3", "accept", "gccgo.txt"}
    assert second == str(clean)
    assert (programs / "gcc").exists()
