"""GET /startup: how the service came up, from the board alone, also while it is still coming up."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.serving import serving_of
from server.telemetry.timeline import read_startup
from server.telemetry.waterfall import draw_waterfall

PATHS = ("/startup", "/health/startup")
router = APIRouter()
_HEADERS = {"Cache-Control": "no-store"}


async def startup(request: Request) -> Response:
    """Stages, critical path, checklist and restarts as JSON."""
    serving = serving_of(request)
    view = read_startup(serving.board, serving.resolved.backend)
    return Response(msgspec.json.encode(view), headers=_HEADERS, media_type="application/json")


async def picture(request: Request) -> Response:
    """The same as a waterfall."""
    serving = serving_of(request)
    view = read_startup(serving.board, serving.resolved.backend)
    return Response(draw_waterfall(view), headers=_HEADERS, media_type="image/svg+xml")


for _path in PATHS:
    router.add_api_route(_path, startup, methods=["GET"])
    router.add_api_route(_path, startup, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/startup.svg", picture, methods=["GET"])
