"""Writes a checkpoint again in another dtype, shard by shard in small pieces: memory stays bounded whatever the model.

Knows stored tensors and rounding; does not know models, so it also takes checkpoints that are not served, such as those
of mixed dtypes. Values that the new dtype cannot hold are refused.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.models.facts import DTYPE_BYTES, DType
from server.weights.checksum import partial_sum
from server.weights.checksum_file import CHECKSUM_FILE, ChecksumCollector
from server.weights.copy_plan import Copy
from server.weights.folder import CONFIG_FILE
from server.weights.index import STORED_DTYPES
from server.weights.loader import read_fully
from server.weights.rounding import LARGEST, STORED_NAMES, first_overflow, from_float32, to_float32
from server.weights.shard import ELEMENT_BYTES, SourceTensor, open_regular
from server.weights.shard_index import INDEX_FILE, read_json, read_tensors
from server.weights.threads import for_each
from server.weights.writer import PlannedFile, create_file, new_folder, plan_file, write_fully, write_index, write_json

PIECE_ELEMENTS = 1 << 20  # times about 12 bytes and the number of threads: the memory needed
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")  # tokenizer, templates, cards; no weights, no code
_WRITTEN_ANEW = (CONFIG_FILE, INDEX_FILE, CHECKSUM_FILE)
_UNTOUCHED = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some elements of one tensor, from the source file to the new one's byte `dest_offset`.

    That is byte `dest_begin` of the new tensor.
    """

    tensor_name: str
    dtype: str
    source: Copy
    dest_begin: int

    @property
    def dest_offset(self) -> int:
        """In the new file."""
        return self.source.dest_offset


def parse_dtype(name: str) -> DType:
    """The dtype of this name. Raises StartupError with the list."""
    for dtype in DTYPE_BYTES:
        if name == dtype:
            return dtype
    raise StartupError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")


def convert_checkpoint(folder: Path, target: Path, dtype: DType) -> None:
    """Write `folder`'s checkpoint as `target` (a new folder) with all floating-point tensors in `dtype`.

    Raises StartupError when the source is broken, when a value overflows (naming its tensor), or when `target` exists.
    """
    config = read_json(folder / CONFIG_FILE)
    stored = read_tensors(folder)
    by_file: dict[Path, dict[str, SourceTensor]] = {file: {} for file in stored.identities}
    for name, tensor in stored.tensors.items():
        by_file[tensor.file][name] = tensor
    plans = {file.name: _plan(tensors, dtype) for file, tensors in by_file.items()}
    checksums = ChecksumCollector()
    with new_folder(target) as partial:
        _copy_other_files(folder, partial)
        for file, tensors in by_file.items():
            _convert_file(file, tensors, partial / file.name, plans[file.name], dtype, checksums)
        checksums.write(partial)
        write_index(partial, plans)
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        write_json(partial / CONFIG_FILE, config | dict.fromkeys(keys, dtype))


def _plan(tensors: dict[str, SourceTensor], dtype: DType) -> PlannedFile:
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES and tensor.dtype not in _UNTOUCHED:
            expected = ", ".join([*STORED_DTYPES, "integers"])
            raise StartupError(f"{tensor.file}: tensor {name!r}: {expected} can be converted, {tensor.dtype} found")
    return plan_file(
        {n: (STORED_NAMES[dtype] if t.dtype in STORED_DTYPES else t.dtype, t.shape) for n, t in tensors.items()}
    )


def _convert_file(
    file: Path,
    tensors: dict[str, SourceTensor],
    target: Path,
    plan: PlannedFile,
    dtype: DType,
    checksums: ChecksumCollector,
) -> None:
    source_fd = open_regular(file)

    def convert(piece: _Piece) -> None:
        data = _converted(source_fd, piece, dtype)
        write_fully(target_fd, data, piece.dest_offset)
        checksums.add(piece.tensor_name, partial_sum(data, piece.dest_begin))

    try:
        with create_file(target, plan) as target_fd:
            for_each(convert, _pieces(tensors, plan))
    finally:
        os.close(source_fd)


def _pieces(tensors: dict[str, SourceTensor], plan: PlannedFile) -> Iterator[_Piece]:
    for planned in plan.tensors:
        tensor = tensors[planned.name]
        source_bytes, dest_bytes = ELEMENT_BYTES[tensor.dtype], ELEMENT_BYTES[planned.dtype]
        num_elements = tensor.num_bytes // source_bytes
        for begin in range(0, num_elements, PIECE_ELEMENTS):
            num_bytes = min(PIECE_ELEMENTS, num_elements - begin) * source_bytes
            dest_begin = begin * dest_bytes
            source = Copy(tensor.file, tensor.offset + begin * source_bytes, num_bytes, planned.offset + dest_begin)
            yield _Piece(planned.name, tensor.dtype, source, dest_begin)


def _converted(source_fd: int, piece: _Piece, dtype: DType) -> memoryview:
    """The piece's bytes in the new dtype. Raises StartupError if a value does not fit."""
    data = bytearray(piece.source.num_bytes)
    read_fully(source_fd, memoryview(data), piece.source)
    if piece.dtype not in STORED_DTYPES or STORED_DTYPES[piece.dtype] == dtype:
        return memoryview(data)
    values = to_float32(data, STORED_DTYPES[piece.dtype])
    rounded = from_float32(values, dtype)
    overflow = first_overflow(values, rounded, dtype)
    if overflow is not None:
        raise StartupError(
            f"{piece.source.file}: tensor {piece.tensor_name!r}: the value {overflow:g} does not fit {dtype}, whose "
            f"largest is {LARGEST[dtype]:g}; choose another dtype"
        )
    return memoryview(rounded.tobytes())


def _copy_other_files(folder: Path, target: Path) -> None:
    for file in sorted(folder.iterdir()):
        is_text = file.suffix in _COPIED_SUFFIXES or file.name.startswith(("LICENSE", "NOTICE"))
        if is_text and file.is_file() and file.name not in _WRITTEN_ANEW:
            shutil.copyfile(file, target / file.name)
