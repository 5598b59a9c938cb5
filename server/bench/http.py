"""A client that disturbs as little as it can: one request per connection, and streams whose tokens get a time stamp.

Raw sockets, so that a time is that of the bytes' arrival and not of somebody's event loop. Knows HTTP/1.1 as far as
servers answer it here.
"""

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import pairwise

Address = tuple[str, int]

_RECEIVE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """`received_at`: time.monotonic() when the last byte of the body had come."""

    status: int
    body: bytes
    received_at: float


def ask(address: Address, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> Answer | None:
    """One request on a connection of its own. None: nobody listens, or the connection was lost."""
    connection = HTTPConnection(*address, timeout=timeout_s)
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"content-type": "application/json"} if data else {})
        response = connection.getresponse()
        content = response.read()
        return Answer(response.status, content, time.monotonic())
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


@dataclass(slots=True)
class TokenStream:
    """A running event stream. `arrivals`: time.monotonic() of each token. `error`: why it ended without its end."""

    sock: socket.socket
    num_prompt_tokens: int
    arrivals: list[float] = field(default_factory=list)
    is_over: bool = False
    is_complete: bool = False
    error: str = ""
    _rest: bytes = b""

    def take(self, data: bytes) -> None:
        """Bytes have come; none: the connection has ended."""
        if not data:
            self.is_over = True
            if not self.is_complete:
                self.error = self.error or self._rest.decode(errors="replace")[-400:] or "the connection was lost"
            return
        now = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:  # a raw newline is never part of JSON
            if line.startswith(b'data: {"error"'):
                self.error = line.decode(errors="replace")
            elif line.startswith(b"data: [DONE]"):
                self.is_complete = True
            elif line.startswith(b"data: "):
                self.arrivals.append(now)

    def pause_after(self, moment: float) -> float:
        """The longest silence of those that ended after `moment`, in seconds; 0.0 if nothing came afterwards."""
        return max((after - before for before, after in pairwise(self.arrivals) if after > moment), default=0.0)


class StreamSet:
    """Streams that are read together by `read_until`. Use as a context manager: it closes what is open."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._selector = selectors.DefaultSelector()
        self.streams: list[TokenStream] = []

    def __enter__(self) -> "StreamSet":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.sock.close()
        self._selector.close()

    def open(self, path: str, body: dict[str, object], num_prompt_tokens: int) -> TokenStream:
        """Send the request of one stream."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        sock = socket.create_connection(self._address, timeout=60)
        sock.sendall(head.encode() + data)
        stream = TokenStream(sock, num_prompt_tokens)
        self._selector.register(sock, selectors.EVENT_READ, stream)
        self.streams.append(stream)
        return stream

    def read_until(self, is_enough: Callable[[Sequence[TokenStream]], bool], limit_s: float) -> bool:
        """Read until the condition holds (looked at after each arrival) or all streams are over. False: too late."""
        deadline = time.monotonic() + limit_s
        while not is_enough(self.streams):
            if all(stream.is_over for stream in self.streams):
                return True
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                self._receive(key.data)
        return True

    def _receive(self, stream: TokenStream) -> None:
        try:
            data = stream.sock.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        stream.take(data)
        if not data:
            self._selector.unregister(stream.sock)
