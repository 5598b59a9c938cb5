"""`model-server serve`: turns arguments into the environment that gunicorn.conf.py reads, and becomes gunicorn."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import server
from server.errors import StartupError
from server.settings.load import CONFIG_VARIABLE, OVERRIDES_VARIABLE, PROFILE_VARIABLE

_PATH_KEYS = ("model.path", "server.runtime_dir")  # the model first, here and below
_PATH_VARIABLES = ("MODEL_SERVER_MODEL__PATH", "MODEL_SERVER_SERVER__RUNTIME_DIR", CONFIG_VARIABLE)


def exec_gunicorn(profile: str, overrides: Mapping[str, object], assignments: Sequence[str]) -> None:
    """Never returns on success. `assignments` are those of `--set`."""
    merged = merge_assignments(overrides, assignments)
    if profile:
        os.environ[PROFILE_VARIABLE] = profile
    _change_folder(merged)
    if merged:
        os.environ[OVERRIDES_VARIABLE] = json.dumps(merged)
    os.execv(sys.executable, [sys.executable, "-m", "gunicorn", "-c", str(gunicorn_config())])  # noqa: S606


def merge_assignments(overrides: Mapping[str, object], assignments: Sequence[str]) -> dict[str, object]:
    """`assignments` are "section.field=value" and win over `overrides`. Raises StartupError for anything else."""
    merged = dict(overrides)
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise StartupError(f"--set {assignment}: expected SECTION.FIELD=VALUE")
        merged[key] = value
    return merged


def _change_folder(overrides: dict[str, object]) -> None:
    """Go to the folder that profiles mean their paths from; the caller's relative paths stay what they were.

    It also is the one folder that gunicorn may put in front of the import path: elsewhere a folder named server,
    whoever's it is, would be imported in place of ours.
    """
    overrides.update({key: _absolute(key, str(overrides[key])) for key in _PATH_KEYS if overrides.get(key)})
    os.environ.update({name: _absolute(name, os.environ[name]) for name in _PATH_VARIABLES if os.environ.get(name)})
    os.chdir(Path(server.__file__).parents[1])


def _absolute(name: str, path: str) -> str:
    """The same place, wherever one stands. A model that is not here may be a hub id, and stays."""
    may_be_hub_id = name in (_PATH_KEYS[0], _PATH_VARIABLES[0])
    return path if may_be_hub_id and not Path(path).exists() else str(Path(path).absolute())


def gunicorn_config() -> Path:
    """gunicorn.conf.py of a checkout, or the copy inside an installed wheel."""
    package = Path(server.__file__).parent
    candidates = (package.parent / "gunicorn.conf.py", package / "gunicorn.conf.py")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise StartupError(f"gunicorn.conf.py not found: looked at {', '.join(map(str, candidates))}")
