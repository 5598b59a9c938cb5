"""The one allocation of all weights: what any kind of memory offers, and the kind on the host, a memory file.

It lives as long as any process holds its descriptor. Knows its size and how to map it; does not know what lies in it,
except that `WeightViews` finds tensors by the layout. The kind on a GPU is device_memory.py.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from server.models.facts import DType
from server.weights.copy_plan import Copy
from server.weights.layout import WeightLayout
from server.weights.spans import Span

_NAME = "model-server-weights"
_MAX_THREADS = 8  # more bring no more
_SUM_BYTES = 1 << 20  # a thread's piece of work; a multiple of a checksum's word


class Sink(Protocol):
    """Takes chunks of one reading thread and tells of each when it has arrived. Each thread has its own."""

    def buffer(self, chunk: Copy) -> memoryview:
        """Writable memory of `chunk.num_bytes` bytes to read into; may wait for an earlier chunk to have left it."""

    def submit(self, number: int, chunk: Copy) -> None:
        """The buffer is filled with the chunk of this number: bring it to `chunk.dest_offset`, at once or later."""

    def finish(self) -> None:
        """Wait until every submitted chunk has arrived."""

    def close(self) -> None:
        """Nothing is on its way any more. Called by the thread that made the sink, also after a failure."""


class WeightMemory(Protocol):
    """The weights, mapped in this process."""

    @property
    def has_cheap_sums(self) -> bool:
        """Whether all sums take milliseconds; otherwise they are computed only where they can be compared."""

    def sums(self, spans: Sequence[Span], num_tensors: int) -> list[int] | None:
        """The checksums of all tensors as they lie here; None where they cannot be computed."""

    def close(self) -> None:
        """End the mapping. What was made of it must not be used any more."""


class WritableMemory(WeightMemory, Protocol):
    """The weights while they are loaded."""

    @property
    def num_threads(self) -> int:
        """How many threads fill it best on this machine."""

    def make_sink(self, on_arrival: Callable[[int, Copy], None]) -> Sink:
        """For one thread, which is the one that calls; `on_arrival` gets number and chunk."""

    def release_buffers(self) -> None:
        """No sink is in use: give back what they needed."""


class WeightStore(Protocol):
    """A kind of memory that outlives its maker and is passed on as a descriptor."""

    @property
    def can_share(self) -> bool:
        """False where there is no such memory: then it cannot `create` or map any."""

    def private_memory(self, num_bytes: int) -> WritableMemory:
        """Memory that ends with this process. Raises StartupError if there is no room for it."""

    def create(self, num_bytes: int) -> int:
        """A descriptor of new memory, closed on exec. Raises StartupError if there is no room for it."""

    def map_writable(self, fd: int, num_bytes: int) -> WritableMemory:
        """For whoever loads. The descriptor stays the caller's."""

    def map_read_only(self, fd: int, num_bytes: int) -> WeightMemory:
        """For the model worker: writing through it ends the process."""


def create_weight_memory(num_bytes: int) -> int:
    """A descriptor of `num_bytes` of zeros, closed on exec, inherited by fork. Pages come into being when written.

    Its size is sealed, so that no holder of the descriptor can make another's mapping fault.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def map_writable(fd: int) -> mmap.mmap:
    """The whole memory, shared and writable: for the loader."""
    return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_read_only(fd: int) -> mmap.mmap:
    """The whole memory, shared; a write through it ends the process: for the model worker."""
    return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)


def default_num_threads() -> int:
    """As many as the process may use cores, at most 8."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class HostStore:
    """Memory files."""

    @property
    def can_share(self) -> bool:
        """Always."""
        return True

    def private_memory(self, num_bytes: int) -> "HostMemory":
        """A memory file that nobody else has."""
        fd = create_weight_memory(num_bytes)
        try:
            return self.map_writable(fd, num_bytes)
        finally:
            os.close(fd)

    def create(self, num_bytes: int) -> int:
        """See `create_weight_memory`."""
        return create_weight_memory(num_bytes)

    def map_writable(self, fd: int, num_bytes: int) -> "HostMemory":
        """Shared."""
        return HostMemory(map_writable(fd), num_bytes)

    def map_read_only(self, fd: int, num_bytes: int) -> "HostMemory":
        """Shared."""
        return HostMemory(map_read_only(fd), num_bytes)


class HostMemory:
    """A mapped memory file, which lives on while a view of it does. `view` is read-only if the mapping is."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        assert len(mapping) == num_bytes, f"memory of {len(mapping)} bytes, {num_bytes} expected"
        self.view = memoryview(mapping)

    @property
    def num_threads(self) -> int:
        """As many as the process may use cores, at most 8."""
        return default_num_threads()

    def make_sink(self, on_arrival: Callable[[int, Copy], None]) -> "HostSink":
        """Reads straight into the memory."""
        return HostSink(self.view, on_arrival)

    def release_buffers(self) -> None:
        """There are none."""

    @property
    def has_cheap_sums(self) -> bool:
        """Numpy is no GPU."""
        return False

    def sums(self, spans: Sequence[Span], num_tensors: int) -> list[int]:
        """By numpy, about 1 GB/s per core."""
        from server.weights.checksum import partial_sum  # numpy: only for those who want sums

        totals = [0] * num_tensors
        pieces = [piece for span in spans for piece in cut(span, _SUM_BYTES)]

        def add(piece: Span) -> int:
            return partial_sum(self.view[piece.offset : piece.offset + piece.num_bytes], piece.source_offset)

        with ThreadPoolExecutor(self.num_threads) as pool:
            for piece, value in zip(pieces, pool.map(add, pieces, chunksize=1), strict=True):
                totals[piece.tensor] = (totals[piece.tensor] + value) % 2**64
        return totals

    def close(self) -> None:
        """The mapping ends with its last view."""
        self.view = memoryview(b"")


class HostSink:
    """Host memory, mapped writable: the read itself brings the bytes where they belong."""

    def __init__(self, memory: memoryview, on_arrival: Callable[[int, Copy], None]) -> None:
        self._memory = memory
        self._on_arrival = on_arrival

    def buffer(self, chunk: Copy) -> memoryview:
        """The chunk's own place."""
        return self._memory[chunk.dest_offset : chunk.dest_end]

    def submit(self, number: int, chunk: Copy) -> None:
        """It is there."""
        self._on_arrival(number, chunk)

    def finish(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Nothing is held but the view."""


def cut(span: Span, max_bytes: int) -> Iterator[Span]:
    """The same bytes in pieces of at most `max_bytes`."""
    for begin in range(0, span.num_bytes, max_bytes):
        num_bytes = min(max_bytes, span.num_bytes - begin)
        yield Span(span.tensor, span.source_offset + begin, span.offset + begin, num_bytes)


@dataclass(frozen=True, slots=True)
class WeightView:
    """One tensor's bytes, without copy: row-major, of `shape` and `dtype`."""

    data: memoryview
    shape: tuple[int, ...]
    dtype: DType


class WeightViews:
    """The tensors of a loaded host memory by name. They keep the mapping alive."""

    def __init__(self, memory: HostMemory, layout: WeightLayout) -> None:
        num_bytes = len(memory.view)
        assert num_bytes == layout.total_bytes, f"memory of {num_bytes} bytes, layout of {layout.total_bytes}"
        self._layout = layout
        self._data = memory.view

    def __getitem__(self, name: str) -> WeightView:
        spec = self._layout[name]
        return WeightView(self._data[spec.offset : spec.offset + spec.num_bytes], spec.shape, spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self._layout.tensors)
