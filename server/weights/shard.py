"""One safetensors file: its header, checked to the last byte before anything trusts it.

Knows the format (https://github.com/huggingface/safetensors#format) and what people find in its place; does not know
models. Only reads, and only the header.
"""

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from server.errors import StartupError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LENGTH_BYTES = 8
_SNIFF_BYTES = 512

# Bytes per element by the format's names. Types that are not here are left to whoever needs such a tensor.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip

# What is found where a safetensors file should be, by its first bytes.
_IMPOSTORS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the weights themselves; run `git lfs pull` in the folder"),
    (b"PK\x03\x04", "a zip archive as torch.save writes it (a pickle, which can run code); convert it to safetensors"),
    (b"\x80", "a pickle, which can run code and is never loaded; convert it to safetensors"),
    (b"<", "an HTML or XML page, probably the error page of a download"),
    (b"{", "JSON text, probably the error message of a download"),
    (b"GGUF", "a GGUF file; the safetensors checkpoint is needed"),
    (b"\x89HDF", "an HDF5 file; the safetensors checkpoint is needed"),
    (b"\0" * _LENGTH_BYTES, "zeros at its beginning, probably an unfinished download"),
)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells whether a file is still the one that was verified."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """The identity that a stat or fstat shows."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """`num_bytes` at byte `offset` of `file`: a row-major tensor. `dtype` is the format's name, such as "BF16"."""

    file: Path
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A verified file and its tensors by name, in file order."""

    file: Path
    identity: FileIdentity
    tensors: dict[str, SourceTensor]


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


def read_shard(file: Path) -> Shard:
    """Read and check one file. Raises StartupError with the file, what was expected and what was found."""
    fd = open_regular(file)
    try:
        identity = FileIdentity.of(os.fstat(fd))
        header, data_offset = _read_header(file, fd, identity.num_bytes)
    except OSError as error:
        raise StartupError(f"{file}: cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        msgspec.json.decode(fields.pop("__metadata__", b"{}"), type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise StartupError(f"{file}: the safetensors header is not valid JSON: {error}") from error
    tensors = {name: _source_tensor(file, name, raw, data_offset) for name, raw in fields.items()}
    return Shard(file, identity, _in_file_order(file, tensors, data_offset, identity.num_bytes))


def open_regular(file: Path) -> int:
    """A read-only descriptor of a regular file. Raises StartupError that names a dangling link or a missing right."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # before opening: opening a pipe would wait for its writer
            raise StartupError(f"{file}: is not a regular file")
        return os.open(file, os.O_RDONLY)
    except FileNotFoundError as error:
        if file.is_symlink():
            raise StartupError(f"{file}: is a dangling link; its target {file.readlink()} does not exist") from error
        raise StartupError(f"{file}: does not exist") from error
    except PermissionError as error:
        raise StartupError(f"{file}: permission denied for user id {os.geteuid()}; it must be readable") from error
    except OSError as error:
        raise StartupError(f"{file}: cannot be opened: {error.strerror}") from error


def _read_header(file: Path, fd: int, file_bytes: int) -> tuple[bytes, int]:
    """The header's JSON and the offset of the data behind it."""
    begin = os.pread(fd, _SNIFF_BYTES, 0)
    header_bytes = int.from_bytes(begin[:_LENGTH_BYTES], "little")
    data_offset = _LENGTH_BYTES + header_bytes
    if header_bytes > MAX_HEADER_BYTES or begin[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        # NOTE: only now: a good file may well begin with 0x80, as the low byte of its header's length.
        raise StartupError(f"{file}: is not a safetensors file but {_describe(begin)}")
    if data_offset > file_bytes:
        raise StartupError(
            f"{file}: is truncated inside its header: at least {data_offset} bytes expected, {file_bytes} found"
        )
    header = bytearray()
    while len(header) < header_bytes:
        piece = os.pread(fd, header_bytes - len(header), _LENGTH_BYTES + len(header))
        if not piece:
            raise StartupError(f"{file}: became shorter while its header was read")
        header += piece
    return bytes(header), data_offset


def _describe(begin: bytes) -> str:
    if len(begin) <= _LENGTH_BYTES:
        return f"only {len(begin)} bytes long, probably an unfinished download"
    text = begin.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, meaning in _IMPOSTORS:
        if begin.startswith(magic) or (magic in (b"<", b"{") and text.startswith(magic)):
            return meaning
    return f"something else (its first bytes are {begin[:_LENGTH_BYTES].hex(' ')})"


def _source_tensor(file: Path, name: str, raw: bytes, data_offset: int) -> SourceTensor:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.MsgspecError as error:
        raise StartupError(f"{file}: the header's entry of tensor {name!r} is malformed: {error}") from error
    begin, end = entry.data_offsets
    element_bytes = ELEMENT_BYTES.get(entry.dtype)
    expected = None if element_bytes is None else math.prod(entry.shape) * element_bytes
    if end < begin or expected not in (None, end - begin):
        raise StartupError(
            f"{file}: tensor {name!r}: shape {list(entry.shape)} of {entry.dtype} needs {expected} bytes, "
            f"its offsets are {begin} to {end}"
        )
    return SourceTensor(file, data_offset + begin, end - begin, entry.shape, entry.dtype)


def _in_file_order(
    file: Path, tensors: dict[str, SourceTensor], data_offset: int, file_bytes: int
) -> dict[str, SourceTensor]:
    """Check that the tensors cover the data exactly: no hole, no overlap, nothing behind the last one."""
    end = data_offset
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)))
    for name, tensor in ordered.items():
        if tensor.offset != end:
            fault = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise StartupError(f"{file}: tensor {name!r} {fault}: offset {end} expected, {tensor.offset} found")
        end += tensor.num_bytes
    if end != file_bytes:
        fault = "is truncated" if file_bytes < end else "has bytes behind its last tensor"
        raise StartupError(
            f"{file}: {fault}: {end} bytes expected from its header, {file_bytes} found; download it again"
        )
    return ordered
