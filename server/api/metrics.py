"""GET /metrics: Prometheus' text, true from any web worker."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.api.serving import Serving, serving_of
from server.telemetry.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(serving: Annotated[Serving, Depends(serving_of)]) -> Response:
    """All series of the service."""
    text = await asyncio.to_thread(serving.metrics.render, serving.board)
    return Response(text, headers={"content-type": CONTENT_TYPE})
