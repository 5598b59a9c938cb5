"""Server-sent events on the wire, and work that ends when its client leaves.

Knows ASGI. Does not know what an event means.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PING_INTERVAL_S = 15.0
DONE_EVENT = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def encode_event(event: msgspec.Struct) -> bytes:
    """One event of one line of JSON."""
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class EventStream(Response):
    """Sends each chunk at once, a comment after 15 s of silence, and calls `close` however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **(headers or {})})
        self._chunks = chunks
        self._close = close
        self._ping_interval_s = ping_interval_s
        self._last_sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_chunks(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._last_sent_at = loop.time()
        pings = asyncio.create_task(self._send_pings(send))
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._last_sent_at = loop.time()
        finally:
            pings.cancel()

    async def _send_pings(self, send: Send) -> None:
        """A task of its own, so that tokens pay nothing for it. A proxy cuts a connection that is silent for long."""
        loop = asyncio.get_running_loop()
        while True:
            silent_until = self._last_sent_at + self._ping_interval_s
            if loop.time() < silent_until:
                await asyncio.sleep(silent_until - loop.time())
            else:
                self._last_sent_at = loop.time()
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientDisconnect when the client leaves, which cancels it. The body has been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
