"""Health, from the board alone: readiness, liveness, and what a load balancer, a probe or curl should be told.

Ready means: a real token has been generated and the engine makes progress. Nobody is asked and nothing waits.
"""

import time
from math import ceil
from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.errors import MAX_RETRY_AFTER_S
from server.api.serving import Serving, serving_of
from server.engine.client import RECOVERY_LIMIT_S
from server.launch.board import Board, LoaderState, ModelState, StopMode

READY_PATHS = ("/health", "/health/ready", "/ping", "/v2/health/ready", "/")
LIVE_PATHS = ("/health/live", "/v2/health/live")
# Without a watchdog nobody replaces a stalled engine, but it is not healthy either.
_STALLED_AFTER_S = 10.0

Status = Literal["ready", "recovering", "loading", "draining", "stalled", "failed"]
router = APIRouter()


class Queue(msgspec.Struct, frozen=True):
    """Requests in the engine."""

    running: int
    waiting: int


class Health(msgspec.Struct, frozen=True):
    """`progress` 0 to 1 and `eta_s` are those of the start; `eta_s` null: not known."""

    status: Status
    phase: str
    progress: float
    eta_s: float | None
    model: str
    uptime_s: float
    queue: Queue


def read_health(board: Board, model: str, stalled_after_s: float, now: float) -> Health:
    """The service's state at `now` (time.monotonic())."""
    status = _status(board, stalled_after_s or _STALLED_AFTER_S, now)
    progress = _progress(board, status)
    uptime_s = now - board.started_at
    return Health(
        status=status,
        phase=_phase(board, status),
        progress=round(progress, 4),
        eta_s=round(uptime_s * (1 - progress) / progress, 1) if status == "loading" and progress > 0 else None,
        model=model,
        uptime_s=round(uptime_s, 3),
        queue=Queue(board.num_running, board.num_waiting),
    )


async def ready(request: Request) -> Response:
    """200 if requests are served now."""
    serving = serving_of(request)
    health = _health_of(serving)
    return _response(health, health.status in ("ready", "recovering"))


async def live(request: Request) -> Response:
    """200 while the processes make progress, also during loading."""
    serving = serving_of(request)
    health = _health_of(serving)
    return _response(health, health.status not in ("stalled", "failed"))


for _paths, _endpoint in ((READY_PATHS, ready), (LIVE_PATHS, live)):
    for _path in _paths:
        router.add_api_route(_path, _endpoint, methods=["GET"])
        router.add_api_route(_path, _endpoint, methods=["HEAD"], include_in_schema=False)


def _health_of(serving: Serving) -> Health:
    stalled_after_s = serving.settings.engine.watchdog_s
    return read_health(serving.board, serving.resolved.served_name, stalled_after_s, time.monotonic())


def _response(health: Health, is_well: bool) -> Response:
    retry_after_s = min(MAX_RETRY_AFTER_S, max(1, ceil(health.eta_s or 1)))
    return Response(
        msgspec.json.encode(health),
        status_code=200 if is_well else 503,
        headers={"Cache-Control": "no-store"} | ({} if is_well else {"Retry-After": str(retry_after_s)}),
        media_type="application/json",
    )


def _status(board: Board, stalled_after_s: float, now: float) -> Status:
    silent_s = now - board.engine_beat
    if board.halt_code:
        return "failed"
    if board.stop != StopMode.NONE:
        return "draining"
    if board.model_state == ModelState.READY:
        limit_s = max(stalled_after_s, board.longest_step_s)
        return "ready" if silent_s <= limit_s else "stalled"  # an idle engine beats too
    if not board.ready_at:
        return "loading"
    return "recovering" if silent_s <= RECOVERY_LIMIT_S else "loading"


def _phase(board: Board, status: Status) -> str:
    if status != "loading":
        return "serving" if status == "ready" else status
    if board.loader_state == LoaderState.LOADING:
        return "loading weights"
    return "first token" if board.loader_state == LoaderState.LOADED else "starting processes"


def _progress(board: Board, status: Status) -> float:
    """Share of the start that is done, by bytes: the weights are what takes long. 1 only when it serves."""
    if status != "loading":
        return 1.0
    return min(0.99, board.bytes_loaded / board.bytes_total) if board.bytes_total else 0.0
