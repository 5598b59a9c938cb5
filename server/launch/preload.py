"""What gunicorn.conf.py needs: the environment before any heavy import, and Gunicorn's settings computed from ours.

The file is executed again by --check-config, so nothing here claims a resource.
"""

import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from math import ceil

from server.errors import StartupError
from server.launch.board import ExitCode
from server.launch.garbage import pause_collector
from server.launch.runtime_dir import RuntimeDir
from server.settings.load import load_settings
from server.settings.resolve import runtime_dir, stop_timeouts
from server.settings.schema import Settings

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (Gunicorn makes the names, and unlinks them at once)
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start a thread per core at import, in a process that forks
    "OMP_NUM_THREADS": "1",  # the model worker sets its own number after its fork
    # Threads that spin at a barrier while the one they wait for has no core made 14 steps/s of 118 on a busy machine.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for devices must not create a context
    "CUDA_MODULE_LOADING": "LAZY",
}


@dataclass(frozen=True, slots=True)
class GunicornOptions:
    """Named as in Gunicorn. The three graceful limits are in seconds from SIGTERM."""

    bind: str
    workers: int
    proc_name: str
    worker_tmp_dir: str | None
    keepalive: int
    timeout: int
    dirty_timeout: int
    dirty_graceful_timeout: int
    graceful_timeout: int
    loglevel: str


@cache
def load_once() -> Settings:
    """The settings of this process. Raises StartupError."""
    return load_settings()


def gunicorn_options() -> GunicornOptions:
    """Gunicorn's settings. A permanent fault ends the process with exit code 4 and one line."""
    pause_collector()
    for signal_number in (signal.SIGTERM, signal.SIGINT):  # until Gunicorn has its own: there is nothing to drain yet
        signal.signal(signal_number, lambda *_: os._exit(ExitCode.STOPPED))
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)  # would widen what a run-time build compiles for
    try:
        return _options(load_once())
    except StartupError as error:
        print(f"model-server cannot start: {error}", file=sys.stderr, flush=True)  # noqa: T201 (no logger yet)
        raise SystemExit(ExitCode.PERMANENT) from None


def _options(settings: Settings) -> GunicornOptions:
    server, limits = settings.server, stop_timeouts(settings.server)
    host = f"[{server.host}]" if ":" in server.host else server.host
    return GunicornOptions(
        bind=f"{host}:{server.port}",
        workers=server.web_workers,
        proc_name=RuntimeDir(runtime_dir(server)).proc_name,
        # Heartbeat files on a real disk would block a worker whenever the disk is busy.
        worker_tmp_dir=_SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None,
        keepalive=server.keep_alive_s,
        timeout=server.worker_timeout_s,
        dirty_timeout=max(server.worker_timeout_s, ceil(settings.engine.watchdog_s) + 1),
        dirty_graceful_timeout=limits.dirty_s,
        graceful_timeout=limits.master_s,
        loglevel=server.log_level,
    )
