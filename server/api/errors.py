"""How a refusal looks on the wire: one table from exceptions to statuses, two shapes of body.

Native:         {"error": text, "error_type": kind}
OpenAI (/v1):   {"error": {"message", "type", "param", "code"}}

A message never repeats a value of the request: it could be one that cannot be encoded.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.errors import EngineDead, InvalidRequest, NotReady, Overloaded, RequestFailed, ServerError

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 120  # the openai client gives up beyond
STATUS_CLIENT_CLOSED = 499


class BodyTooLarge(InvalidRequest):
    """More bytes than server.max_body_bytes."""


class NotJson(InvalidRequest):
    """The content type is not JSON."""


class ModelNotFound(InvalidRequest):
    """The request names another model than the one served."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one class of exceptions is reported on each family of routes."""

    native_status: int
    native_type: str
    openai_status: int
    openai_type: str


_KINDS: dict[type[ServerError], _Kind] = {
    BodyTooLarge: _Kind(413, "validation", 413, "invalid_request_error"),
    NotJson: _Kind(415, "validation", 415, "invalid_request_error"),
    ModelNotFound: _Kind(404, "validation", 404, "invalid_request_error"),
    InvalidRequest: _Kind(422, "validation", 400, "invalid_request_error"),
    Overloaded: _Kind(429, "overloaded", 429, "rate_limit_error"),
    NotReady: _Kind(503, "healthcheck", 503, "service_unavailable_error"),
    EngineDead: _Kind(503, "healthcheck", 503, "service_unavailable_error"),
    RequestFailed: _Kind(424, "generation", 500, "server_error"),
    ServerError: _Kind(500, "internal", 500, "server_error"),
}
_HTTP_TYPES = {404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An exception, ready for the wire of one family of routes."""

    status: int
    body: bytes
    headers: dict[str, str]


def refusal_of(error: Exception, path: str) -> Refusal:
    """What a client of `path` gets for `error`. Other exceptions are our fault: 500, without their text."""
    if not isinstance(error, ServerError):
        error = ServerError("internal error")
    kind = next(_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS)
    param = error.param if isinstance(error, InvalidRequest) else None
    code = error.code if isinstance(error, InvalidRequest) else None
    message = f"{param}: {error}" if param else str(error)
    headers = _headers_of(error)
    if is_openai(path):
        return Refusal(kind.openai_status, _openai_body(message, kind.openai_type, param, code), headers)
    return Refusal(kind.native_status, _native_body(message, kind.native_type), headers)


def is_openai(path: str) -> bool:
    """Whether clients of this route expect OpenAI's error shape."""
    return path == "/v1" or path.startswith("/v1/")


async def end_in_error_event(
    chunks: AsyncGenerator[bytes, None], path: str, count_error: Callable[[int], None]
) -> AsyncGenerator[bytes, None]:
    """The chunks of an event stream; if it fails after its first byte, one machine-readable event tells why."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        if not isinstance(error, ServerError):
            logger.exception("a stream failed")
        refusal = refusal_of(error, path)
        count_error(refusal.status)
        yield b"data: " + refusal.body + b"\n\n"


def add_error_handlers(app: FastAPI, count_error: Callable[[int], None]) -> None:
    """Every way a request can be refused, 404, 405 and our own faults included, ends in one of the two shapes."""

    async def on_error(request: Request, error: Exception) -> Response:
        refusal = refusal_of(error, request.url.path)
        count_error(refusal.status)
        return Response(refusal.body, refusal.status, refusal.headers, media_type="application/json")

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = _HTTP_TYPES.get(error.status_code, "validation")
        text = str(error.detail)
        if is_openai(request.url.path):
            body = _openai_body(text, "invalid_request_error", None, kind)
        else:
            body = _native_body(text, kind)
        count_error(error.status_code)
        return Response(body, error.status_code, error.headers, media_type="application/json")

    async def on_disconnect(_request: Request, _error: Exception) -> Response:
        return Response(status_code=STATUS_CLIENT_CLOSED)  # nobody reads it

    handlers: list[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]] = [
        (ServerError, on_error),
        (HTTPException, on_http_exception),
        (ClientDisconnect, on_disconnect),
        (Exception, on_error),
    ]
    for error_class, handler in handlers:
        app.add_exception_handler(error_class, handler)


def _headers_of(error: ServerError) -> dict[str, str]:
    if isinstance(error, (Overloaded, NotReady)):
        return {"Retry-After": str(min(MAX_RETRY_AFTER_S, max(1, error.retry_after_s)))}
    if isinstance(error, EngineDead):
        return {"Retry-After": "1"}
    if isinstance(error, BodyTooLarge):
        return {"Connection": "close"}  # the rest of the body is not read
    if type(error) is ServerError:
        return {"Connection": "close"}  # uvicorn closes it after a fault; a client that kept it would see a reset
    return {}


def _native_body(message: str, error_type: str) -> bytes:
    return msgspec.json.encode({"error": message, "error_type": error_type})


def _openai_body(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": error_type, "param": param, "code": code}})
