"""Which bytes of which file go where in the weight allocation.

Knows the layout and the checkpoint's offsets; reads nothing.
"""

from pathlib import Path
from typing import NamedTuple

from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout


class Copy(NamedTuple):
    """`num_bytes` from byte `file_offset` of `file` to byte `dest_offset` of the allocation."""

    file: Path
    file_offset: int
    num_bytes: int
    dest_offset: int

    @property
    def file_end(self) -> int:
        """The byte behind the last one in the file."""
        return self.file_offset + self.num_bytes

    @property
    def dest_end(self) -> int:
        """The byte behind the last one in the allocation."""
        return self.dest_offset + self.num_bytes


def copy_plan(layout: WeightLayout, checkpoint: Checkpoint) -> tuple[Copy, ...]:
    """Every byte of every tensor of `layout` once, in file order; what is adjacent on both sides is one copy."""
    copies: list[Copy] = []
    for spec in layout.tensors:
        for segment in spec.segments:
            source = checkpoint.tensors[segment.source]
            file_offset = source.offset + segment.source_row * spec.row_bytes
            dest_offset = spec.offset + segment.dest_row * spec.row_bytes
            copies.append(Copy(source.file, file_offset, segment.num_rows * spec.row_bytes, dest_offset))
    copies.sort(key=lambda copy: (copy.file, copy.file_offset))
    return tuple(_coalesce(copies))


def _coalesce(copies: list[Copy]) -> list[Copy]:
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if last and (last.file, last.file_end, last.dest_end) == (copy.file, copy.file_offset, copy.dest_offset):
            merged[-1] = Copy(last.file, last.file_offset, last.num_bytes + copy.num_bytes, last.dest_offset)
        else:
            merged.append(copy)
    return merged


def split(copies: tuple[Copy, ...], max_bytes: int) -> list[Copy]:
    """The same copies in pieces of at most `max_bytes`, in the same order."""
    return [
        Copy(copy.file, copy.file_offset + begin, min(max_bytes, copy.num_bytes - begin), copy.dest_offset + begin)
        for copy in copies
        for begin in range(0, copy.num_bytes, max_bytes)
    ]
