"""Tells when Python had to compile what it imported: 2 s of a start for the HTTP side, 3 s more for PyTorch.

Looks at files of modules that are loaded anyway; a few stand for all.
"""

import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from server.launch.stages import IMPORTED_AT

logger = logging.getLogger(__name__)

HTTP_SAMPLE = ("fastapi.applications", "pydantic.main", "server.api.app")
TORCH_SAMPLE = ("torch._tensor", "server.ops.torch.operations")


def warn_if_compiled(sample: Iterable[str], cost: str, since: float = IMPORTED_AT) -> None:
    """Log a warning if one of the loaded modules in `sample` has no bytecode, or only since `since`.

    `cost`: what compiling takes, in words. `since`: time.monotonic(); not when the process started, which may have
    been a shell that installed and compiled everything before it became Python.
    """
    wall_since = time.time() - time.monotonic() + since
    states = {name: _state(name, wall_since) for name in sample}
    missing, fresh = ([name for name in states if states[name] == state] for state in ("missing", "fresh"))
    if missing:
        why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "its folders cannot be written"
        logger.warning(
            "no bytecode of %s: compiling costs %s at every start, and %s; run `python -m compileall` on the packages",
            ", ".join(missing),
            cost,
            why,
        )
    elif fresh:
        logger.warning("compiled %s at this start, which cost %s; the next one finds bytecode", ", ".join(fresh), cost)


def _state(name: str, wall_since: float) -> str | None:
    """ "missing", "fresh", or None: it was there before, or the module has no source."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or spec.cached is None:
        return None
    try:
        return "fresh" if Path(spec.cached).stat().st_mtime >= wall_since else None
    except OSError:
        return "missing"
