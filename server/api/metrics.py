"""GET /metrics: Prometheus' text, true from any web worker."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.serving import serving_of
from server.telemetry.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All series of the service."""
    serving = serving_of(request)
    text = await asyncio.to_thread(serving.metrics.render, serving.board)
    return Response(text, headers={"content-type": CONTENT_TYPE})
