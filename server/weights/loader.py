"""Reads the chunks of a verified checkpoint into the weight memory: many threads, every read checked.

Knows files and chunks; where the bytes go is a `Sink`'s business, so that the same reader fills host memory and,
through pinned buffers, a device's. Loading again writes the same bytes, so it may be repeated by anyone.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from server.errors import StartupError
from server.weights.copy_plan import Copy
from server.weights.memory import Sink, WritableMemory
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord
from server.weights.shard import FileIdentity, open_regular


def load_missing(
    plan: LoadPlan,
    memory: WritableMemory,
    record: LoadRecord,
    on_progress: Callable[[int], None],
    num_threads: int = 0,
) -> None:
    """Bring every chunk that `record` misses into `memory`, and mark each that has arrived.

    `num_threads` 0: as many as fit memory and machine. `on_progress` gets the bytes loaded so far, rising to the sum of
    all tensors; it is called by one thread at a time. May be repeated after an end at any moment. Raises StartupError
    naming file and offset when a read fails, or when a file is not the verified one any more.
    """
    missing = [(number, plan.chunks[number]) for number in record.missing()]
    progress = _Progress(plan.num_bytes - sum(chunk.num_bytes for _, chunk in missing), on_progress)

    def on_arrival(number: int, chunk: Copy) -> None:
        record.mark_arrived(number)
        progress.add(chunk.num_bytes)

    read_chunks(
        plan.checkpoint.identities,
        missing,
        lambda: memory.make_sink(on_arrival),
        num_threads or memory.num_threads,
    )


class _Progress:
    """Bytes that have arrived, counted by several threads."""

    def __init__(self, num_bytes: int, on_progress: Callable[[int], None]) -> None:
        self._num_bytes = num_bytes
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            self._on_progress(self._num_bytes)


def read_chunks(
    identities: dict[Path, FileIdentity],
    chunks: list[tuple[int, Copy]],
    make_sink: Callable[[], Sink],
    num_threads: int,
) -> None:
    """Read every numbered chunk into a sink, in this order, by up to `num_threads` threads.

    The first failure stops all threads and is raised.
    """
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        for file in sorted({chunk.file for _, chunk in chunks}):
            fds[file] = open_regular(file)
            stack.callback(os.close, fds[file])
        _check_identities(fds, identities)
        run = _Run(fds, chunks)
        names = [f"load-{number}" for number in range(min(num_threads, len(chunks)))]
        threads = [threading.Thread(target=run.read, args=(make_sink,), name=name) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if run.failure is not None:
            raise run.failure
        _check_identities(fds, identities)


class _Run:
    """What the threads of one run share."""

    def __init__(self, fds: dict[Path, int], chunks: list[tuple[int, Copy]]) -> None:
        self.failure: BaseException | None = None
        self._fds = fds
        # The next chunk goes to whoever asks first, so that a disk reads in file order. The interpreter's lock makes
        # `next` of a list's iterator atomic.
        self._chunks: Iterator[tuple[int, Copy]] = iter(chunks)
        self._lock = threading.Lock()

    def read(self, make_sink: Callable[[], Sink]) -> None:
        """One thread's share: the next chunk, until there is none or a thread has failed."""
        try:
            sink = make_sink()
            try:
                for number, chunk in self._chunks:
                    if self.failure:
                        break
                    read_fully(self._fds[chunk.file], sink.buffer(chunk), chunk)
                    sink.submit(number, chunk)
                sink.finish()
            finally:
                sink.close()
        except BaseException as error:  # handed to the caller's thread, which raises it
            with self._lock:
                self.failure = self.failure or error


def read_fully(fd: int, buffer: memoryview, chunk: Copy) -> None:
    """Fill `buffer` from the chunk's place in its file, however short the single reads are."""
    num_read = _read_some(fd, buffer, chunk, 0)
    while num_read < chunk.num_bytes:
        num_read += _read_some(fd, buffer[num_read:], chunk, num_read)


def _read_some(fd: int, buffer: memoryview, chunk: Copy, num_read: int) -> int:
    """One read of the chunk's rest; at least a byte. Raises StartupError naming file and offset."""
    offset = chunk.file_offset + num_read
    try:
        count = os.preadv(fd, [buffer], offset)
    except OSError as error:
        if error.errno == errno.EFAULT:  # the kernel found no page for the buffer
            raise StartupError(f"no memory is left for the weights, {chunk.file} at byte {offset}") from error
        raise StartupError(f"{chunk.file}: cannot be read at byte {offset}: {error.strerror}") from error
    if count == 0:
        raise StartupError(f"{chunk.file}: ends at byte {offset} now; it was longer when it was verified")
    return count


def _check_identities(fds: dict[Path, int], identities: dict[Path, FileIdentity]) -> None:
    for file, fd in fds.items():
        found, expected = FileIdentity.of(os.fstat(fd)), identities[file]
        if found != expected:
            raise StartupError(
                f"{file}: was changed since it was verified: {expected} expected, {found} found; "
                f"start again when nothing writes to it"
            )
