"""Lets the C heap grow once, in huge pages, while something large is built of a million small pieces.

A tokenizer of 150,000 tokens touches 25,000 pages, and each would be a fault. Knows glibc; elsewhere it does nothing.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_TOP_PAD_BYTES = 128 << 10  # glibc's default
# NOTE: whoever sets one of the three ends glibc's own growth of the other two, for the whole process and its forks. At
# their first values each buffer of 128 KiB or more would be mapped anew, and faulted in, for 0.7 ms a MiB.
_LATER_MMAP_BYTES, _LATER_TRIM_BYTES = 4 << 20, 8 << 20
_HUGE_PAGE_BYTES = 2 << 20
_PROBE_BYTES = 100 << 10  # below what malloc would map apart
_MAX_BYTES = 1 << 30
_NUM_PROBES = 3  # more than fits into what the heap has left before it grows


@contextmanager
def huge_heap(num_bytes: int) -> Iterator[None]:
    """In the block about `num_bytes` of small allocations come from huge pages. What is not in use then goes back."""
    libc = ctypes.CDLL(None)
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_TOP_PAD, min(num_bytes, _MAX_BYTES))
    libc.mallopt(_M_TRIM_THRESHOLD, _MAX_BYTES)
    try:
        _grow(libc)
        yield
    finally:
        libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _LATER_MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _LATER_TRIM_BYTES)
        libc.malloc_trim(ctypes.c_size_t(0))  # 1 ms; returns 100 MB after an 11 MB file


def _grow(libc: ctypes.CDLL) -> None:
    """Make malloc extend the heap by the pad, and ask for huge pages there before anything touches it."""
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    begin = libc.sbrk(0)
    probes = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(_PROBE_BYTES))) for _ in range(_NUM_PROBES)]
    end = libc.sbrk(0)
    for probe in probes:
        libc.free(probe)
    begin = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if end > begin:
        # Refused where the kernel has none: then it is as slow as before.
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
