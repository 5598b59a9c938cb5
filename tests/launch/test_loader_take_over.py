"""Whatever becomes of the loader, the model worker gets right weights, or the service ends with the reason."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from server.engine import weights
from server.engine.weights import wait_for_weights
from server.errors import EngineDead, StartupError
from server.launch.board import Board, ExitCode, LoaderState, StopMode
from server.launch.hand_over import HandOver, send_memory
from server.launch.service import Service
from server.weights import device_memory
from server.weights.device_memory import DeviceMemory, DeviceStore, SumKernels
from server.weights.fill import complete_load
from server.weights.memory import HostMemory, HostStore, WeightMemory, WeightStore
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.tiny_models import write_tiny_model

CHUNK_BYTES = 4096


class Start:
    """A service up to the hand-over, with the test in the loader's place: it holds the lock."""

    def __init__(self, folder: Path, store: WeightStore) -> None:
        checkpoint, self.layout = open_folder(folder)
        self.plan = LoadPlan.make(checkpoint, self.layout, CHUNK_BYTES)
        self.record: LoadRecord = new_record(self.plan)
        self.board = Board.create()
        self.board.master_pid = os.getpid()
        self.board.loader_state = LoaderState.LOADING
        self.board.loader_beat = time.monotonic()
        self.store = store
        self.hand_over, self.loader_end = HandOver.create()
        self.expected = load_on_host(checkpoint, self.layout).view.tobytes()
        lock_fd = self.record.try_lock()
        assert lock_fd is not None
        self.lock_fd = lock_fd
        self.record.count_attempt()
        self.fd = store.create(self.layout.total_bytes)

    @property
    def service(self) -> Service:
        return cast(
            Service,
            SimpleNamespace(
                board=self.board,
                layout=self.layout,
                load_plan=self.plan,
                load_record=self.record,
                hand_over=self.hand_over,
            ),
        )

    def send(self) -> "Start":
        send_memory(self.loader_end, self.fd)
        return self

    def load(self, stop_after: int | None = None) -> "Start":
        """As the loader does; or only some chunks."""

        def on_progress(num_bytes: int) -> None:
            if stop_after is not None and num_bytes > stop_after:
                raise InterruptedError

        memory = self.store.map_writable(self.fd, self.layout.total_bytes)
        try:
            complete_load(self.plan, memory, self.record, on_progress)
            self.board.loader_state = LoaderState.LOADED
        except InterruptedError:
            assert stop_after is not None
        memory.close()
        return self

    def let_go(self) -> "Start":
        """The loader is gone."""
        self.loader_end.close()
        os.close(self.lock_fd)
        return self

    def close(self) -> None:
        """The sockets; the memory goes with its last mapping."""
        self.loader_end.close()
        self.hand_over.close()

    def wait(self) -> WeightMemory:
        return wait_for_weights(self.service, self.store)

    def is_right(self, memory: WeightMemory) -> bool:
        if isinstance(memory, HostMemory):
            assert memory.view.readonly
            return memory.view == self.expected
        assert isinstance(memory, DeviceMemory)
        return os.pread(self.fd, self.layout.total_bytes, 0) == self.expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", CHUNK_BYTES)
    return HostDriver()


@pytest.fixture(params=["host", "device"])
def start(request: pytest.FixtureRequest, folder: Path, driver: HostDriver) -> Iterator[Start]:
    store = HostStore() if request.param == "host" else DeviceStore(driver, SumKernels.among(host_images()))
    with closing(Start(folder, store)) as start:
        yield start


@pytest.fixture
def on_device(folder: Path, driver: HostDriver) -> Iterator[Start]:
    with closing(Start(folder, DeviceStore(driver, SumKernels.among(host_images())))) as start:
        yield start


@pytest.fixture
def of_own_model(tmp_path: Path) -> Iterator[Start]:
    """Its files may be damaged."""
    with closing(Start(write_tiny_model(tmp_path), HostStore())) as start:
        yield start


def test_a_loaded_memory_is_mapped_read_only(start: Start) -> None:
    start.send().load().let_go()
    assert start.is_right(start.wait())
    assert start.record.count_attempt() == 1, "nothing was loaded a second time"


def wait_in_a_thread(start: Start) -> threading.Thread:
    """As the engine thread does."""

    def wait() -> None:
        if isinstance(start.store, DeviceStore):
            start.store.driver.attach_thread()
        start.wait()

    waiting = threading.Thread(target=wait)
    waiting.start()
    return waiting


def test_the_model_worker_waits_while_the_loader_works(start: Start) -> None:
    waiting = wait_in_a_thread(start)
    start.send()
    start.board.loader_beat = time.monotonic()
    waiting.join(0.05)
    assert waiting.is_alive()
    start.load()
    waiting.join(5)
    assert not waiting.is_alive()
    start.let_go()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_dead_loaders_work_is_finished(start: Start, share: float) -> None:
    start.send().load(stop_after=int(share * start.plan.num_bytes)).let_go()
    num_missing = len(start.record.missing())
    assert 0 < num_missing <= len(start.plan.chunks)
    assert start.is_right(start.wait())
    assert start.board.loader_state == LoaderState.LOADED
    assert start.board.bytes_loaded == start.plan.num_bytes
    assert not start.board.loader_failure
    assert not start.board.halt_code


def test_a_loader_that_died_after_the_last_chunk_leaves_only_the_sums_to_do(on_device: Start) -> None:
    memory = on_device.store.map_writable(on_device.fd, on_device.layout.total_bytes)
    complete_load(on_device.plan, memory, unsummed := new_record(on_device.plan), lambda _: None)
    for number in range(len(on_device.plan.chunks)):
        on_device.record.mark_arrived(number)
    on_device.send().let_go()
    assert on_device.is_right(on_device.wait())
    assert on_device.record.sums == unsummed.sums


def test_a_loader_that_died_before_it_said_so_needs_no_successor(start: Start) -> None:
    start.send().load()
    start.board.loader_state = LoaderState.LOADING
    start.let_go()
    assert start.is_right(start.wait())
    assert start.board.loader_state == LoaderState.LOADED
    assert start.record.count_attempt() == 1


@pytest.fixture
def silent_loader(start: Start) -> Iterator[int]:
    """A stopped process that holds the lock."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, start.lock_fd, 100)])
    os.kill(pid, signal.SIGSTOP)
    start.board.loader_pid = pid
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_silent_loader_is_killed_and_its_work_finished(start: Start, silent_loader: int) -> None:
    start.send().load(stop_after=start.plan.num_bytes // 2).let_go()
    start.board.loader_beat = time.monotonic() - weights.LOADER_SILENCE_S - 0.1
    assert start.is_right(start.wait())
    ended = os.waitid(os.P_PID, silent_loader, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_status == signal.SIGKILL


def test_a_loader_that_beats_is_left_alone(start: Start, silent_loader: int) -> None:
    start.send().let_go()
    start.board.loader_beat = time.monotonic() + 60  # whatever this machine is doing
    failures: list[Exception] = []

    def wait() -> None:
        try:
            start.wait()
        except EngineDead as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    start.board.stop = StopMode.QUICK
    waiting.join(5)
    assert len(failures) == 1
    assert os.waitid(os.P_PID, silent_loader, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def test_two_failures_end_the_service_with_both_reasons(on_device: Start) -> None:
    assert isinstance(on_device.store, DeviceStore)
    driver = cast(HostDriver, on_device.store.driver)
    on_device.send().load(stop_after=on_device.plan.num_bytes // 2).let_go()
    on_device.board.note_loader_failure("the loader was killed by signal 11 before it had finished")
    driver.fail_at(3, method="copy_to_device_async")
    with pytest.raises(EngineDead):
        on_device.wait()
    reason = on_device.board.halt_reason.decode()
    assert on_device.board.halt_code == ExitCode.ENGINE_FAILED
    assert "in 2 attempts" in reason
    assert "killed by signal 11" in reason
    assert "taking over failed too" in reason
    assert "CUDA_ERROR_LAUNCH_FAILED" in reason


def test_a_model_worker_that_died_while_it_took_over_is_the_second_failure(start: Start) -> None:
    start.send().load(stop_after=start.plan.num_bytes // 2).let_go()
    start.record.count_attempt()  # its last deed
    with pytest.raises(EngineDead):
        start.wait()
    assert start.board.halt_code == ExitCode.ENGINE_FAILED
    assert b"took over died" in start.board.halt_reason


def test_a_fault_of_the_files_is_nobodys_second_attempt(tmp_path: Path, of_own_model: Start) -> None:
    start = of_own_model.send().let_go()
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(StartupError, match=r"model.safetensors: was changed since it was verified"):
        start.wait()
    assert not start.board.halt_code, "the model worker's edge writes it, with exit code 4"


def test_a_checkpoint_that_has_vanished_does_not_matter_to_loaded_weights(tmp_path: Path, of_own_model: Start) -> None:
    start = of_own_model.send().load().let_go()
    (tmp_path / "model.safetensors").unlink()
    assert start.is_right(start.wait())
    assert start.is_right(start.wait()), "nor to the next model worker"


def test_a_loader_gone_before_the_hand_over_leaves_nothing_to_finish(start: Start) -> None:
    start.let_go()
    with pytest.raises(EngineDead, match="before it had allocated memory"):
        start.wait()


@pytest.mark.parametrize("halted", [False, True])
def test_a_service_that_stops_is_not_waited_for(start: Start, halted: bool) -> None:
    if halted:
        start.board.halt(ExitCode.PERMANENT, "a broken file")
    else:
        start.board.stop = StopMode.DRAIN
    with pytest.raises(EngineDead, match="the service is stopping"):
        start.wait()
    start.let_go()


def test_a_stop_ends_a_load_that_is_being_finished(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.send().let_go()
    count_attempt = start.record.count_attempt

    def stop_then() -> int:
        start.board.stop = StopMode.QUICK
        return count_attempt()

    monkeypatch.setattr(start.record, "count_attempt", stop_then)
    with pytest.raises(EngineDead, match="the service is stopping"):
        start.wait()
    assert not start.board.halt_code


def flip_bit(fd: int, offset: int) -> None:
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ 1]), offset)


def test_weights_damaged_by_a_crash_are_loaded_again_before_they_serve(
    on_device: Start, caplog: pytest.LogCaptureFixture
) -> None:
    on_device.send().load().let_go()
    on_device.wait()
    flip_bit(on_device.fd, on_device.layout["layers.0.out.weight"].offset)
    assert on_device.is_right(on_device.wait())
    assert "model.layers.0.self_attn.o_proj.weight" in caplog.text
    assert not on_device.board.halt_code


def test_a_first_mapping_costs_no_second_look(on_device: Start) -> None:
    on_device.send().load().let_go()
    driver = cast(DeviceStore, on_device.store).driver
    before = cast(HostDriver, driver).calls["launch_async"]
    on_device.wait()
    assert cast(HostDriver, driver).calls["launch_async"] == before
    on_device.wait()
    assert cast(HostDriver, driver).calls["launch_async"] == before + 1


def test_damage_that_cannot_be_repaired_ends_the_service(on_device: Start) -> None:
    on_device.send().load().let_go()
    on_device.wait()
    sums = list(on_device.record.sums or ())
    on_device.record.store_sums([sums[0] ^ 1, *sums[1:]])
    with pytest.raises(EngineDead):
        on_device.wait()
    assert on_device.board.halt_code == ExitCode.ENGINE_FAILED
    assert b"model.embed_tokens.weight" in on_device.board.halt_reason


def test_where_memory_cannot_be_shared_every_model_worker_loads_by_itself(start: Start) -> None:
    driver = HostDriver(can_share_memory=False)
    start.store = DeviceStore(driver, SumKernels.among(host_images()))
    start.board.loader_state = LoaderState.CANNOT_SHARE
    start.let_go()
    addresses = []
    for _ in range(2):
        memory = start.wait()
        assert isinstance(memory, DeviceMemory)
        addresses.append(memory.address)
    assert addresses[0] != addresses[1]
    assert start.board.bytes_loaded == start.plan.num_bytes
    assert start.record.sums is not None, "the second load was held against the first"


def copies(hand_over: HandOver, count: int) -> list[int]:
    fds = [hand_over.copy_memory() for _ in range(count)]
    return [fd for fd in fds if fd is not None]


def test_a_descriptor_can_be_had_as_often_as_wanted_after_its_sender_died() -> None:
    hand_over, loader_end = HandOver.create()
    assert copies(hand_over, 1) == []
    fd = HostStore().create(4096)
    os.pwrite(fd, b"weights", 0)
    send_memory(loader_end, fd)
    loader_end.close()
    os.close(fd)
    fds = copies(hand_over, 3)
    assert len(set(fds)) == 3
    assert [os.pread(fd, 7, 0) for fd in fds] == [b"weights"] * 3
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    (last,) = copies(hand_over, 1)
    assert os.pread(last, 7, 0) == b"weights"
    os.close(last)
    hand_over.close()


def test_no_descriptor_comes_from_a_sender_that_died_early() -> None:
    hand_over, loader_end = HandOver.create()
    loader_end.close()
    assert hand_over.copy_memory() is None
    hand_over.close()
