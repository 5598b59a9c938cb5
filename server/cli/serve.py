"""`model-server serve`: turns arguments into the environment that gunicorn.conf.py reads, and becomes gunicorn."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import server
from server.errors import StartupError
from server.settings.load import OVERRIDES_VARIABLE, PROFILE_VARIABLE


def exec_gunicorn(profile: str, overrides: Mapping[str, object], assignments: Sequence[str]) -> None:
    """Never returns on success. `assignments` are "section.field=value" and win over `overrides`."""
    merged = dict(overrides)
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or "." not in key:
            raise StartupError(f"--set {assignment}: expected SECTION.FIELD=VALUE")
        merged[key] = value
    if profile:
        os.environ[PROFILE_VARIABLE] = profile
    if merged:
        os.environ[OVERRIDES_VARIABLE] = json.dumps(merged)
    os.execv(sys.executable, [sys.executable, "-m", "gunicorn", "-c", str(gunicorn_config())])  # noqa: S606


def gunicorn_config() -> Path:
    """gunicorn.conf.py of a checkout, or the copy inside an installed wheel."""
    package = Path(server.__file__).parent
    candidates = (package.parent / "gunicorn.conf.py", package / "gunicorn.conf.py")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise StartupError(f"gunicorn.conf.py not found: looked at {', '.join(map(str, candidates))}")
