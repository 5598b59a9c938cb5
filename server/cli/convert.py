"""`model-server convert`: a checkpoint in another dtype."""

import os
from pathlib import Path

from server.weights.convert import convert_checkpoint, parse_dtype
from server.weights.folder import HubAccess, find_folder


def convert(source: Path, target: Path, dtype: str) -> None:
    """Write the checkpoint `source` (a folder, a hub cache folder or a hub id) as the new folder `target` in `dtype`.

    Safetensors to safetensors; tokenizer and config files come along. Raises StartupError, and leaves nothing behind,
    when the source is broken, when a value does not fit the dtype, or when `target` exists.
    """
    parsed = parse_dtype(dtype)
    convert_checkpoint(find_folder(str(source), "main", HubAccess.from_environment(os.environ)), target, parsed)
    print(f"{target}: written in {parsed}")
