"""What the loader does in its process, on a stand-in for a GPU, and what the master makes of its end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from server.launch import loader
from server.launch.board import Board, ExitCode, LoaderState, ModelState, Role, StopMode
from server.launch.hand_over import HandOver, send_memory
from server.launch.loader import Load, LoaderProcess
from server.ops.cuda.driver import OutOfDeviceMemory
from server.weights import device_memory
from server.weights.device_memory import DeviceStore, SumKernels
from server.weights.plan import LoadPlan
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.tiny_models import write_tiny_model


class Process:
    """The loader's work without a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.layout = open_folder(folder)
        plan = LoadPlan.make(self.checkpoint, self.layout)
        self.board = Board.create()
        self.board.model_state = ModelState.READY  # nobody waits for a model worker
        self.load = Load(plan, new_record(plan), "cuda", False, self.board, "info")
        self.hand_over, self.sender = HandOver.create()

    def run(self) -> ExitCode:
        lock_fd = self.load.record.try_lock()
        assert lock_fd is not None
        return loader._load_or_report(self.load, self.sender, lock_fd)

    def is_unlocked(self) -> bool:
        lock_fd = self.load.record.try_lock()
        if lock_fd is not None:
            os.close(lock_fd)
        return lock_fd is not None

    def stages(self) -> list[bytes]:
        return [stage.name for stage in self.board.start[Role.LOADER].rows()]

    def close(self) -> None:
        self.sender.close()
        self.hand_over.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with closing(Process(write_tiny_model(tmp_path, dtype="bfloat16"))) as process:
        yield process


def on_driver(monkeypatch: pytest.MonkeyPatch, driver: HostDriver) -> HostDriver:
    store = DeviceStore(driver, SumKernels.among(host_images()))
    monkeypatch.setattr(loader, "open_store", lambda _device: store)
    return driver


def test_everything_is_loaded_verified_and_shown(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = on_driver(monkeypatch, HostDriver())
    assert process.run() == ExitCode.STOPPED
    assert process.board.loader_state == LoaderState.LOADED
    assert process.board.bytes_loaded == process.board.bytes_total == process.load.plan.num_bytes
    assert process.load.record.is_complete
    assert process.load.record.sums is not None
    assert process.stages() == [b"context", b"allocate", b"weights", b"checksum"]
    assert process.is_unlocked()
    assert driver.calls["unmap"] == driver.calls["map_shareable"] == 1
    assert driver.calls["free_pinned"] == driver.calls["allocate_pinned"]
    fd = process.hand_over.copy_memory()
    assert fd is not None
    expected = load_on_host(process.checkpoint, process.layout).view
    assert os.pread(fd, process.layout.total_bytes, 0) == expected
    os.close(fd)


def test_memory_that_cannot_be_shared_is_left_to_the_model_workers(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_driver(monkeypatch, HostDriver(can_share_memory=False))
    assert process.run() == ExitCode.STOPPED
    assert process.board.loader_state == LoaderState.CANNOT_SHARE
    assert process.hand_over.copy_memory() is None
    assert process.is_unlocked()


def test_a_full_gpu_ends_the_service_for_good(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "FREE_MEMORY_DEADLINE_S", 0.0)
    driver = on_driver(monkeypatch, HostDriver())
    driver.fail_at(1, OutOfDeviceMemory("create", 2, "CUDA_ERROR_OUT_OF_MEMORY"), method="create_shareable")
    assert process.run() == ExitCode.PERMANENT
    assert process.board.halt_code == ExitCode.PERMANENT
    assert b"is full: the weights need" in process.board.halt_reason


def test_an_error_of_the_device_is_left_to_whoever_takes_over(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = on_driver(monkeypatch, HostDriver())
    driver.fail_at(1, method="copy_to_device_async")
    assert process.run() == ExitCode.ENGINE_FAILED
    assert not process.board.halt_code
    assert b"CUDA_ERROR_LAUNCH_FAILED" in process.board.loader_failure
    assert not process.load.record.is_complete


@pytest.mark.parametrize(
    ("end", "after_ready", "expected_s"),
    [("ready", False, 1), ("stop", False, 1), ("never", False, loader.KEEP_CONTEXT_S), ("stop", True, 1)],
)
def test_the_context_is_kept_until_it_is_of_no_more_use(
    end: str, after_ready: bool, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board.create()
    begin, now = 1000.0, [1000.0]
    if after_ready:
        board.model_state = ModelState.READY

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= begin + 1:
            board.model_state = ModelState.READY if end == "ready" else board.model_state
            board.stop = StopMode.DRAIN if end == "stop" else StopMode.NONE

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    loader._keep_context(board, after_ready=after_ready)
    assert expected_s <= now[0] - begin < expected_s + 0.5


def ended_child(signal_number: int) -> int:
    """A child that has just been killed and not been waited for."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {})
    os.kill(pid, signal_number)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


@pytest.mark.parametrize("has_memory", [False, True])
def test_an_early_end_ends_the_service_only_if_there_is_no_memory(process: Process, has_memory: bool) -> None:
    if has_memory:
        fd = os.memfd_create("memory")
        send_memory(process.sender, fd)
        os.close(fd)
    LoaderProcess(ended_child(signal.SIGKILL), process.hand_over, process.load).take_status()
    reason = process.board.loader_failure if has_memory else process.board.halt_reason
    assert process.board.halt_code == (0 if has_memory else ExitCode.ENGINE_FAILED)
    assert reason == b"the loader was killed by signal 9 before it had finished"


def test_what_a_loader_said_itself_is_the_reason_of_the_end(process: Process) -> None:
    process.board.note_loader_failure("the loader was killed after 2.6 s of silence")
    LoaderProcess(ended_child(signal.SIGKILL), process.hand_over, process.load).take_status()
    assert process.board.halt_reason == b"the loader was killed after 2.6 s of silence"


def test_nobody_is_said_to_take_over_when_the_loader_has_ended_the_service(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    fd = os.memfd_create("memory")
    send_memory(process.sender, fd)
    os.close(fd)
    process.board.halt(ExitCode.PERMANENT, "a tensor is damaged")
    LoaderProcess(ended_child(signal.SIGKILL), process.hand_over, process.load).take_status()
    assert caplog.messages == []
    assert process.board.halt_reason == b"a tensor is damaged"


def test_an_end_after_the_work_is_no_failure(process: Process) -> None:
    process.load.record.mark_complete()
    child = LoaderProcess(ended_child(signal.SIGKILL), process.hand_over, process.load)
    child.take_status()
    child.take_status()
    assert not process.board.halt_code
    assert not process.board.loader_failure


def test_a_status_that_somebody_else_took_is_still_an_end(process: Process) -> None:
    pid = ended_child(signal.SIGKILL)
    os.waitpid(pid, 0)
    LoaderProcess(pid, process.hand_over, process.load).take_status()
    assert process.board.halt_reason == b"the loader ended before it had finished"
