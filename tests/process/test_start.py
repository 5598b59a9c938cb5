"""The start: its order, its refusals, and what lives beside it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.launch.board import LoaderState, ModelState, Role
from tests.process.conftest import StartService
from tests.process.harness import TokenStream, children, has_mapped, num_threads
from tests.process.held_file import start_with_waiting_loader

_LIBRARY = "libtorch_cpu"


def test_every_fork_is_safe_and_only_the_heavy_side_holds_torch(start: StartService) -> None:
    service = start(server__web_workers=2).wait_ready()
    board = service.board()
    webs = service.web_workers()
    assert len(webs) == 2
    for light in (service.pid, *webs):
        assert not has_mapped(light, _LIBRARY)
    assert has_mapped(board.arbiter_pid, _LIBRARY)
    assert num_threads(service.pid) == num_threads(board.arbiter_pid) == 1
    assert sorted(service.processes()) == sorted([service.pid, board.arbiter_pid, board.model_pid, *webs])

    for pid in (board.model_pid, webs[0], board.arbiter_pid):
        os.kill(pid, signal.SIGKILL)
    service.wait_for(lambda board: board.num_engine_starts == 2, "a second engine")
    service.wait_for(lambda _: len(service.web_workers()) == 2, "a second web worker")
    after = service.board()
    assert after.num_forks >= board.num_forks + 3
    assert after.num_bad_forks == 0
    assert "unsafe fork" not in service.log


def test_health_is_ready_only_after_a_token_of_the_real_model(start: StartService) -> None:
    service = start()
    service.wait_for(lambda board: board.port > 0, "a bound port")
    seen: list[int] = []
    while not seen or seen[-1] != 200:
        status = service.get("/health")
        if status is not None:
            seen.append(status)
        if status == 200:
            assert service.board().model_state == ModelState.READY
        assert service.is_alive, service.log
        assert time.monotonic() - service.started_at < 60
    assert set(seen) <= {200, 503}
    assert TokenStream(service, 3).start().finish().is_complete


def test_the_timeline_names_the_stages_of_every_role(start: StartService) -> None:
    service = start().wait_ready()
    board = service.board()
    stages = {(stage.role.decode(), stage.name.decode()) for stage in board.timeline() if stage.end >= stage.begin > 0}
    assert {role for role, _ in stages} == {role.name.lower() for role in Role}
    assert ("loader", "weights") in stages
    assert board.started_at == min(stage.begin for stage in board.timeline())
    assert board.loader_state == LoaderState.LOADED
    assert board.bytes_loaded == board.bytes_total > 0


def test_two_instances_do_not_notice_each_other(start: StartService) -> None:
    first = start().wait_ready()
    stream = TokenStream(first, 800).start().wait_for_tokens(1)
    before = sorted(first.processes())
    second = start().wait_ready()
    same_folder = start(runtime_dir=first.runtime_dir)
    address = first.address()
    assert address is not None
    same_port = start(server__port=address[1])
    assert same_folder.end().exit_code == 4
    assert "in use by another instance" in same_folder.log
    assert same_port.end().exit_code == 4
    assert f"port {address[1]}" in same_port.log
    for refused in (same_folder, same_port):
        assert "Traceback" not in refused.log
    assert second.end(signal.SIGTERM).exit_code == 0
    assert stream.finish().is_complete
    assert sorted(first.processes()) == before
    assert first.address() == address


def test_a_killed_master_s_leftovers_do_not_hinder_the_next_start(start: StartService) -> None:
    service = start().wait_ready()
    address = service.address()
    assert address is not None
    stream = TokenStream(service, 5000).start().wait_for_tokens(1)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pid_file = next(service.runtime_dir.glob("gunicorn-dirty-*.pid"))
        os.kill(service.pid, signal.SIGKILL)
        pid_file.write_text(str(bystander.pid))  # by now somebody else may have the old number
        again = start(runtime_dir=service.runtime_dir, server__port=address[1]).wait_ready()
        assert bystander.poll() is None
        assert service.end().survivors == ()
        assert again.address() == address
        assert not stream.finish().is_complete
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({"model.path": "/nowhere/at/all"}, {}, "/nowhere/at/all"),
        ({"engine.backend": "cuda"}, {}, "engine.backend"),
        ({}, {"MODEL_SERVER_SERVER__PROT": "8000"}, "MODEL_SERVER_SERVER__PROT"),
        ({}, {"MODEL_SERVER_PROFILE": "demmo"}, "demmo"),
        ({"server.host": "203.0.113.7"}, {}, "203.0.113.7"),
        ({"server.host": "two..dots"}, {}, "two..dots"),
        ({"kv.pool_mib": 1 << 40}, {}, "kv.pool_mib"),
        ({"server.runtime_dir": "/proc/nowhere"}, {}, "/proc/nowhere"),
        ({"server.runtime_dir": "/tmp"}, {}, "writable by nobody else"),
        ({"server.runtime_dir": "/tmp/" + "x" * 90}, {}, "too long"),
    ],
)
def test_a_permanent_fault_is_one_line_and_exit_code_4(
    start: StartService, settings: dict[str, object], environ: dict[str, str], expected: str
) -> None:
    service = start(environ=environ, **{key.replace(".", "__"): value for key, value in settings.items()})
    ended = service.end()
    assert ended.exit_code == 4, service.log
    assert ended.survivors == ()
    assert ended.files == ()
    lines = [line for line in service.log.splitlines() if "cannot start" in line]
    assert len(lines) == 1
    assert expected in lines[0]
    assert "Traceback" not in service.log


def test_a_broken_tokenizer_ends_the_start_with_exit_code_4(start: StartService, tiny_model: Path) -> None:
    service = start()
    service.kill_all()
    broken = service.folder / "m"
    broken.mkdir()
    for file in tiny_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "tokenizer.json").write_text("{")
    service = start(model__path=str(broken))
    ended = service.end()
    assert ended.exit_code == 4, service.log
    assert (ended.survivors, ended.files) == ((), ())
    assert "tokenizer" in service.log
    assert "Traceback" not in service.log


def test_systemd_hears_ready_from_the_master_when_the_engine_is(start: StartService, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        systemd.settimeout(60)
        service = start(environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        said: list[str] = []
        while not said or not said[-1].startswith("READY=1"):
            data, ancillary, _, _ = systemd.recvmsg(4096, socket.CMSG_SPACE(12))
            said.append(data.decode())
            assert int.from_bytes(ancillary[0][2][:4], sys.byteorder) == service.pid
        assert service.board().model_state == ModelState.READY
        assert all(message.startswith("STATUS=") for message in said[:-1])
        assert "STATUS=ready" in said[-1]
        service.end(signal.SIGTERM)
        assert systemd.recv(4096) == b"STOPPING=1"


def test_checking_the_configuration_claims_nothing(start: StartService) -> None:
    service = start(arguments=("--check-config",))
    assert service.end().exit_code == 0, service.log
    assert not service.runtime_dir.exists()


def test_a_slow_load_is_not_mistaken_for_a_hang(start: StartService, slow_model: Path) -> None:
    service, file = start_with_waiting_loader(start, slow_model, server__worker_timeout_s=3, engine__watchdog_s=0)
    service.wait_for(lambda board: board.model_state == ModelState.STARTING, "a model worker that waits")
    time.sleep(6.5)  # more than twice the limit after which a silent web or model worker is replaced
    assert service.get("/health") == 503
    file.close()
    service.wait_ready()
    assert "TIMEOUT" not in service.log
    assert service.board().num_engine_starts == 1


def test_a_start_without_progress_ends_with_the_reason(start: StartService, slow_model: Path) -> None:
    service, file = start_with_waiting_loader(start, slow_model, engine__load_deadline_s=1)
    ended = service.end()
    file.close()
    assert ended.exit_code == 3
    assert (ended.survivors, ended.files) == ((), ())
    assert "engine.load_deadline_s" in service.log


def test_a_loader_killed_before_it_has_memory_ends_the_start(start: StartService, slow_model: Path) -> None:
    service = start(model__path=str(slow_model))
    while not (loaders := children(service.pid)):
        assert service.is_alive, service.log
    os.kill(loaders[0], signal.SIGKILL)
    ended = service.end()
    assert ended.exit_code == 3, service.log
    assert (ended.survivors, ended.files) == ((), ())
    assert "the loader was killed by signal 9" in service.log
    assert "Traceback" not in service.log
