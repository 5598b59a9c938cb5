"""Weight memory on a GPU: shareable device memory, filled through pinned buffers, summed up where it lies.

Knows the driver's door; does not know files. Every thread that makes a sink has its own stream and buffers.
"""

import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from server.errors import StartupError
from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda.driver import Driver, Event, Function, KernelImage, OutOfDeviceMemory, PinnedMemory
from server.weights.copy_plan import Copy
from server.weights.plan import CHUNK_BYTES
from server.weights.spans import Span

# Measured on 16 cores and PCIe 5: 12 threads with two buffers of 4 MiB each read 48 GB/s, 8 threads 43, 16 fewer.
MAX_THREADS = 12
NUM_BUFFERS = 2
FREE_MEMORY_DEADLINE_S = 5.0  # a predecessor that was killed needs 0.2 s to give its memory back
_FREE_MEMORY_POLL_S = 0.05
_SPAN_BYTES = 4 << 20  # a program's share: enough of them to occupy a device, few enough to list
_WORD_BYTES, _HALF_BYTES = 4, 2
_VECTOR_BYTES = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SumKernels:
    """The images of kernels/checksum.py."""

    words: KernelImage
    halves: KernelImage

    @classmethod
    def among(cls, images: Iterable[KernelImage]) -> "SumKernels | None":
        """None if they are not there."""
        by_name = {image.name: image for image in images}
        if "sum_words" not in by_name or "sum_halves" not in by_name:
            return None
        return cls(by_name["sum_words"], by_name["sum_halves"])


class DeviceStore:
    """Makes and maps shareable device memory. `kernels` None: sums cannot be computed."""

    def __init__(self, driver: Driver, kernels: SumKernels | None) -> None:
        self.driver = driver
        self._kernels = kernels

    @property
    def can_share(self) -> bool:
        """Whether memory can outlive its maker; if not, each model worker loads into `private_memory`."""
        return self.driver.facts.can_share_memory

    def create(self, num_bytes: int) -> int:
        """Waits for memory that a dying process still holds. Raises StartupError if it does not become free."""
        rounded = self.driver.facts.shareable_bytes(num_bytes)
        return self._allocate(num_bytes, lambda: self.driver.create_shareable(rounded))

    def map_writable(self, fd: int, num_bytes: int) -> "DeviceMemory":
        """For whoever loads. The descriptor stays the caller's."""
        return self._map(fd, num_bytes, writable=True)

    def map_read_only(self, fd: int, num_bytes: int) -> "DeviceMemory":
        """A kernel that writes to it fails, and so does its process."""
        return self._map(fd, num_bytes, writable=False)

    def private_memory(self, num_bytes: int) -> "DeviceMemory":
        """Writable memory that ends with this process. Raises StartupError if there is no room for it."""
        driver = self.driver
        address = self._allocate(num_bytes, lambda: driver.allocate(num_bytes))
        return DeviceMemory(driver, address, self._kernels, lambda: driver.free(address))

    def _map(self, fd: int, num_bytes: int, *, writable: bool) -> "DeviceMemory":
        driver, rounded = self.driver, self.driver.facts.shareable_bytes(num_bytes)
        address = driver.map_shareable(fd, rounded, writable=writable)
        return DeviceMemory(driver, address, self._kernels, lambda: driver.unmap(address, rounded))

    def _allocate(self, num_bytes: int, allocate: Callable[[], int]) -> int:
        deadline = time.monotonic() + FREE_MEMORY_DEADLINE_S
        while True:
            try:
                return allocate()
            except OutOfDeviceMemory as error:
                if time.monotonic() >= deadline:
                    free_bytes, total_bytes = self.driver.memory_info()
                    raise StartupError(
                        f"the GPU ({self.driver.facts.name}) is full: the weights need {num_bytes / 1e9:.2f} GB, "
                        f"{free_bytes / 1e9:.2f} of its {total_bytes / 1e9:.2f} GB are free after "
                        f"{FREE_MEMORY_DEADLINE_S:.0f} s; end what else uses it (nvidia-smi lists it), choose another "
                        f"GPU (CUDA_VISIBLE_DEVICES) or a smaller model"
                    ) from error
            time.sleep(_FREE_MEMORY_POLL_S)


class DeviceMemory:
    """The weights at `address` of the device."""

    def __init__(self, driver: Driver, address: int, kernels: SumKernels | None, release: Callable[[], None]) -> None:
        self.address = address
        self._driver = driver
        self._kernels = kernels
        self._release = release
        self._buffers: list[PinnedMemory] = []

    @property
    def num_threads(self) -> int:
        """Two cores are left to the other processes of a start."""
        return max(2, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 2))

    def make_sink(self, on_arrival: Callable[[int, Copy], None]) -> "DeviceSink":
        """For the calling thread."""
        return DeviceSink(self._driver, self.address, self._buffers, on_arrival)

    def release_buffers(self) -> None:
        """About 1 ms for each of 24: not while somebody waits for the weights."""
        while self._buffers:
            self._driver.free_pinned(self._buffers.pop())

    @property
    def has_cheap_sums(self) -> bool:
        """At the speed of the device's memory."""
        return True

    def sums(self, spans: Sequence[Span], num_tensors: int) -> list[int] | None:
        """All tensors in one launch per kind of span; None if the kernels are missing."""
        if self._kernels is None:
            return None
        words = [span for span in spans if _is_aligned(span)]
        halves = [span for span in spans if not _is_aligned(span)]
        return _Summation(self._driver, self.address, num_tensors).run(
            [(self._kernels.words, _table(words, _WORD_BYTES)), (self._kernels.halves, _table(halves, _HALF_BYTES))]
        )

    def close(self) -> None:
        """Nothing on the device may use the weights any more."""
        self.release_buffers()
        self._release()


@dataclass(slots=True)
class _Slot:
    """One buffer, and the chunk on its way out of it."""

    memory: PinnedMemory
    event: Event
    number: int = 0
    chunk: Copy | None = None


class DeviceSink:
    """Two pinned buffers that take turns: one is filled while the other is copied to the device.

    They are added to `buffers`, whose owner frees them.
    """

    def __init__(
        self, driver: Driver, base: int, buffers: list[PinnedMemory], on_arrival: Callable[[int, Copy], None]
    ) -> None:
        self._driver = driver
        self._base = base
        self._buffers = buffers
        self._on_arrival = on_arrival
        self._slots: list[_Slot] = []
        self._turn = 0
        driver.attach_thread()
        self._stream = driver.create_stream()

    def buffer(self, chunk: Copy) -> memoryview:
        """Waits until the buffer's last chunk has arrived."""
        if self._turn == len(self._slots):  # pinned when it is needed: that takes longer than to fill it
            memory = self._driver.allocate_pinned(CHUNK_BYTES)
            self._buffers.append(memory)
            self._slots.append(_Slot(memory, self._driver.create_event()))
        slot = self._slots[self._turn]
        self._wait(slot)
        return slot.memory.view[: chunk.num_bytes]

    def submit(self, number: int, chunk: Copy) -> None:
        """It arrives later."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        driver = self._driver
        driver.copy_to_device_async(self._base + chunk.dest_offset, slot.memory.address, chunk.num_bytes, self._stream)
        slot.number, slot.chunk = number, chunk
        driver.record(slot.event, self._stream)

    def finish(self) -> None:
        """Wait for both buffers."""
        for slot in self._slots:
            self._wait(slot)

    def close(self) -> None:
        """A copy may still be on its way, after a failure elsewhere; afterwards the buffers may be freed."""
        self._driver.synchronize(self._stream)

    def _wait(self, slot: _Slot) -> None:
        if slot.chunk is not None:
            self._driver.wait(slot.event)
            self._on_arrival(slot.number, slot.chunk)
            slot.chunk = None


class _Summation:
    """The launches that add up the sums of all tensors."""

    def __init__(self, driver: Driver, address: int, num_tensors: int) -> None:
        self._driver = driver
        self._address = address
        self._num_tensors = num_tensors
        self._stream = driver.create_stream()

    def run(self, tables: Sequence[tuple[KernelImage, "array[int]"]]) -> list[int]:
        """One launch per table that has rows."""
        driver, stream = self._driver, self._stream
        sum_bytes = -(-self._num_tensors * 8 // _VECTOR_BYTES) * _VECTOR_BYTES
        used = [(driver.load(image), table) for image, table in tables if table]
        num_bytes = sum_bytes + sum(len(table) * table.itemsize for _, table in used)
        on_host, on_device = driver.allocate_pinned(num_bytes), driver.allocate(num_bytes)
        try:
            on_host.view[:sum_bytes] = bytes(sum_bytes)
            self._launch(used, on_host, on_device, sum_bytes)
            driver.copy_to_host_async(on_host.address, on_device, sum_bytes, stream)
            driver.synchronize(stream)
            return list(on_host.view[:sum_bytes].cast("Q")[: self._num_tensors])
        finally:
            driver.free(on_device)
            driver.free_pinned(on_host)

    def _launch(
        self, used: list[tuple[Function, "array[int]"]], on_host: PinnedMemory, on_device: int, sum_bytes: int
    ) -> None:
        offset = sum_bytes
        begins = []
        for _, table in used:
            data = memoryview(table).cast("B")
            on_host.view[offset : offset + len(data)] = data
            begins.append(on_device + offset)
            offset += len(data)
        self._driver.copy_to_device_async(on_device, on_host.address, offset, self._stream)
        for (function, table), begin in zip(used, begins, strict=True):
            values = (self._address, begin, on_device)
            self._driver.launch_async(function, (len(table) // _COLUMNS, 1, 1), values, self._stream)


_COLUMNS = 4


def _is_aligned(span: Span) -> bool:
    return not (span.offset % _VECTOR_BYTES or span.source_offset % _WORD_BYTES or span.num_bytes % _WORD_BYTES)


def _table(spans: Sequence[Span], unit_bytes: int) -> "array[int]":
    """A row per program, as kernels/checksum.py wants it."""
    table = array("q")
    max_units = _SPAN_BYTES // unit_bytes
    for tensor, source_offset, offset, num_bytes in spans:  # thousands of rows: plain arithmetic
        first, index, num_units = offset // unit_bytes, source_offset // unit_bytes, num_bytes // unit_bytes
        for begin in range(0, num_units, max_units):
            table.extend((first + begin, min(max_units, num_units - begin), index + begin, tensor))
    return table


def built_sum_kernels(driver: Driver) -> SumKernels | None:
    """Those that were built for this device, if any were; a start must not fail for want of a check."""
    try:
        manifest = read_manifest(built_folder())
        kernels = None if manifest is None else SumKernels.among(manifest.images(driver.facts.arch))
    except StartupError as error:
        logger.warning("the weights' checksums are not verified: %s", error)
        return None
    if kernels is None:
        logger.warning("the weights' checksums are not verified: no kernels are built (scripts/build-kernels)")
    return kernels
