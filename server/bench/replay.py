"""A server that only replays: every completion is the same canned stream, one event a step for all that run.

It costs a client what a real server costs it, and so shows what the client itself can take and adds (with steps of
8 ms, or of 0: as fast as it can):
model-server bench load --command "python -m server.bench.replay {port} 8" --users 256
"""

import asyncio
import sys
from typing import cast

import httptools
import msgspec
import uvloop

_EVENT = (
    b'data: {"id":"cmpl-5c1f0f4f1bb54be0a9a2c3d4","object":"text_completion","created":1764547200,"model":"replay",'
    b'"choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_USAGE = '{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":1}}'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"replay"}]}'


class _Request(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes) -> bytes:
    """A whole answer with status 200."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


_EVENT_CHUNK = chunk(_EVENT)
_decode_request = msgspec.json.Decoder(_Request).decode


class Replay:
    """The step that all streams share. `step_s` 0: as fast as it can."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._left: dict[ReplayConnection, int] = {}
        self._is_stepping = False

    def add(self, connection: "ReplayConnection", num_tokens: int) -> None:
        """Send it so many events from the next step on."""
        self._left[connection] = num_tokens
        if not self._is_stepping:
            self._is_stepping = True
            self._plan_step()

    def drop(self, connection: "ReplayConnection") -> None:
        """Its client has left."""
        self._left.pop(connection, None)

    def _plan_step(self) -> None:
        asyncio.get_running_loop().call_later(self._step_s, self._step)

    def _step(self) -> None:
        for connection, num_left in list(self._left.items()):
            connection.write(_EVENT_CHUNK)
            if num_left > 1:
                self._left[connection] = num_left - 1
            else:
                del self._left[connection]
                connection.end_stream()
        self._is_stepping = bool(self._left)
        if self._is_stepping:
            self._plan_step()


class ReplayConnection(asyncio.Protocol):
    """One client. A request that wants no stream is answered at once."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._num_tokens = 0

    def write(self, data: bytes) -> None:
        """Send."""
        self._transport.write(data)

    def end_stream(self) -> None:
        """Usage, the end event, the end of the body."""
        usage = b"data: " + (_USAGE % self._num_tokens).encode() + b"\n\n"
        self.write(chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._replay.drop(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            self.write(whole(_MODELS))
            return
        request = _decode_request(self._body)
        self._num_tokens = request.max_tokens
        if request.stream:
            self.write(_STREAM_HEAD)
            self._replay.add(self, request.max_tokens)
        else:
            self.write(whole((_USAGE % request.max_tokens).encode()))


async def _serve(port: int, step_s: float) -> None:
    replay = Replay(step_s)
    server = await asyncio.get_running_loop().create_server(lambda: ReplayConnection(replay), "127.0.0.1", port)
    await server.serve_forever()


def main(port: str, step_ms: str = "0") -> None:
    """Until it is killed."""
    uvloop.run(_serve(int(port), float(step_ms) / 1e3))


if __name__ == "__main__":
    main(*sys.argv[1:])
