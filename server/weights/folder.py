"""Where a checkpoint lies: a folder, a folder of the hub's cache, or a hub id that is in the cache or is downloaded.

Knows the layout of the hub's cache, so that a cached model needs neither network nor huggingface_hub. Only reads; a
download runs in a process of its own, because the library starts threads and the caller may be about to fork.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.weights.shard_index import weight_files

CONFIG_FILE = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Where the hub's cache lies, and whether the network may be used."""

    cache: Path
    is_offline: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "HubAccess":
        """The rules of huggingface_hub for HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and HF_HUB_OFFLINE."""
        base = Path(environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        home = Path(environ.get("HF_HOME") or base / "huggingface")
        cache = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
        offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
        return cls(cache.expanduser(), offline.upper() in ("1", "ON", "YES", "TRUE"))


def find_folder(path: str, revision: str, hub: HubAccess) -> Path:
    """The folder that holds config.json and the weights. Raises StartupError with what was looked for, and where.

    A complete copy in the hub's cache is taken as it is, without asking the hub for a newer one.
    """
    if not path:
        raise StartupError("model.path is empty; it must be a folder, a hub cache folder or a hub id such as org/name")
    local = Path(path).expanduser()
    if local.is_dir():
        if (local / "snapshots").is_dir() and not (local / CONFIG_FILE).exists():
            return _snapshot(local, revision)
        return local
    if local.exists() or local.is_symlink():
        raise StartupError(f"{path}: is not a folder; the folder that holds config.json and the weights is expected")
    if not _HUB_ID.fullmatch(path):
        raise StartupError(f"{path}: there is no such folder, and it is not a hub id such as org/name")
    return _from_hub(path, revision, hub)


def _snapshot(repository: Path, revision: str) -> Path:
    """The folder of one revision in a cache folder models--org--name: a branch or tag of refs/, or a commit."""
    snapshots = repository / "snapshots"
    reference = repository / "refs" / revision
    try:
        commit = reference.read_text().strip() if reference.is_file() else revision
        if commit and (snapshots / commit).is_dir():
            return snapshots / commit
        found = sorted(folder.name for folder in snapshots.iterdir())
    except OSError as error:
        raise StartupError(f"{error.filename}: cannot be read: {error.strerror}") from error
    raise StartupError(
        f"{repository}: revision {revision!r} is not in this cache folder; found: {', '.join(found) or 'nothing'}"
    )


def _from_hub(hub_id: str, revision: str, hub: HubAccess) -> Path:
    repository = hub.cache / f"models--{hub_id.replace('/', '--')}"
    cached: Path | None = None
    if (repository / "snapshots").is_dir():
        try:
            cached = _snapshot(repository, revision)
        except StartupError:
            if hub.is_offline:
                raise
    if cached is not None and (hub.is_offline or _is_complete(cached)):
        return cached
    if hub.is_offline:
        raise StartupError(
            f"{hub_id}: there is no such folder, it is not in the hub cache {hub.cache}, and the hub is not asked "
            f"because HF_HUB_OFFLINE is set"
        )
    return _download(hub_id, revision, hub.cache)


def _is_complete(snapshot: Path) -> bool:
    """Whether everything that is served is there; what is there is verified later."""
    try:
        files = [snapshot / CONFIG_FILE, snapshot / "tokenizer.json", *weight_files(snapshot)]
    except StartupError:
        return False
    return all(file.exists() for file in files)


def _download(hub_id: str, revision: str, cache: Path) -> Path:
    logger.warning("%s: no folder of this name and no complete copy in %s; asking the hub", hub_id, cache)
    command = [sys.executable, "-m", "server.weights.download", hub_id, revision, str(cache), str(os.getpid())]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - no shell, checked id
    if result.returncode:
        raise StartupError(f"{hub_id}: there is no such folder, and the hub did not give it: {result.stdout.strip()}")
    return Path(result.stdout.strip())
