"""Which safetensors files of a folder make up the checkpoint, and all their tensors, each exactly once.

Knows model.safetensors and model.safetensors.index.json; does not know what a model needs. Only reads.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from server.errors import StartupError
from server.weights.shard import FileIdentity, SourceTensor, open_regular, read_shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 256 << 20
_NUM_NAMED = 5  # how many names a message lists

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Every tensor of the checkpoint's files by name, and the identity that each file had when it was verified."""

    tensors: dict[str, SourceTensor]
    identities: dict[Path, FileIdentity]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_json(file: Path) -> dict[str, object]:
    """A JSON object of a checkpoint folder. Raises StartupError with the file and the place of the fault."""
    return _decode(file, dict[str, object])


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights, each with the tensor names that the index expects in it; None: no index.

    Raises StartupError when there are none, when the index is broken, or when a file that it names is missing.
    """
    index_file, single_file = folder / INDEX_FILE, folder / SINGLE_FILE
    if not os.path.lexists(index_file):
        if not os.path.lexists(single_file):
            raise StartupError(f"{folder}: {_why_no_weights(folder)}")
        _warn_about_other_files(folder, {SINGLE_FILE})
        return {single_file: None}
    names_by_file: dict[str, set[str]] = {}
    for tensor_name, file_name in _decode(index_file, _Index).weight_map.items():
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise StartupError(
                f"{index_file}: tensor {tensor_name!r} lies in {file_name!r}; the plain name of a .safetensors file "
                f"is expected"
            )
        names_by_file.setdefault(file_name, set()).add(tensor_name)
    missing = sorted(name for name in names_by_file if not os.path.lexists(folder / name))
    if missing or not names_by_file:
        raise StartupError(
            f"{index_file}: {len(missing)} of {len(names_by_file)} files that it names are missing: "
            f"{name_some(missing)}; download the model again"
        )
    if os.path.lexists(single_file) and SINGLE_FILE not in names_by_file:
        raise StartupError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE} with other files; remove what is not wanted"
        )
    _warn_about_other_files(folder, set(names_by_file))
    return {folder / name: names_by_file[name] for name in sorted(names_by_file)}


def read_tensors(folder: Path) -> StoredTensors:
    """Verify every file of the checkpoint. Raises StartupError with file, tensor, expected and found."""
    tensors: dict[str, SourceTensor] = {}
    identities: dict[Path, FileIdentity] = {}
    for file, expected_names in weight_files(folder).items():
        shard = read_shard(file)
        identities[file] = shard.identity
        absent = sorted((expected_names or set()) - shard.tensors.keys())
        if absent:
            raise StartupError(
                f"{folder / INDEX_FILE}: is stale: {len(absent)} tensors should lie in {file.name} and do not: "
                f"{name_some(absent)}"
            )
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise StartupError(f"tensor {name!r} is stored twice, in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    return StoredTensors(tensors, identities)


def name_some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _decode(file: Path, type_: type[_T]) -> _T:
    fd = open_regular(file)
    try:
        with os.fdopen(fd, "rb") as stream:
            return msgspec.json.decode(stream.read(MAX_JSON_BYTES), type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{file}: is not valid: {error}") from error
    except OSError as error:
        raise StartupError(f"{file}: cannot be read: {error.strerror}") from error


def _warn_about_other_files(folder: Path, used: set[str]) -> None:
    others = sorted({file.name for file in folder.glob("*.safetensors")} - used)
    if others:
        logger.warning("%s: ignored, not part of the checkpoint: %s", folder, name_some(others))


def _why_no_weights(folder: Path) -> str:
    """Say what is there instead."""
    found = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf"))
    if found:
        return (
            f"holds {name_some(found)} but no {SINGLE_FILE}; such files are never loaded (a pickle can run code): "
            f"get the safetensors version of the model"
        )
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        return f"holds {name_some(shards)} but neither {SINGLE_FILE} nor {INDEX_FILE}"
    return f"holds no weights: {SINGLE_FILE}, or {INDEX_FILE} and its files, are expected"
