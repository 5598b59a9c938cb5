"""A client that can take far more events than one server sends: HTTP/1.1 over kept connections on one event loop.

Bytes get their time stamp when they are taken from the socket, before anything is parsed. Knows answers and event
streams in OpenAI's shape as far as counting and timing need it; does not know users, rates or statistics.
"""

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec

from server.bench.http import Address

_MAX_IDLE_S = 2.0  # many servers close a connection that was idle for 5 s
_SHORT_LIMIT_S = 5.0
_SHOWN_CHARACTERS = 300
_USUAL_EVENTS = (b'data: {"id"', b'data:{"id"')  # nearly all lines: one comparison instead of three
_ERROR_EVENTS = (b'data: {"error"', b'data:{"error"')
LOST = "connection lost"


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    """Of a whole answer, or of the last event of a stream, what counts here."""

    choices: list[msgspec.Raw]
    usage: _Usage | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class ExchangeFailed(Exception):
    """A request without a good answer. `kind`: short and the same for all failures alike; the text is an example."""

    def __init__(self, kind: str, example: str = "") -> None:
        super().__init__(example or kind)
        self.kind = kind


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times are time.perf_counter(); `arrivals` has one for each event with text."""

    sent: float
    is_stream: bool
    end: float = 0.0
    status: int = 0
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    num_bytes: int = 0
    _rest: bytes = b""
    _last_event: bytes = b""
    _is_done: bool = False
    _error: bytes = b""

    @property
    def has_failed(self) -> bool:
        """Whether the stream has said that it failed."""
        return bool(self._error)

    def take(self, data: bytes, now: float) -> None:
        """A part of the body, which came at `now`."""
        self.num_bytes += len(data)
        if self.is_stream and self.status == 200:
            self._take_lines(data, now)
        else:
            self._rest += data

    def _take_lines(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")  # a raw newline is never part of JSON
        for line in lines:
            if line.startswith(_USUAL_EVENTS):
                self.arrivals.append(now)
                self._last_event = line
            elif line.startswith(b"data:"):
                self._take_other(line, now)

    def _take_other(self, line: bytes, now: float) -> None:
        if line.startswith(_ERROR_EVENTS):
            self._error = line
        elif b"[DONE]" in line:
            self._is_done = True
        else:
            self.arrivals.append(now)
            self._last_event = line

    def finish(self) -> int:
        """The number of generated tokens, when the body has ended. Raises ExchangeFailed."""
        if self.status != 200:
            raise ExchangeFailed(f"status {self.status}", _shown(self._rest))
        if self._error:
            raise ExchangeFailed("error event", _shown(self._error))
        if self.is_stream and not (self._is_done and self._last_event):
            raise ExchangeFailed("no event stream up to [DONE]", _shown(self._last_event or self._rest))
        text = self._last_event[5:] if self.is_stream else self._rest
        try:
            answer = _decode_answer(text)
        except msgspec.MsgspecError as error:
            raise ExchangeFailed("wrong content", f"{error}: {_shown(text)}") from error
        if self.is_stream and not answer.choices:
            self.arrivals.pop()  # the event that only counts is no token
        if answer.usage is not None:
            return answer.usage.completion_tokens
        if self.is_stream:
            return len(self.arrivals)
        raise ExchangeFailed("wrong content", f"no usage: {_shown(text)}")


def _shown(data: bytes) -> str:
    return data[:_SHOWN_CHARACTERS].decode(errors="replace")


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self.idle_since = time.perf_counter()

    @property
    def is_usable(self) -> bool:
        """Whether the next request may go here: not closed, and not idle for so long that it may be at any moment."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and time.perf_counter() - self.idle_since < _MAX_IDLE_S

    async def exchange(self, request: bytes, is_stream: bool) -> Exchange:
        """Send a request and read its answer.

        Raises ExchangeFailed when the connection is lost; what was answered is for `Exchange.finish` to judge.
        """
        assert self._transport is not None, "the connection has not been made"
        assert self._exchange is None, "one exchange at a time"
        if self._transport.is_closing():  # since it was made: nobody would say so any more
            raise ExchangeFailed(LOST)
        self._done = asyncio.get_running_loop().create_future()
        self._exchange = exchange = Exchange(time.perf_counter(), is_stream)
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = None
        return exchange

    def close(self) -> None:
        """Drop it, whatever is on its way."""
        if self._transport is not None:
            self._transport.abort()

    # what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("wrong content", f"no HTTP: {error}: {_shown(data)}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._exchange is not None and self._exchange.has_failed:
            self.on_message_complete()  # it was told why
        else:
            self._fail(LOST, f"{LOST}: {error}" if error else "")

    # what the parser calls

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.take(body, self._now)

    def on_message_complete(self) -> None:
        self.idle_since = self._now
        if not self._parser.should_keep_alive():
            self.close()
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.end = self._now
            self._done.set_result(None)

    def _fail(self, kind: str, example: str = "") -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeFailed(kind, example))


class LoadClient:
    """Connections to one server, kept while they are good, until `close`."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def close(self) -> None:
        """Drop all connections."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        await asyncio.sleep(0)  # the loop closes what was aborted

    async def connect(self, num_connections: int) -> None:
        """Have so many connections ready, so that the first requests pay for none. One that fails is not: a request
        will try again and say so."""
        for connection in self._idle:
            if not connection.is_usable:
                connection.close()
        self._idle = [connection for connection in self._idle if connection.is_usable]
        missing = num_connections - len(self._idle)
        opened = await asyncio.gather(*(self._open() for _ in range(missing)), return_exceptions=True)
        self._idle += [connection for connection in opened if isinstance(connection, Connection)]

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a request."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def send(self, request: bytes, is_stream: bool) -> Exchange:
        """One request on a connection of its own, which is kept. Raises ExchangeFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._take()
                self._busy.add(connection)
                try:
                    return await connection.exchange(request, is_stream)
                finally:
                    self._busy.discard(connection)
                    self._idle.append(connection)
        except TimeoutError as error:
            raise ExchangeFailed("timeout", f"no complete answer within {self._timeout_s:g} s") from error

    async def get_once(self, path: str) -> Exchange:
        """GET on a new connection, which is closed after it. Raises ExchangeFailed."""
        request = f"GET {path} HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: close\r\n\r\n".encode()
        try:
            async with asyncio.timeout(_SHORT_LIMIT_S):
                connection = await self._open()
                try:
                    return await connection.exchange(request, is_stream=False)
                finally:
                    connection.close()
        except TimeoutError as error:
            raise ExchangeFailed("timeout", f"no answer within {_SHORT_LIMIT_S:g} s") from error

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return await self._open()

    async def _open(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, *self._address)
        except OSError as error:
            raise ExchangeFailed("no connection", str(error)) from error
        return connection
