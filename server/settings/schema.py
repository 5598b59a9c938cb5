"""The settings: every section and field with its type and bounds. Values live in config/base.toml.

What the user asked, not what runs: `resolve` turns "auto" into a choice. Frozen; built by `load` only.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A TOML table. Unknown keys are refused by name."""


class ServerSettings(_Section, frozen=True):
    """[server]: the HTTP side and the processes."""

    host: str
    port: Annotated[int, Meta(ge=0, le=65535)]
    runtime_dir: str
    web_workers: Annotated[int, Meta(ge=1, le=64)]
    keep_alive_s: PositiveInt
    drain_limit_s: PositiveInt
    lame_duck_s: Seconds
    worker_timeout_s: Annotated[int, Meta(ge=3)]  # uvicorn beats at whole seconds, at half of this at the earliest
    max_body_bytes: PositiveInt
    log_level: Literal["debug", "info", "warning", "error"]


class ModelSettings(_Section, frozen=True):
    """[model]: what is served. `path` is a folder, a hub cache folder or a hub id."""

    path: str
    revision: str
    served_name: str


class EngineSettings(_Section, frozen=True):
    """[engine]: the model worker. 0 or "auto" means: chosen by `resolve`, which logs the choice with its reason."""

    backend: Literal["auto", "cuda", "torch"]
    device: Literal["auto", "cpu", "cuda"]
    num_threads: Annotated[int, Meta(ge=0, le=1024)]
    max_model_len: Annotated[int, Meta(ge=0)]
    max_num_requests: Annotated[int, Meta(ge=1, le=1024)]
    max_batched_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    usual_batched_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    max_steps_behind: Annotated[int, Meta(ge=0)]
    max_prefill_tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    max_waiting_requests: Annotated[int, Meta(ge=0)]
    max_waiting_tokens: Annotated[int, Meta(ge=0)]
    max_boot_attempts: PositiveInt
    load_deadline_s: PositiveInt
    keep_context: bool
    early_requests_wait_s: Annotated[float, Meta(ge=0, le=600)]
    watchdog_s: Seconds


class KVSettings(_Section, frozen=True):
    """[kv]: the paged KV pool."""

    block_size: Literal[8, 16, 32, 64]
    pool_mib: Annotated[int, Meta(ge=0)]
    device_memory_fraction: Fraction
    reserve_mib: Annotated[int, Meta(ge=0)]
    prefix_cache: bool


class DebugSettings(_Section, frozen=True):
    """[debug]: for finding a fault, at a price that no service should pay, and for what is still to be measured."""

    sync_launches: bool
    early_launch: bool


class Settings(_Section, frozen=True):
    """All sections. Objects receive the section that they need, never everything."""

    server: ServerSettings
    model: ModelSettings
    engine: EngineSettings
    kv: KVSettings
    debug: DebugSettings
