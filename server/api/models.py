"""GET /v1/models and /v1/models/{name}: the one model that is served, as OpenAI's clients list it."""

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.completions_schema import Model, ModelList
from server.api.errors import ModelNotFound
from server.api.serving import Serving, serving_of

router = APIRouter(prefix="/v1")


@router.get("/models")
async def list_models(request: Request) -> Response:
    """What can be named in `model`."""
    serving = serving_of(request)
    return _json(ModelList("list", [_model(serving)]))


@router.get("/models/{name:path}")
async def get_model(request: Request) -> Response:
    """One model, if it is the served one."""
    serving = serving_of(request)
    # NOTE: a declared path parameter makes FastAPI import pydantic.v1, 40 ms of every start.
    if request.path_params["name"] not in serving.model_names:
        raise ModelNotFound(f"this server serves {serving.resolved.served_name}", "model", "model_not_found")
    return _json(_model(serving))


def _model(serving: Serving) -> Model:
    return Model(
        id=serving.resolved.served_name,
        object="model",
        created=int(time.time() - (time.monotonic() - serving.board.started_at)),
        owned_by="model-server",
        root=serving.settings.model.path,
        max_model_len=serving.max_model_len,
    )


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
