"""Pure ASGI middleware: bodies are bounded while they are read, and each request carries an id.

Not BaseHTTPMiddleware, which hides a client's disconnect from the routes. Knows neither routes nor bodies' content.
"""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import BodyTooLarge
from server.telemetry.logging import request_id

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ID_HEADER = "x-request-id"


class BodyLimit:
    """`receive` raises BodyTooLarge as soon as more than `max_bytes` are announced or have come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        num_bytes = int(announced) if announced.isdecimal() else 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            self._check(num_bytes)  # before the first byte is waited for, too
            message = await receive()
            if not announced:
                num_bytes += len(message.get("body", b""))
                self._check(num_bytes)
            return message

        await self._app(scope, receive_bounded, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(f"the body is larger than {self._max_bytes} bytes", "body")


class RequestIds:
    """Echoes a short plain x-request-id, else makes one; log lines of the request carry it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_ID_HEADER, "")
        own_id = given if _PLAIN_ID.fullmatch(given) else secrets.token_hex(8)
        request_id.set(own_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_ID_HEADER] = own_id
            await send(message)

        await self._app(scope, receive, send_with_id)
