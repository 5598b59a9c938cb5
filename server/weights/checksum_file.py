"""checksums.json beside a checkpoint: the checksum of every stored tensor, written by whoever wrote the weights.

    {"version": 1, "algorithm": "weighted-words-64", "tensors": {"model.norm.weight": "0123456789abcdef", ...}}

Knows the file; how a sum is computed is checksum.py's matter, which needs numpy and is not imported here.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from server.errors import StartupError
from server.weights.shard_index import read_json
from server.weights.writer import write_json

CHECKSUM_FILE = "checksums.json"
VERSION = 1
ALGORITHM = "weighted-words-64"
_MASK = (1 << 64) - 1


class _Content(msgspec.Struct, frozen=True):
    version: int
    algorithm: str
    tensors: dict[str, str]


class ChecksumCollector:
    """Adds up the sums of pieces as they are written, by any number of threads."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, tensor_name: str, partial_sum: int) -> None:
        """A piece of `tensor_name` was written."""
        with self._lock:
            self._sums[tensor_name] = self._sums.get(tensor_name, 0) + partial_sum & _MASK

    def write(self, folder: Path) -> None:
        """All tensors are written."""
        tensors = {name: format_sum(total) for name, total in self._sums.items()}
        write_json(folder / CHECKSUM_FILE, {"version": VERSION, "algorithm": ALGORITHM, "tensors": tensors})


def format_sum(total: int) -> str:
    """As the file and messages show it."""
    return f"{total:016x}"


def read_checksums(folder: Path, tensor_names: Iterable[str]) -> tuple[int, ...] | None:
    """The expected sums of these tensors in their order; None where the checkpoint brings no file.

    Raises StartupError if the file is broken, of another kind, or does not name a tensor.
    """
    file = folder / CHECKSUM_FILE
    if not os.path.lexists(file):  # a link to nowhere is a checkpoint that is not all there
        return None
    try:
        content = msgspec.convert(read_json(file), _Content)
    except msgspec.ValidationError as error:
        raise StartupError(f"{file}: is not valid: {error}; remove it to serve without it") from error
    if (content.version, content.algorithm) != (VERSION, ALGORITHM):
        raise StartupError(
            f"{file}: version {VERSION} and algorithm {ALGORITHM!r} expected, version {content.version} and algorithm "
            f"{content.algorithm!r} found; remove it to serve without it"
        )
    return tuple(_parse(file, name, content.tensors.get(name)) for name in tensor_names)


def _parse(file: Path, name: str, text: str | None) -> int:
    if text is None:
        raise StartupError(f"{file}: has no sum for tensor {name!r}: it belongs to other weights; remove or renew it")
    try:
        total = int(text, 16)
    except ValueError:
        total = -1
    if format_sum(total) != text:
        raise StartupError(f"{file}: tensor {name!r}: 16 hexadecimal digits expected, {text!r} found")
    return total
