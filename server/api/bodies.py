"""A request's bytes become a validated model, or an InvalidRequest that names the field.

Strict: no number in a string, no bool as an integer, no NaN. Lenient where the contract says so: unknown keys are
ignored and null means unset.
"""

import json
from collections.abc import ItemsView, Iterator
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from server.api.errors import NotJson
from server.errors import InvalidRequest

B = TypeVar("B", bound="Body")
T = TypeVar("T")

# Every list of a body: with an error for each of a million items, its refusal would hold the event loop for seconds.
Items = Annotated[list[T], Field(fail_fast=True)]
# Half of a surrogate pair is searched for in bodies up to this size: about 0.1 s of the event loop.
_MAX_SEARCHED_BYTES = 1 << 18


class Body(BaseModel):
    """Base of all bodies. Every field is optional unless the contract requires it; None is "unset"."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


async def read_body(model: type[B], request: Request) -> B:
    """Read and validate the body, whose size the middleware bounds. Raises InvalidRequest, NotJson or BodyTooLarge.

    Called by the routes themselves: a FastAPI dependency for it would cost each request 0.05 ms.
    """
    _check_content_type(request.headers.get("content-type", ""))
    return parse_body(model, await request.body())


def parse_body(model: type[B], data: bytes) -> B:
    """Raises InvalidRequest for the first thing that is wrong with it."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise _describe_invalid_json(data, first["msg"])
    raise InvalidRequest(first["msg"].removeprefix("Value error, "), _field_name(first["loc"]) or "body")


def openapi_body(model: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body by `read_body`."""
    return _LazyExtra(model)


class _LazyExtra(dict[str, Any]):
    """Made when the OpenAPI document is: FastAPI only asks for the items, and a start need not pay 3 ms a model."""

    def __init__(self, model: type[Body]) -> None:
        super().__init__(requestBody=None)  # FastAPI leaves an empty one out
        self._model = model

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        schema = self._model.model_json_schema()
        schema = _inlined(schema, schema.pop("$defs", {}))
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}.items()


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with each reference replaced: inside an OpenAPI document "#/$defs" would point at nothing."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _check_content_type(content_type: str) -> None:
    media_type = content_type.partition(";")[0].strip().lower()
    # Without a header it is taken for JSON; what curl -d says without -H is not.
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise NotJson("the content type must be application/json", "content-type")


def _field_name(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _describe_invalid_json(data: bytes, message: str) -> InvalidRequest:
    """The parser knows a position only; half of a surrogate pair is worth its field's name."""
    field = None
    if len(data) <= _MAX_SEARCHED_BYTES:
        with suppress(ValueError, RecursionError):
            field = next(_lone_surrogates(json.loads(data), ""), None)
    if field is None:
        return InvalidRequest(message, "body")
    return InvalidRequest("holds half of a surrogate pair, which is not text", field)


def _lone_surrogates(value: object, path: str) -> Iterator[str]:
    """Paths of the strings that no UTF-8 can express."""
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            yield path or "body"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _lone_surrogates(item, f"{path}.{index}".lstrip("."))
    elif isinstance(value, dict):
        for key, item in value.items():
            plain_key = key.encode(errors="replace").decode()
            yield from _lone_surrogates(item, f"{path}.{plain_key}".lstrip("."))
