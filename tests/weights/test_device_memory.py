"""Weights in device memory equal those in host memory, whoever was interrupted where, and their sums show damage."""

import ctypes
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from server.errors import EngineDead, StartupError
from server.ops.cuda.driver import DriverError, OutOfDeviceMemory
from server.weights import device_memory
from server.weights.device_memory import DeviceMemory, DeviceSink, DeviceStore, SumKernels, built_sum_kernels
from server.weights.fill import complete_load, damaged_tensors
from server.weights.loader import load_missing
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord
from server.weights.spans import source_spans
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.tiny_models import FAMILIES, Family, write_tiny_model

CHUNK_BYTES = 4096


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(scope="module")
def kernels() -> SumKernels:
    found = SumKernels.among(host_images())
    assert found is not None
    return found


class OnDevice:
    """A checkpoint, and the device that it is loaded on."""

    def __init__(self, folder: Path, kernels: SumKernels | None, driver: HostDriver | None = None) -> None:
        self.checkpoint, self.layout = open_folder(folder)
        self.plan = LoadPlan.make(self.checkpoint, self.layout, CHUNK_BYTES)
        self.record = new_record(self.plan)
        self.driver = driver or HostDriver()
        self.store = DeviceStore(self.driver, kernels)
        self.fd = self.store.create(self.layout.total_bytes)

    def load(self, num_threads: int = 3, record: LoadRecord | None = None) -> None:
        memory = self.store.map_writable(self.fd, self.layout.total_bytes)
        try:
            load_missing(self.plan, memory, record or self.record, lambda _: None, num_threads)
        finally:
            memory.close()

    def complete(self) -> None:
        memory = self.store.map_writable(self.fd, self.layout.total_bytes)
        complete_load(self.plan, memory, self.record, lambda _: None)
        memory.close()

    @property
    def content(self) -> bytes:
        return os.pread(self.fd, self.layout.total_bytes, 0)

    @property
    def is_right(self) -> bool:
        return self.content == load_on_host(self.checkpoint, self.layout).view


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "num_shards", "num_threads"), [("float32", 1, 1), ("bfloat16", 3, 5)])
def test_a_loaded_device_holds_what_host_memory_holds(
    tmp_path: Path, family: Family, dtype: str, num_shards: int, num_threads: int
) -> None:
    device = OnDevice(write_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards), None)
    device.load(num_threads)
    assert device.is_right
    assert device.record.missing() == []


@pytest.mark.parametrize("seed", range(6))
def test_layouts_of_any_shape_are_loaded_and_summed(tmp_path: Path, kernels: SumKernels, seed: int) -> None:
    """Odd sizes too: tensors whose pieces begin anywhere take the other kernel."""
    random = Random(seed)
    num_kv_heads = random.choice([1, 2, 3])
    folder = write_tiny_model(
        tmp_path,
        random.choice(FAMILIES),
        dtype=random.choice(["float32", "bfloat16", "float16"]),
        hidden_size=random.randrange(1, 40),
        intermediate_size=random.randrange(1, 60),
        num_layers=1,
        num_heads=num_kv_heads * random.choice([1, 2]),
        num_kv_heads=num_kv_heads,
        head_dim=2 * random.randrange(1, 5),
        vocab_size=random.randrange(300, 400),
        num_shards=random.choice([1, 2]),
    )
    device = OnDevice(folder, kernels)
    device.complete()
    assert device.is_right
    on_host = load_on_host(device.checkpoint, device.layout)
    assert list(device.record.sums or ()) == on_host.sums(source_spans(device.layout), len(device.plan.sources))


def test_spans_that_need_several_programs_and_blocks_add_up(
    tmp_path: Path, kernels: SumKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_SPAN_BYTES", 40_000)
    device = OnDevice(write_tiny_model(tmp_path, dtype="bfloat16", vocab_size=1000), kernels)
    device.complete()
    on_host = load_on_host(device.checkpoint, device.layout)
    assert list(device.record.sums or ()) == on_host.sums(source_spans(device.layout), len(device.plan.sources))


def test_sums_are_computed_by_one_launch_where_all_pieces_are_aligned(tmp_path: Path, kernels: SumKernels) -> None:
    device = OnDevice(write_tiny_model(tmp_path, dtype="bfloat16"), kernels)
    device.complete()
    assert device.driver.calls["launch_async"] == 1


@pytest.mark.parametrize("seed", range(12))
def test_a_load_that_fails_anywhere_is_finished_by_the_next(tmp_path: Path, seed: int) -> None:
    device = OnDevice(write_tiny_model(tmp_path, num_shards=2), None)
    num_calls = 3 * len(device.plan.chunks)  # copy, record and wait for each
    method = Random(seed).choice([None, "copy_to_device_async", "wait"])
    n = Random(seed).randrange(1, num_calls if method is None else len(device.plan.chunks))
    device.driver.fail_at(n, method=method)
    with pytest.raises(DriverError):
        device.load()
    device.driver.forgive()
    marked = set(range(len(device.plan.chunks))) - set(device.record.missing())
    content, expected = device.content, load_on_host(device.checkpoint, device.layout).view
    for number in marked:
        chunk = device.plan.chunks[number]
        assert content[chunk.dest_offset : chunk.dest_end] == expected[chunk.dest_offset : chunk.dest_end]
    before = device.driver.calls["copy_to_device_async"]
    device.load()
    assert device.driver.calls["copy_to_device_async"] - before == len(device.plan.chunks) - len(marked)
    assert device.is_right


def test_a_chunk_is_marked_only_when_its_copy_is_over(tmp_path: Path) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    arrived: list[int] = []
    memory = device.store.map_writable(device.fd, device.layout.total_bytes)
    sink = memory.make_sink(lambda number, _: arrived.append(number))
    assert isinstance(sink, DeviceSink)
    for number in range(2):
        chunk = device.plan.chunks[number]
        sink.buffer(chunk)[:] = bytes(chunk.num_bytes)
        sink.submit(number, chunk)
    assert arrived == []
    sink.buffer(device.plan.chunks[2])  # waits for the first to have left
    assert arrived == [0]
    sink.finish()
    assert arrived == [0, 1]
    sink.close()


def test_all_pinned_memory_is_given_back_also_after_a_failure(tmp_path: Path) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    device.load(num_threads=2)
    device.driver.fail_at(9, method="copy_to_device_async")
    with pytest.raises(DriverError):
        device.load(num_threads=2, record=new_record(device.plan))
    calls = device.driver.calls
    assert calls["allocate_pinned"] == calls["free_pinned"] > 0
    assert calls["allocate_pinned"] <= 2 * 2 * device_memory.NUM_BUFFERS
    assert calls["map_shareable"] == calls["unmap"]


def test_the_number_of_threads_leaves_cores_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    memory = device.store.map_writable(device.fd, device.layout.total_bytes)
    for num_cores, num_threads in ((1, 2), (4, 2), (8, 6), (16, 12), (64, 12)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=num_cores: set(range(n)))
        assert memory.num_threads == num_threads
    assert memory.num_threads * device_memory.NUM_BUFFERS * (4 << 20) <= 256_000_000


def test_a_read_only_mapping_is_one(tmp_path: Path) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    memory = device.store.map_read_only(device.fd, device.layout.total_bytes)
    with pytest.raises(DriverError):
        device.driver.fill_async(memory.address, 0, 16, device.driver.create_stream())


def damage(fd: int, offset: int) -> None:
    (byte,) = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte ^ 4]), offset)


def test_damage_is_found_by_tensor_and_loading_again_repairs_it(tmp_path: Path, kernels: SumKernels) -> None:
    device = OnDevice(write_tiny_model(tmp_path, dtype="bfloat16"), kernels)
    device.complete()
    memory = device.store.map_read_only(device.fd, device.layout.total_bytes)
    assert damaged_tensors(device.plan, memory, device.record) == []
    damage(device.fd, device.layout["layers.1.down.weight"].offset + 77)
    assert damaged_tensors(device.plan, memory, device.record) == ["model.layers.1.mlp.down_proj.weight"]
    device.record.forget_content()
    device.complete()
    assert damaged_tensors(device.plan, memory, device.record) == []
    assert device.is_right


def test_files_that_give_other_weights_the_second_time_are_not_served(tmp_path: Path, kernels: SumKernels) -> None:
    device = OnDevice(write_tiny_model(tmp_path, dtype="bfloat16"), kernels)
    device.complete()
    wrong = list(device.record.sums or ())
    wrong[0] ^= 1
    device.record.store_sums(wrong)
    device.record.forget_content()
    with pytest.raises(EngineDead, match=r"differ from the first time: model.embed_tokens.weight"):
        device.complete()
    assert not device.record.is_complete


def test_without_kernels_nothing_is_verified_and_everything_served(tmp_path: Path) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    device.complete()
    assert device.record.is_complete
    assert device.record.sums is None
    memory = device.store.map_read_only(device.fd, device.layout.total_bytes)
    assert damaged_tensors(device.plan, memory, device.record) == []
    assert SumKernels.among(()) is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time.monotonic() says; time.sleep moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_full_gpu_is_waited_for_and_then_named(tmp_path: Path, clock: list[float]) -> None:
    begin = clock[0]
    with pytest.raises(
        StartupError, match=r"the GPU \(host memory\) is full: the weights need 1.50 GB, 1.00 of its 1.00"
    ):
        DeviceStore(HostDriver(total_bytes=10**9), None).create(15 * 10**8)
    assert 5 <= clock[0] - begin < 5.2


@pytest.mark.parametrize("allocate", [DeviceStore.create, DeviceStore.private_memory])
def test_memory_that_a_dying_process_gives_back_is_taken(
    allocate: Callable[[DeviceStore, int], object], clock: list[float]
) -> None:
    driver = HostDriver()
    method = "create_shareable" if allocate is DeviceStore.create else "allocate"
    for n in (1, 2, 3):
        driver.fail_at(n, OutOfDeviceMemory(method, 2, "CUDA_ERROR_OUT_OF_MEMORY"), method=method)
    begin = clock[0]
    allocate(DeviceStore(driver, None), 1 << 20)
    assert 0.1 < clock[0] - begin < 1


def test_a_gpu_that_cannot_share_memory_gets_a_private_load(tmp_path: Path, kernels: SumKernels) -> None:
    checkpoint, layout = open_folder(write_tiny_model(tmp_path))
    plan = LoadPlan.make(checkpoint, layout, CHUNK_BYTES)
    driver = HostDriver(can_share_memory=False)
    store = DeviceStore(driver, kernels)
    assert not store.can_share
    memory = store.private_memory(layout.total_bytes)
    complete_load(plan, memory, new_record(plan), lambda _: None)
    content = array("B", bytes(layout.total_bytes))
    ctypes.memmove(content.buffer_info()[0], memory.address, layout.total_bytes)
    expected = load_on_host(checkpoint, layout).view
    for spec in layout.tensors:  # what lies between tensors is arbitrary
        assert (
            content.tobytes()[spec.offset : spec.offset + spec.num_bytes] == expected[spec.offset :][: spec.num_bytes]
        )
    memory.close()
    assert driver.num_used_bytes == 0


def test_missing_or_stale_kernels_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.weights.device_memory.built_folder", lambda: tmp_path)
    assert built_sum_kernels(HostDriver()) is None
    (tmp_path / "manifest.json").write_text("{}")
    assert built_sum_kernels(HostDriver()) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert all("checksums are not verified" in record.message for record in caplog.records)


def test_a_device_memory_knows_its_address(tmp_path: Path) -> None:
    device = OnDevice(write_tiny_model(tmp_path), None)
    memory = device.store.map_writable(device.fd, device.layout.total_bytes)
    assert isinstance(memory, DeviceMemory)
    assert memory.address % 4096 == 0
