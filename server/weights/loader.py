"""Streams a verified checkpoint into the weight memory: many threads, small chunks, every read checked.

`read_chunks` knows files and chunks; where the bytes go is a `Sink`'s business, so that the same reader fills host
memory and, through pinned buffers, a device's. Loading again writes the same bytes, so it may be repeated by anyone.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from server.errors import StartupError
from server.weights.copy_plan import Copy, copy_plan, split
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.memory import map_writable
from server.weights.shard import FileIdentity, open_regular

CHUNK_BYTES = 4 << 20  # of those tried on a machine with a GPU, the best
MAX_DEFAULT_THREADS = 8


class Sink(Protocol):
    """Takes chunks of one reading thread. Each thread has its own."""

    def buffer(self, chunk: Copy) -> memoryview:
        """Writable memory of `chunk.num_bytes` bytes to read into; may wait for an earlier chunk to have left it."""

    def submit(self, chunk: Copy) -> None:
        """The buffer is filled: bring it to `chunk.dest_offset`, at once or later."""

    def finish(self) -> None:
        """Wait until every submitted chunk has arrived."""


class MemorySink:
    """Host memory, mapped writable: the read itself brings the bytes where they belong."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def buffer(self, chunk: Copy) -> memoryview:
        """The chunk's own place."""
        return self._memory[chunk.dest_offset : chunk.dest_end]

    def submit(self, chunk: Copy) -> None:
        """Nothing is left to do."""

    def finish(self) -> None:
        """Nothing is on its way."""


def default_num_threads() -> int:
    """As many as the process may use cores, at most 8: more bring no more."""
    return min(MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


def run_loader(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    fd: int,
    num_threads: int,
    on_progress: Callable[[int], None],
) -> None:
    """Fill the weight memory `fd` of `layout.total_bytes` bytes. `num_threads` 0: as many as fit the machine.

    `on_progress` gets the bytes loaded so far, rising to the sum of all tensors; it is called by one thread at a time.
    May be repeated after an end at any moment. Raises StartupError naming file and offset when a read fails, or when a
    file is not the verified one any more.
    """
    memory = memoryview(map_writable(fd))
    read_chunks(
        checkpoint.identities,
        split(copy_plan(layout, checkpoint), CHUNK_BYTES),
        lambda: MemorySink(memory),
        num_threads or default_num_threads(),
        on_progress,
    )


def read_chunks(
    identities: dict[Path, FileIdentity],
    chunks: list[Copy],
    make_sink: Callable[[], Sink],
    num_threads: int,
    on_progress: Callable[[int], None],
) -> None:
    """Read every chunk into a sink, with `num_threads` threads. The first failure stops all threads and is raised."""
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        for file in sorted({chunk.file for chunk in chunks}):
            fds[file] = open_regular(file)
            stack.callback(os.close, fds[file])
        _check_identities(fds, identities)
        run = _Run(fds, chunks, on_progress)
        threads = [threading.Thread(target=run.read, args=(make_sink,), name=f"load-{i}") for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if run.failure is not None:
            raise run.failure
        _check_identities(fds, identities)


class _Run:
    """What the threads of one run share."""

    def __init__(self, fds: dict[Path, int], chunks: list[Copy], on_progress: Callable[[int], None]) -> None:
        self.failure: BaseException | None = None
        self._fds = fds
        self._chunks: Iterator[Copy] = iter(chunks)
        self._on_progress = on_progress
        self._num_bytes = 0
        self._lock = threading.Lock()

    def read(self, make_sink: Callable[[], Sink]) -> None:
        """One thread's share: the next chunk, until there is none or a thread has failed."""
        try:
            sink = make_sink()
            while (chunk := self._next()) is not None:
                read_fully(self._fds[chunk.file], sink.buffer(chunk), chunk)
                sink.submit(chunk)
                self._count(chunk.num_bytes)
            sink.finish()
        except BaseException as error:  # handed to the caller's thread, which raises it
            with self._lock:
                self.failure = self.failure or error

    def _next(self) -> Copy | None:
        with self._lock:
            return None if self.failure else next(self._chunks, None)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self._on_progress(self._num_bytes)


def read_fully(fd: int, buffer: memoryview, chunk: Copy) -> None:
    """Fill `buffer` from the chunk's place in its file, however short the single reads are."""
    num_read = 0
    while num_read < chunk.num_bytes:
        offset = chunk.file_offset + num_read
        try:
            count = os.preadv(fd, [buffer[num_read:]], offset)
        except OSError as error:
            if error.errno == errno.EFAULT:  # the kernel found no page for the buffer
                raise StartupError(f"no memory is left for the weights, {chunk.file} at byte {offset}") from error
            raise StartupError(f"{chunk.file}: cannot be read at byte {offset}: {error.strerror}") from error
        if count == 0:
            raise StartupError(f"{chunk.file}: ends at byte {offset} now; it was longer when it was verified")
        num_read += count


def _check_identities(fds: dict[Path, int], identities: dict[Path, FileIdentity]) -> None:
    for file, fd in fds.items():
        found, expected = FileIdentity.of(os.fstat(fd)), identities[file]
        if found != expected:
            raise StartupError(
                f"{file}: was changed since it was verified: {expected} expected, {found} found; "
                f"start again when nothing writes to it"
            )
