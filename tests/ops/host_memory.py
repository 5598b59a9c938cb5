"""Ranges of real host memory that stand for a GPU's, so that every access can be checked before it happens."""

import bisect
import ctypes
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Literal

import numpy as np

PAGE = mmap.PAGESIZE
POISON = 0xFF  # NaN in each floating-point type, -1 in the integers: what memory holds that nobody wrote
_NO_ACCESS = 0
_FIXED = 0x10  # MAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

Kind = Literal["device", "pinned"]


@dataclass(frozen=True, slots=True)
class Region:
    start: int
    end: int
    kind: Kind
    is_writable: bool
    is_shared: bool = False


class BadAccess(Exception):
    """Memory that is not there, not of that kind, or not to be written."""


class HostMemory:
    """What is allocated and mapped. Addresses are never used twice, so that use after free is always seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def allocate(self, num_bytes: int, kind: Kind) -> int:
        start = _map(0, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        ctypes.memset(start, POISON, num_bytes)
        self._add(Region(start, start + num_bytes, kind, True))
        return start

    def map_file(self, fd: int, num_bytes: int, *, writable: bool) -> int:
        if os.fstat(fd).st_size < num_bytes:
            raise BadAccess(f"the memory behind fd {fd} has {os.fstat(fd).st_size} bytes, not {num_bytes}")
        start = _map(0, num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0), mmap.MAP_SHARED, fd)
        self._add(Region(start, start + num_bytes, "device", writable, is_shared=True))
        return start

    def release(self, start: int, kind: Kind, *, is_shared: bool = False) -> int:
        """The size of what began at `start`. Its pages are given back, its addresses stay reserved."""
        with self._lock:
            index = bisect.bisect_left(self._starts, start)
            region = self._regions[index] if index < len(self._starts) else None
            if region is None or (region.start, region.kind, region.is_shared) != (start, kind, is_shared):
                raise BadAccess(f"nothing to release at {start:#x}")
            del self._starts[index], self._regions[index]
        num_bytes = region.end - region.start
        _map(start, num_bytes, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)
        return num_bytes

    def region_at(self, address: int) -> Region | None:
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            region = self._regions[index] if index >= 0 else None
        return region if region is not None and address < region.end else None

    def check(self, address: int, num_bytes: int, kind: Kind, *, write: bool) -> None:
        """Raises BadAccess unless the whole range lies in one region of that kind."""
        region = self.region_at(address)
        if region is None or region.end < address + num_bytes:
            raise BadAccess(f"{num_bytes} bytes at {address:#x} are not (all) allocated")
        if region.kind != kind:
            raise BadAccess(f"memory at {address:#x} is {region.kind} memory, not {kind}")
        if write and not region.is_writable:
            raise BadAccess(f"memory at {address:#x} is mapped read-only")

    def check_many(self, addresses: np.ndarray, item_bytes: int, *, write: bool) -> None:
        """The same for what a kernel touches at once."""
        if addresses.size == 0:
            return
        low, high = int(addresses.min()), int(addresses.max())
        region = self.region_at(low)
        if region is not None and high + item_bytes <= region.end:
            self.check(low, item_bytes, "device", write=write)
        else:  # several regions, or a fault
            for address in np.unique(addresses).tolist():
                self.check(address, item_bytes, "device", write=write)
        if int(np.bitwise_or.reduce(addresses, axis=None)) % item_bytes:
            raise BadAccess(f"an address is no multiple of {item_bytes}")

    def _add(self, region: Region) -> None:
        with self._lock:
            index = bisect.bisect_left(self._starts, region.start)
            self._starts.insert(index, region.start)
            self._regions.insert(index, region)


def _map(address: int, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    start = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if start in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap of {num_bytes} bytes")
    return int(start)
