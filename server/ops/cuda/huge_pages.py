"""Host memory in huge pages, all there from the start: to be page-locked, which is then a matter of a few pages.

Knows Linux' mmap and madvise. Where there are no huge pages it is ordinary memory.
"""

import ctypes
import mmap

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class HugePages:
    """`num_bytes` from `address` on, which begins a huge page. Given back when neither this nor a view is left."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        offset = self.address - begin
        self.view = memoryview(self._mapping)[offset : offset + num_bytes]
        madvise = ctypes.CDLL(None).madvise
        # Advice: where it is unknown, pages come when they are touched.
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(num_bytes), advice)
