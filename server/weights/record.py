"""What is known about the content of the weight memory, in a small memory of its own that no process takes with it.

Which chunks have arrived, the tensors' checksums, and a lock: who holds it is the one who writes the weights. Made by
the master before any fork; survives its writers. Does not know files or kinds of memory.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

_NAME = "model-server-load"
_IS_COMPLETE, _NUM_ATTEMPTS, _HAS_SUMS, _NUM_MAPPINGS, _NUM_FIELDS = range(5)
_WORD_BYTES = 8


class LoadRecord:
    """Construct it before the fork. A mark is a single store, so a reader sees it or does not."""

    def __init__(self, num_chunks: int, num_tensors: int) -> None:
        head_bytes = (_NUM_FIELDS + num_tensors) * _WORD_BYTES
        self._fd = os.memfd_create(_NAME)
        os.ftruncate(self._fd, head_bytes + num_chunks)
        memory = memoryview(mmap.mmap(self._fd, head_bytes + num_chunks))
        words = memory[:head_bytes].cast("Q")
        self._fields, self._sums = words[:_NUM_FIELDS], words[_NUM_FIELDS:]
        self._arrived = memory[head_bytes:]

    def __del__(self) -> None:
        os.close(self._fd)

    # chunks

    def mark_arrived(self, chunk_number: int) -> None:
        """Only when its bytes are where they belong: whoever goes on will not copy them again."""
        self._arrived[chunk_number] = 1

    def missing(self) -> list[int]:
        """The numbers of the chunks that have not arrived."""
        return [number for number, has_arrived in enumerate(self._arrived) if not has_arrived]

    @property
    def is_complete(self) -> bool:
        """Every chunk has arrived, and whatever could be compared was."""
        return bool(self._fields[_IS_COMPLETE])

    def mark_complete(self) -> None:
        """The weights may be served."""
        self._fields[_NUM_ATTEMPTS] = 0
        self._fields[_IS_COMPLETE] = 1

    def forget_content(self) -> None:
        """The memory does not hold what it should. That counts as a failed attempt; the sums stand."""
        self._fields[_IS_COMPLETE] = 0
        self._fields[_NUM_ATTEMPTS] = 1
        self._arrived[:] = bytes(len(self._arrived))

    # attempts and mappings

    def count_attempt(self) -> int:
        """Loading begins: how often it has begun since it last succeeded, this time included."""
        self._fields[_NUM_ATTEMPTS] += 1
        return self._fields[_NUM_ATTEMPTS]

    def count_mapping(self) -> int:
        """A model worker maps the weights: how many did before."""
        self._fields[_NUM_MAPPINGS] += 1
        return self._fields[_NUM_MAPPINGS] - 1

    # sums

    @property
    def sums(self) -> tuple[int, ...] | None:
        """The tensors' checksums when they had just been loaded, if they were computed."""
        return tuple(self._sums) if self._fields[_HAS_SUMS] else None

    def store_sums(self, sums: Sequence[int]) -> None:
        """Once they are known to be right."""
        for number, value in enumerate(sums):
            self._sums[number] = value
        self._fields[_HAS_SUMS] = 1

    # the writer's lock

    def try_lock(self) -> int | None:
        """A descriptor that holds the lock until its last copy is closed; None while another process has it.

        A fork inherits it: the master locks for the loader, forks, and closes its own.
        """
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)  # a duplicate would share the lock
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd
