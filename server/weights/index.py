"""The checkpoint: found, every shard verified, every tensor that the model needs there once and of the right shape.

Knows config facts, the layout's sources and the stored tensors; allocates nothing, writes nothing, imports no torch.
"""

import dataclasses
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.models.facts import DType, ModelFacts, facts_from_config
from server.weights.folder import CONFIG_FILE, HubAccess, find_folder
from server.weights.layout import source_shapes, weight_layout
from server.weights.shard import FileIdentity, SourceTensor
from server.weights.shard_index import StoredTensors, name_some, read_json, read_tensors

STORED_DTYPES: dict[str, DType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HEAD = "lm_head.weight"
# Tensors of this model family. One that config.json does not call for means that it belongs to another checkpoint.
_FAMILY_TENSOR = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|mlp\.(gate|up|down)_proj\.(weight|bias)|(input|post_attention)_layernorm\.weight)"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: `tensors` holds exactly what the layout of `facts` is filled from.

    `identities` says what each file was when it was verified, so that the loader notices an exchange.
    """

    folder: Path
    facts: ModelFacts
    tensors: dict[str, SourceTensor]
    identities: dict[Path, FileIdentity]


def open_checkpoint(path: str, revision: str, hub: HubAccess) -> Checkpoint:
    """Find and verify the checkpoint of a folder, a hub cache folder or a hub id.

    The weights' own dtype is served, whatever config.json says. With a tied head the embedding is the head: a stored
    head is ignored, with a warning. Raises StartupError with file, tensor, expected and found.
    """
    try:
        folder = find_folder(path, revision, hub)
        config = read_json(folder / CONFIG_FILE)
        facts = _facts(folder, config)
        stored = read_tensors(folder)
    except OSError as error:  # a folder that may not be searched or listed
        raise StartupError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    tensors = _needed(folder, facts, stored)
    dtype = _common_dtype(folder, tensors)
    if dtype != facts.dtype:
        logger.warning("%s: the weights are %s, config.json says %s: %s is served", folder, dtype, facts.dtype, dtype)
        facts = dataclasses.replace(facts, dtype=dtype)
    return Checkpoint(folder, facts, tensors, stored.identities)


def _facts(folder: Path, config: dict[str, object]) -> ModelFacts:
    try:
        return facts_from_config(config)
    except StartupError as error:
        raise StartupError(f"{folder}/{error}") from error  # its message begins with config.json


def _needed(folder: Path, facts: ModelFacts, stored: StoredTensors) -> dict[str, SourceTensor]:
    shapes = source_shapes(weight_layout(facts))
    missing = sorted(shapes.keys() - stored.tensors.keys())
    if missing:
        hint = "; config.json says that the head is not tied to the embedding" if _HEAD in missing else ""
        raise StartupError(
            f"{folder}: {len(missing)} of {len(shapes)} tensors that config.json calls for are missing: "
            f"{name_some(missing)} (expected shape of the first: {list(shapes[missing[0]])}){hint}"
        )
    for name, shape in shapes.items():
        found = stored.tensors[name]
        if found.shape != shape:
            raise StartupError(
                f"{found.file}: tensor {name!r}: shape {list(shape)} expected from config.json, "
                f"{list(found.shape)} found"
            )
    _judge_extra_tensors(folder, facts, {name: t for name, t in stored.tensors.items() if name not in shapes})
    return {name: stored.tensors[name] for name in shapes}


def _judge_extra_tensors(folder: Path, facts: ModelFacts, extra: dict[str, SourceTensor]) -> None:
    """Refuse what would be computed with by another config; warn about the rest, which is ignored."""
    for name, tensor in extra.items():
        if _FAMILY_TENSOR.fullmatch(name):
            raise StartupError(
                f"{tensor.file}: tensor {name!r} is found, but config.json ({facts.architecture}, "
                f"{facts.num_layers} layers) has no use for it: config and weights do not belong together"
            )
    if _HEAD in extra:
        logger.warning(
            "%s: tensor %r in %s is ignored and was not compared: config.json says that the head is the embedding",
            folder,
            _HEAD,
            extra[_HEAD].file.name,
        )
    strays = sorted(extra.keys() - {_HEAD})
    if strays:
        logger.warning("%s: ignored, %d unknown tensors: %s", folder, len(strays), name_some(strays))


def _common_dtype(folder: Path, tensors: dict[str, SourceTensor]) -> DType:
    """The one dtype of all tensors. Raises StartupError for a mixture and for dtypes that are not served."""
    most_common = Counter(tensor.dtype for tensor in tensors.values()).most_common(1)[0][0]
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            raise StartupError(
                f"{tensor.file}: tensor {name!r}: dtype {' or '.join(STORED_DTYPES)} expected, {tensor.dtype} found"
            )
        if tensor.dtype != most_common:
            target = STORED_DTYPES.get(most_common, "bfloat16")
            raise StartupError(
                f"{tensor.file}: tensor {name!r}: dtype {most_common} expected as most others have, {tensor.dtype} "
                f"found; make them equal with `model-server convert {folder} OUT --dtype {target}`"
            )
    return STORED_DTYPES[most_common]
