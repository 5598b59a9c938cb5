"""Fetches one model from the hub into its cache: python -m server.weights.download HUB_ID REVISION CACHE PARENT.

A program of its own, because huggingface_hub starts threads and takes a second to import. Prints the snapshot's folder,
or the reason of a failure and ends with 1.
"""

import logging
import sys

from huggingface_hub import snapshot_download

from server.launch.parent_death import die_with_parent

# The weights and what the tokenizer needs; never .bin, never code.
PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]

logger = logging.getLogger(__name__)


def main(hub_id: str, revision: str, cache: str) -> int:
    """Download and print where it lies. Returns the exit status."""
    try:
        folder = snapshot_download(hub_id, revision=revision, cache_dir=cache, allow_patterns=PATTERNS)
    except Exception as error:
        if not isinstance(error, OSError):  # no network, no such model, no access, no space: the reason says it all
            logger.exception("download of %s failed", hub_id)
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        sys.stdout.write(f"{type(error).__name__}: {first_line}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))  # a killed master leaves nobody behind
    sys.exit(main(*sys.argv[1:4]))
