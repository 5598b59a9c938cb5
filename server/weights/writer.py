"""Writes safetensors files and their index into a folder that appears only when it is complete.

Knows the file format; does not know where the bytes come from.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.weights.shard import ELEMENT_BYTES
from server.weights.shard_index import INDEX_FILE, SINGLE_FILE

_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: `num_bytes` at byte `offset` of its file. `dtype` is as the format calls it: "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file before its tensors' bytes are known."""

    header: bytes
    tensors: tuple[PlannedTensor, ...]
    num_bytes: int


def plan_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> PlannedFile:
    """The header and offsets of a file with these tensors, name -> (dtype, shape), in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    sizes: dict[str, int] = {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        sizes[name] = math.prod(shape) * ELEMENT_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + sizes[name]]}
        begin += sizes[name]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    offset = _HEADER_ALIGNMENT + len(text)
    num_bytes = offset + begin
    planned = []
    for name, (dtype, shape) in tensors.items():
        planned.append(PlannedTensor(name, dtype, shape, offset, sizes[name]))
        offset += sizes[name]
    return PlannedFile(len(text).to_bytes(_HEADER_ALIGNMENT, "little") + text, tuple(planned), num_bytes)


@contextmanager
def create_file(file: Path, plan: PlannedFile) -> Iterator[int]:
    """A descriptor of the new file, of its full size and with its header; the tensors are written by `write_fully`."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(fd, plan.num_bytes)
        write_fully(fd, memoryview(plan.header), 0)
        yield fd
    finally:
        os.close(fd)


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however short the single writes are."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def shard_name(number: int, num_shards: int) -> str:
    """The name of shard `number` (from 0), as transformers names it."""
    return SINGLE_FILE if num_shards == 1 else f"model-{number + 1:05}-of-{num_shards:05}.safetensors"


def write_index(folder: Path, plans: Mapping[str, PlannedFile]) -> None:
    """Write the index of several files, file name -> plan. One model.safetensors needs none."""
    if list(plans) == [SINGLE_FILE]:
        return
    weight_map = {tensor.name: file_name for file_name, plan in plans.items() for tensor in plan.tensors}
    total_size = sum(tensor.num_bytes for plan in plans.values() for tensor in plan.tensors)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Write JSON as transformers formats it."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` at the end, or vanishes with any exception.

    Raises StartupError if `target` exists, or if anything inside cannot be written.
    """
    if os.path.lexists(target):
        raise StartupError(f"{target}: exists already; nothing is overwritten: name a new folder")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        raise StartupError(f"{error.filename or target}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
