"""How much of some files lies in the page cache, shown by the kernel itself; and ways to put them in or out of it.

mincore tells the truth about files that the caller owns or may write; of others it calls every page resident.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from server.weights.threads import for_each

_PAGE = mmap.PAGESIZE
_CHUNK_BYTES = 4 << 20
_NUM_READERS = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_share(paths: Sequence[Path]) -> float:
    """Share of the files' pages that are in memory, 0 to 1. Raises OSError."""
    num_resident = num_pages = 0
    for path in paths:
        flags = _residency(path)
        num_resident += flags.translate(_LOWEST_BIT).count(1)
        num_pages += len(flags)
    return num_resident / num_pages if num_pages else 1.0


_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the other bits of mincore's answer mean nothing


def _residency(path: Path) -> bytes:
    """A byte per page."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if not num_bytes:
            return b""
        # Not Python's own mmap: it hides the address of a read-only mapping.
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "cannot be mapped", str(path))
        try:
            flags = ctypes.create_string_buffer(-(-num_bytes // _PAGE))
            if _libc.mincore(address, num_bytes, flags):
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
            return flags.raw
        finally:
            _libc.munmap(address, num_bytes)


def evict(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the files; what was not written back yet is written first."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(paths: Sequence[Path], max_bytes: int | None = None) -> float:
    """Read the files, or as much of them, with several threads; bytes per second, from wherever they came."""
    chunks = [(path, offset) for path in paths for offset in range(0, path.stat().st_size, _CHUNK_BYTES)]
    if max_bytes is not None:
        chunks = chunks[: max(1, max_bytes // _CHUNK_BYTES)]
    fds = {path: os.open(path, os.O_RDONLY) for path in paths}
    num_read = [0] * len(chunks)

    def read(number: int) -> None:
        path, offset = chunks[number]
        num_read[number] = os.preadv(fds[path], [bytearray(_CHUNK_BYTES)], offset)

    begin = time.monotonic()
    try:
        for_each(read, range(len(chunks)), _NUM_READERS)
    finally:
        for fd in fds.values():
            os.close(fd)
    return sum(num_read) / max(time.monotonic() - begin, 1e-9)
