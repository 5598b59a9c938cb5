"""Settings become what runs: every "auto", 0 and "" turned into a choice, each logged once with its reason.

Knows the model's facts, the machine and which kernels were built. Does not know processes, files of the checkpoint or
devices' contents.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal, TypeVar

from server.errors import StartupError
from server.kernels.manifest import built_folder, read_manifest
from server.models.facts import ModelFacts
from server.ops.cuda.support import why_unsupported
from server.settings.machine import Machine
from server.settings.schema import ServerSettings, Settings

Backend = Literal["cuda", "torch"]
Device = Literal["cpu", "cuda"]

T = TypeVar("T")
_CPU_POOL_MIB = 256
_GPU_PREFILL_TOKENS = 2048
_INSTALL_CUDA = "install the extra cuda (in a clone: scripts/environment cuda build torch)"
_INSTALL_TORCH = "install the extra torch (in a clone: scripts/environment torch)"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StopTimeouts:
    """Seconds from SIGTERM on: lame_duck_s + web_s + 1 < dirty_s < master_s.

    web_s: uvicorn's timeout_graceful_shutdown; dirty_s: dirty_graceful_timeout; master_s: graceful_timeout.
    """

    lame_duck_s: float
    web_s: int
    dirty_s: int
    master_s: int


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What runs. `max_model_len` is an upper bound: the KV pool may hold less (board.max_model_len says it).

    kv_pool_bytes None: what the device leaves, known to the model worker only.
    """

    backend: Backend
    device: Device
    num_threads: int
    served_name: str
    max_model_len: int
    max_batched_tokens: int
    usual_batched_tokens: int
    max_prefill_tokens: int
    kv_pool_bytes: int | None
    stop_timeouts: StopTimeouts


def resolve(
    settings: Settings, facts: ModelFacts, machine: Machine, kernels_folder: Path | None = None
) -> ResolvedConfig:
    """Choose once, in the master. Raises StartupError when a wish cannot be met on this machine or by this model.

    `kernels_folder`: where the compiled kernels are; None: where scripts/build-kernels puts them.
    """
    device = _resolve_device(settings, machine)
    batched_tokens = _resolve_batched_tokens(settings)
    backend = _resolve_backend(settings, facts, machine, device, kernels_folder or built_folder())
    return ResolvedConfig(
        backend=backend,
        device=device,
        num_threads=_resolve_threads(settings, machine, device),
        served_name=settings.model.served_name or name_from_path(settings.model.path),
        max_model_len=_resolve_max_model_len(settings, facts),
        max_batched_tokens=batched_tokens,
        usual_batched_tokens=_resolve_usual_tokens(settings, batched_tokens),
        max_prefill_tokens=_resolve_prefill_tokens(settings, device, batched_tokens),
        kv_pool_bytes=_resolve_kv_pool(settings, machine, device),
        stop_timeouts=stop_timeouts(settings.server),
    )


def runtime_dir(server: ServerSettings, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of sockets, locks and pid files, one per port (per process with port 0). It is not created here."""
    environ = os.environ if environ is None else environ
    if server.runtime_dir:
        return Path(server.runtime_dir).absolute()
    if systemd_folders := environ.get("RUNTIME_DIRECTORY"):
        return Path(systemd_folders.split(":")[0])
    instance = f"model-server-{server.port}" if server.port else f"model-server-pid{os.getpid()}"
    if user_folder := environ.get("XDG_RUNTIME_DIR"):
        return Path(user_folder) / instance
    return Path("/tmp") / f"{instance}-uid{os.getuid()}"  # noqa: S108 (launch refuses a folder that is not this user's)


def stop_timeouts(server: ServerSettings) -> StopTimeouts:
    """All limits of a stop follow from `drain_limit_s`, so that nobody is killed before those who wait for him."""
    web_s = server.drain_limit_s - ceil(server.lame_duck_s)
    if web_s < 1:
        raise StartupError(
            f"server.lame_duck_s is {server.lame_duck_s}, server.drain_limit_s {server.drain_limit_s}: "
            "the drain limit includes the lame duck and must be at least 1 s longer"
        )
    limit_s = server.drain_limit_s
    return StopTimeouts(
        server.lame_duck_s,
        web_s,
        dirty_s=limit_s + 2,
        master_s=limit_s + 3,
    )


def name_from_path(path: str) -> str:
    """The last part of a folder or hub id; in a hub cache the repository's name, not the snapshot's hash."""
    parts = [part for part in Path(path).parts if part not in ("/", ".")]
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return parts[-1] if parts else path


def _resolve_device(settings: Settings, machine: Machine) -> Device:
    wish = settings.engine.device
    missing = "no /dev/nvidia0" if machine.num_gpus == 0 else "no libcuda.so.1" if not machine.has_cuda else None
    if wish == "cuda" and missing:
        raise StartupError(f'engine.device is "cuda", but this machine has {missing}; use "cpu" or "auto"')
    if wish == "cpu":
        return "cpu"
    if missing:
        return _log_choice("engine.device", "cpu", missing)
    if not machine.has_cuda_bindings:  # it moves the weights for both backends
        raise StartupError(
            f"a GPU needs the package cuda-bindings, which is not installed: {_INSTALL_CUDA}, "
            'or leave the GPU alone: engine.device = "cpu"'
        )
    if wish == "auto":
        _log_choice("engine.device", "cuda", f"{machine.num_gpus} GPU(s) and {machine.libcuda_path} found")
    return "cuda"


def _resolve_backend(
    settings: Settings, facts: ModelFacts, machine: Machine, device: Device, kernels_folder: Path
) -> Backend:
    wish = settings.engine.backend
    if wish == "torch":
        return _torch_on(machine, device, 'engine.backend is "torch"')
    obstacle = _cuda_obstacle(facts, machine, device, kernels_folder)
    if wish == "cuda":
        if obstacle:
            raise StartupError(f'engine.backend is "cuda", but {obstacle}; "auto" and "torch" do without')
        return "cuda"
    if obstacle:
        return _log_choice("engine.backend", _torch_on(machine, device, obstacle), obstacle)
    reason = f"a GPU, and kernels for head_dim {facts.head_dim} in {facts.dtype}"
    return _log_choice("engine.backend", "cuda", reason)


def _torch_on(machine: Machine, device: Device, reason: str) -> Backend:
    """The torch backend, or StartupError if PyTorch is missing or of the wrong kind."""
    if not machine.has_torch:
        raise StartupError(f"{reason}: the torch backend needs PyTorch, which is not installed: {_INSTALL_TORCH}")
    if device == "cuda" and not machine.torch_has_cuda:
        raise StartupError(
            f"{reason}: the torch backend needs a PyTorch for CUDA on this GPU, found one for CPUs only: install "
            'another, or set engine.device = "cpu"'
        )
    return "torch"


def _cuda_obstacle(facts: ModelFacts, machine: Machine, device: Device, kernels_folder: Path) -> str | None:
    """Why the cuda backend cannot serve, and what would help; None: it can, if the device is of capability >= 8.0.

    That is known to the first CUDA call only, which a child makes.
    """
    if device == "cpu":
        return "the device is the CPU, and the cuda backend computes on GPUs"
    if reason := why_unsupported(facts):
        return reason
    if not machine.has_cublas:
        return f"cuBLAS 13 is not installed: {_INSTALL_CUDA}"
    manifest = read_manifest(kernels_folder)
    if manifest is None:
        return f"no compiled kernels are in {kernels_folder}: run scripts/build-kernels"
    if not manifest.covers(facts.head_dim, facts.dtype):
        return f"no kernels in {kernels_folder} are for head_dim {facts.head_dim} in {facts.dtype}"
    return None


def _resolve_threads(settings: Settings, machine: Machine, device: Device) -> int:
    if settings.engine.num_threads:
        return settings.engine.num_threads
    if device == "cuda":
        return _log_choice("engine.num_threads", 1, "the GPU computes, the model worker only launches")
    return _log_choice("engine.num_threads", machine.num_cores, "the cores that this process may use")


def _resolve_max_model_len(settings: Settings, facts: ModelFacts) -> int:
    wish = settings.engine.max_model_len
    if wish > facts.max_position:
        raise StartupError(
            f"engine.max_model_len is {wish}, but the model has max_position_embeddings {facts.max_position}: lower it"
        )
    return wish or _log_choice(
        "engine.max_model_len",
        facts.max_position,
        "the model's max_position_embeddings",
    )


def _resolve_batched_tokens(settings: Settings) -> int:
    wish, num_requests = settings.engine.max_batched_tokens, settings.engine.max_num_requests
    if wish >= num_requests:
        return wish
    return _log_choice(
        "engine.max_batched_tokens", num_requests, "each of engine.max_num_requests requests decodes a token per step"
    )


def _resolve_usual_tokens(settings: Settings, max_batched_tokens: int) -> int:
    wish = settings.engine.usual_batched_tokens
    if wish > max_batched_tokens:
        raise StartupError(
            f"engine.usual_batched_tokens is {wish}, but engine.max_batched_tokens is {max_batched_tokens}: "
            "lower the one or raise the other"
        )
    return wish or _log_choice("engine.usual_batched_tokens", max_batched_tokens, "engine.max_batched_tokens")


def _resolve_prefill_tokens(settings: Settings, device: Device, max_batched_tokens: int) -> int:
    if wish := settings.engine.max_prefill_tokens:
        return wish
    if device == "cpu":
        return _log_choice("engine.max_prefill_tokens", max_batched_tokens, "a CPU gains nothing from longer steps")
    choice = max(_GPU_PREFILL_TOKENS, max_batched_tokens)
    return _log_choice("engine.max_prefill_tokens", choice, "long steps suit a GPU, and no stream waits for them")


def _resolve_kv_pool(settings: Settings, machine: Machine, device: Device) -> int | None:
    wish_mib, memory_mib = settings.kv.pool_mib, machine.memory_bytes >> 20
    if device == "cpu" and wish_mib > memory_mib:
        raise StartupError(f"kv.pool_mib is {wish_mib}, but this machine has {memory_mib} MiB of memory: lower it")
    if wish_mib:
        return wish_mib << 20
    if device == "cuda":
        return None
    return _log_choice("kv.pool_mib", _CPU_POOL_MIB, "the default on a CPU") << 20


def _log_choice(key: str, choice: T, reason: str) -> T:
    logger.info("%s: %s, because: %s", key, choice, reason)
    return choice
