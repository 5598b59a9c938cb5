"""Host memory for the weights: a memory file, so that it lives as long as any process holds the descriptor.

Knows its size and how to map it; does not know what lies in it, except that `WeightViews` finds tensors by the layout.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

from server.models.facts import DType
from server.weights.layout import WeightLayout

_NAME = "model-server-weights"


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


@dataclass(frozen=True, slots=True)
class WeightView:
    """One tensor's bytes, without copy: row-major, of `shape` and `dtype`."""

    data: memoryview
    shape: tuple[int, ...]
    dtype: DType


class WeightViews:
    """The tensors of a loaded weight memory by name. Views keep the mapping alive; the descriptor may be closed."""

    def __init__(self, fd: int, layout: WeightLayout) -> None:
        num_bytes = os.fstat(fd).st_size
        assert num_bytes == layout.total_bytes, f"memory of {num_bytes} bytes, layout of {layout.total_bytes}"
        self._layout = layout
        self._data = memoryview(map_read_only(fd))

    def __getitem__(self, name: str) -> WeightView:
        spec = self._layout[name]
        return WeightView(self._data[spec.offset : spec.offset + spec.num_bytes], spec.shape, spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self._layout.tensors)
