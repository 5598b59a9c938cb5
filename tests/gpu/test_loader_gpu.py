"""The loader's memory on a real GPU: it outlives every CUDA process, refuses writes, and holds what the files hold."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from server.cli.make_model import make_model
from server.errors import StartupError
from server.ops.cuda.driver import PinnedMemory
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.torch.weights import weight_tensors
from server.weights import device_memory
from server.weights.device_memory import DeviceMemory, DeviceStore, SumKernels, built_sum_kernels
from server.weights.fill import complete_load, damaged_tensors
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.memory import HostMemory
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord
from server.weights.spans import source_spans
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).parents[2]

# Runs without CUDA itself. One process makes the memory and dies; for a while nobody has a context; others look at it.
PARK = """
import os, subprocess, sys, time
from server.launch.hand_over import HandOver
hand_over, sender = HandOver.create()
os.set_inheritable(sender.fileno(), True)
run = lambda program, fd: subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=[fd], timeout=60)
assert run(sys.argv[1], sender.fileno()).returncode == 0
sender.close()
time.sleep(float(sys.argv[3]))
assert not any("libcuda" in line for line in open("/proc/self/maps"))
for _ in range(2):
    fd = hand_over.copy_memory()
    assert run(sys.argv[2], fd).returncode == 0
    os.close(fd)
"""
COMMON = """
import os, socket, sys
from server.launch.hand_over import send_memory
from server.ops.cuda.driver import DriverError
from server.ops.cuda.nvidia import NvidiaDriver
driver = NvidiaDriver.open()
NUM_BYTES = 64 * driver.facts.granularity
stream = driver.create_stream()
fd = int(sys.argv[1])
"""
MAKE = (
    COMMON
    + """
memory_fd = driver.create_shareable(NUM_BYTES)
address = driver.map_shareable(memory_fd, NUM_BYTES, writable=True)
for part in range(64):
    driver.fill_async(address + part * driver.facts.granularity, part + 1, driver.facts.granularity, stream)
driver.synchronize(stream)
send_memory(socket.socket(fileno=fd), memory_fd)
os._exit(0)
"""
)
LOOK = (
    COMMON
    + """
address = driver.map_shareable(fd, NUM_BYTES, writable=False)
pinned = driver.allocate_pinned(NUM_BYTES)
driver.copy_to_host_async(pinned.address, address, NUM_BYTES, stream)
driver.synchronize(stream)
for part in range(64):
    found = bytes(pinned.view[part * driver.facts.granularity :][: driver.facts.granularity])
    assert found == bytes([part + 1]) * driver.facts.granularity, part
try:
    driver.fill_async(address, 0, 4096, stream)
    driver.synchronize(stream)
except DriverError as error:
    print("a write is refused:", error)
    os._exit(0)
os._exit(1)
"""
)


def test_memory_without_any_cuda_process_keeps_its_values_and_refuses_writes_of_its_heirs() -> None:
    command = [sys.executable, "-c", PARK, MAKE, LOOK, "5"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=180)


@pytest.fixture(scope="module")
def driver(device: str) -> NvidiaDriver:
    return NvidiaDriver.open()


@pytest.fixture(scope="module")
def kernels(driver: NvidiaDriver) -> SumKernels:
    found = built_sum_kernels(driver)
    if found is None:
        pytest.skip("no kernels are built: scripts/build-kernels")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 GB with checksums."""
    folder = tmp_path_factory.mktemp("made") / "m"
    make_model("qwen2-0.5b", folder, seed=5, dtype="bfloat16")
    return folder


class Loaded:
    """A checkpoint on the device."""

    def __init__(self, folder: Path, store: DeviceStore) -> None:
        self.checkpoint: Checkpoint
        self.layout: WeightLayout
        self.checkpoint, self.layout = open_folder(folder)
        self.plan = LoadPlan.make(self.checkpoint, self.layout)
        self.record: LoadRecord = new_record(self.plan)
        fd = store.create(self.layout.total_bytes)
        memory = store.map_writable(fd, self.layout.total_bytes)
        begin = time.perf_counter()
        self.copied_s = 0.0
        complete_load(self.plan, memory, self.record, lambda _: None, lambda: self._note(begin))
        self.all_s = time.perf_counter() - begin
        memory.close()
        self.memory: DeviceMemory = store.map_read_only(fd, self.layout.total_bytes)

    def _note(self, begin: float) -> None:
        self.copied_s = time.perf_counter() - begin


def content(
    driver: NvidiaDriver, memory: DeviceMemory, offset: int, pinned: PinnedMemory, num_bytes: int
) -> memoryview:
    stream = driver.create_stream()
    driver.copy_to_host_async(pinned.address, memory.address + offset, num_bytes, stream)
    driver.synchronize(stream)
    return pinned.view[:num_bytes]


def assert_equal(driver: NvidiaDriver, memory: DeviceMemory, expected: HostMemory, layout: WeightLayout) -> None:
    size = 64 << 20
    pinned = driver.allocate_pinned(size)
    for spec in layout.tensors:
        for begin in range(0, spec.num_bytes, size):
            offset, num_bytes = spec.offset + begin, min(size, spec.num_bytes - begin)
            found = content(driver, memory, offset, pinned, num_bytes)
            assert found == expected.view[offset : offset + num_bytes], f"{spec.name} from byte {begin} on"
    driver.free_pinned(pinned)


def test_a_made_checkpoint_arrives_as_it_is_and_has_the_sums_of_its_file(
    driver: NvidiaDriver, kernels: SumKernels, folder: Path
) -> None:
    store = DeviceStore(driver, kernels)
    Loaded(folder, store).memory.close()  # reads the files into the page cache
    loaded = Loaded(folder, store)
    num_bytes = loaded.plan.num_bytes
    sum_s = loaded.all_s - loaded.copied_s
    print(f"\n{num_bytes / 1e9:.2f} GB: copied at {num_bytes / loaded.copied_s / 1e9:.1f} GB/s", end="")  # noqa: T201
    print(f", summed at {num_bytes / sum_s / 1e9:.0f} GB/s ({sum_s * 1e3:.1f} ms)")  # noqa: T201
    assert loaded.record.sums == loaded.plan.expected_sums  # by numpy, when the files were written
    assert loaded.plan.expected_sums is not None
    expected = load_on_host(loaded.checkpoint, loaded.layout)
    assert_equal(driver, loaded.memory, expected, loaded.layout)
    begin = time.perf_counter()
    assert damaged_tensors(loaded.plan, loaded.memory, loaded.record) == []
    print(f"verified again in {(time.perf_counter() - begin) * 1e3:.1f} ms")  # noqa: T201


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 33, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_kernels_add_up_what_numpy_does(
    driver: NvidiaDriver, kernels: SumKernels, tmp_path: Path, sizes: dict[str, int], dtype: str
) -> None:
    loaded = Loaded(
        write_tiny_model(tmp_path, "qwen3", dtype=dtype, num_shards=2, **sizes), DeviceStore(driver, kernels)
    )
    expected = load_on_host(loaded.checkpoint, loaded.layout)
    assert_equal(driver, loaded.memory, expected, loaded.layout)
    sums = expected.sums(source_spans(loaded.layout), len(loaded.plan.sources))
    assert list(loaded.record.sums or ()) == sums


def test_torch_sees_the_memory_itself(driver: NvidiaDriver, tmp_path: Path, device: str) -> None:
    loaded = Loaded(write_tiny_model(tmp_path, dtype="bfloat16"), DeviceStore(driver, None))
    tensors = weight_tensors(loaded.memory, loaded.layout, torch.device(device))
    on_host = weight_tensors(load_on_host(loaded.checkpoint, loaded.layout), loaded.layout, torch.device("cpu"))
    for spec in loaded.layout.tensors:
        assert tensors[spec.name].data_ptr() == loaded.memory.address + spec.offset
        assert tensors[spec.name].device.type == "cuda"
        assert torch.equal(tensors[spec.name].cpu(), on_host[spec.name])
    weight = tensors["layers.0.down.weight"]
    x = torch.ones(3, weight.shape[1], dtype=weight.dtype, device=device)
    assert torch.isfinite(x @ weight.T).all()


def test_a_private_load_holds_the_same(driver: NvidiaDriver, tmp_path: Path) -> None:
    checkpoint, layout = open_folder(write_tiny_model(tmp_path, dtype="bfloat16"))
    plan = LoadPlan.make(checkpoint, layout)
    memory = DeviceStore(driver, None).private_memory(layout.total_bytes)
    complete_load(plan, memory, new_record(plan), lambda _: None)
    assert_equal(driver, memory, load_on_host(checkpoint, layout), layout)
    memory.close()


def test_a_full_gpu_is_waited_for(driver: NvidiaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "FREE_MEMORY_DEADLINE_S", 1.0)
    store = DeviceStore(driver, None)
    torch.cuda.empty_cache()
    free_bytes, _ = driver.memory_info()
    occupied = driver.allocate(free_bytes - (1 << 30))
    with pytest.raises(StartupError, match=r"is full: the weights need 2.00 GB"):
        store.create(2 * 10**9)

    def give_back() -> None:
        driver.attach_thread()
        driver.free(occupied)

    threading.Timer(0.3, give_back).start()
    store.private_memory(2 * 10**9).close()
