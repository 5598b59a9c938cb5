"""The web worker's side of the engine: one connection, many requests, whose outputs go to inboxes.

When an engine dies, its listener lives on: the client connects again and submits every live request with the tokens
that it has already received, so that a stream goes on where it stopped. Knows no HTTP and no text.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from server.engine.inbox import Inbox
from server.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Message,
    Outputs,
    ProtocolError,
    SamplingParams,
    Submit,
    TokenOutput,
    encode_frame,
    take_frames,
)
from server.errors import NotReady, Overloaded
from server.launch.board import Board, ModelState, StopMode

logger = logging.getLogger(__name__)

RECOVERY_LIMIT_S = 5.0  # new requests wait this long for an engine that is coming back, then they are refused
RESUME_LIMIT_S = 60.0  # running streams wait this long, then they fail
RECONNECT_INTERVAL_S = 0.02


ObserveGaps = Callable[[float, int], None]


def _observe_nothing(_gap_s: float, _count: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """max_requests: running and waiting, in the whole service. max_waiting_tokens: prompts of this worker that wait.

    early_wait_s: how long a request may wait for the first engine; max_early_requests: how many of this worker may.
    """

    max_requests: int
    max_waiting_tokens: int
    watchdog_s: float
    early_wait_s: float = 0.0
    max_early_requests: int = 0


class RequestStream:
    """One request: its outputs go to `inbox`, up to one with a finish_reason. `abort` stops it earlier."""

    def __init__(self, client: "EngineClient", submit: Submit, inbox: Inbox) -> None:
        self.inbox = inbox
        self.first_token_at = 0.0  # time.monotonic() of the message, 0 until then
        self.last_token_at = 0.0
        self._client = client
        self._submit = submit
        self._received: list[int] = []
        self._is_final = False
        inbox.open()

    @property
    def request_id(self) -> int:
        """Unique over all web workers of the service."""
        return self._submit.request_id

    def abort(self) -> None:
        """Free the request in the engine. Does nothing once it has ended; safe to call twice."""
        if not self._is_final:
            self._is_final = True
            self._client.abort(self)
            self.inbox.close_one()

    def resubmission(self) -> Submit:
        """The request as a new engine must see it: the prompt and everything received so far."""
        first = self._submit
        if not self._received:
            return first
        token_ids = first.token_ids + self._received
        return Submit(first.request_id, token_ids, first.num_prompt_tokens, first.sampling, first.priority)

    def deliver(self, output: TokenOutput, now: float) -> None:
        """Called by the client for each output, with the time.monotonic() of its message."""
        if output.token_id >= 0:
            self._received.append(output.token_id)
            self.last_token_at = now
            if not self.first_token_at:
                self.first_token_at = now
        self._is_final = output.finish_reason is not None
        self.inbox.put(output)

    def give_up(self) -> None:
        """Called by the client when no engine will go on with it."""
        self._is_final = True
        self.inbox.give_up()


class EngineClient:
    """Connects at `start` and again after each end-of-file, until `close` or the service's stop."""

    def __init__(
        self, socket_path: str, board: Board, limits: ClientLimits, observe_gaps: ObserveGaps = _observe_nothing
    ) -> None:
        """`observe_gaps` is told, for each message, how long ago the last tokens of how many streams had come."""
        self._socket_path = socket_path
        self._observe_gaps = observe_gaps
        self._board = board
        self._limits = limits
        self._live: dict[int, RequestStream] = {}
        self._waiting: dict[int, int] = {}  # of the live ones, those without an output: request id -> prompt tokens
        self._num_waiting_tokens = 0
        self._connection: _Connection | None = None
        self._down_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []
        # Two web workers must never choose the same id, also not after one was replaced.
        self._ids = itertools.count(secrets.randbits(32) << 32)
        self._first_tokens: deque[float] = deque(maxlen=256)
        self._has_served = asyncio.Event()  # an engine has said hello, or none ever will
        self._num_early = 0

    async def start(self) -> None:
        """Begin to connect. Returns at once: the engine may be ready much later."""
        self._tasks = [asyncio.create_task(self._stay_connected())]
        if self._limits.watchdog_s:
            self._tasks.append(asyncio.create_task(self._watch()))

    async def close(self) -> None:
        """Drop the connection, which aborts this worker's requests in the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    @property
    def num_live(self) -> int:
        """Requests submitted by this worker that have not ended."""
        return len(self._live)

    async def wait_until_served(self) -> None:
        """Before the first engine is ready, and if the limits allow it: wait for it, then `submit` decides.

        Raises NotReady when it takes longer than a request may wait, Overloaded when too many wait.
        """
        limits = self._limits
        if self._board.ready_at or self._board.stop or not limits.early_wait_s:
            return
        if self._num_early >= limits.max_early_requests:
            raise Overloaded(f"the model is loading, and {self._num_early} requests wait for it already")
        self._num_early += 1
        try:
            await asyncio.wait_for(self._has_served.wait(), limits.early_wait_s)
        except TimeoutError:
            raise NotReady(f"the model is loading, for longer than {limits.early_wait_s:.0f} s now") from None
        finally:
            self._num_early -= 1

    def submit(
        self, token_ids: list[int], sampling: SamplingParams, priority: int = 0, inbox: Inbox | None = None
    ) -> RequestStream:
        """Admit a request, whose outputs go to `inbox`, or to one of its own.

        Raises NotReady while no engine can take it, Overloaded when too much waits.
        """
        self._check_ready()
        self._check_room(len(token_ids))
        message = Submit(next(self._ids), token_ids, len(token_ids), sampling, priority)
        stream = RequestStream(self, message, inbox or Inbox())
        self._live[stream.request_id] = stream
        self._waiting[stream.request_id] = len(token_ids)
        self._num_waiting_tokens += len(token_ids)
        self._send(message)
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Called by RequestStream.abort."""
        if self._live.pop(stream.request_id, None) is not None:
            self._end_wait(stream.request_id)
            self._send(Abort(stream.request_id))

    def _end_wait(self, request_id: int) -> None:
        self._num_waiting_tokens -= self._waiting.pop(request_id, 0)

    def _check_ready(self) -> None:
        board = self._board
        if board.stop != StopMode.NONE:
            raise NotReady("the service is stopping")
        if board.model_state == ModelState.READY:
            return
        if not board.ready_at:
            raise NotReady("the model is loading")
        if self._down_since is not None and time.monotonic() - self._down_since > RECOVERY_LIMIT_S:
            raise NotReady("the engine is restarting")

    def _check_room(self, num_tokens: int) -> None:
        limits, board = self._limits, self._board
        # The board is one step late and counts everybody, ours is exact and counts this worker: the larger is nearer.
        num_requests = max(len(self._live), board.num_running + board.num_waiting)
        if num_requests >= limits.max_requests:
            raise Overloaded(
                f"{num_requests} requests run or wait, at most {limits.max_requests} may", self._retry_after_s()
            )
        num_waiting_tokens = self._num_waiting_tokens
        if num_waiting_tokens and num_waiting_tokens + num_tokens > limits.max_waiting_tokens:
            raise Overloaded(
                f"{num_waiting_tokens} prompt tokens wait, at most {limits.max_waiting_tokens} may",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """Time for the waiting requests to start at the rate of the last ones, at least 1."""
        times = self._first_tokens
        if len(times) < 2 or times[-1] <= times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return max(1, round(len(self._waiting) / rate))

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def _stay_connected(self) -> None:
        """The connection's life. Every exit from here has ended all live requests."""
        loop = asyncio.get_running_loop()
        while self._board.stop == StopMode.NONE:
            try:
                _, connection = await loop.create_unix_connection(lambda: _Connection(self._receive), self._socket_path)
            except OSError as error:
                logger.debug("engine not reachable: %s", error)
                self._give_up_if_too_late()
                await asyncio.sleep(RECONNECT_INTERVAL_S)
                continue
            self._connection = connection
            for stream in self._live.values():
                connection.send(stream.resubmission())
            await self._until_lost(connection)
            self._connection = None
            self._down_since = time.monotonic()
        self._fail_all()

    async def _until_lost(self, connection: "_Connection") -> None:
        """Wait for end-of-file; a connection in the backlog is silent until an engine accepts it, hence the limit."""
        while not connection.lost.done():
            await asyncio.wait([connection.lost], timeout=1.0)
            if self._board.stop:  # the engine may never say hello
                self._has_served.set()
            self._give_up_if_too_late()

    def _give_up_if_too_late(self) -> None:
        if self._down_since is not None and time.monotonic() - self._down_since > RESUME_LIMIT_S:
            self._fail_all()

    def _fail_all(self) -> None:
        self._has_served.set()
        streams, self._live = list(self._live.values()), {}
        self._waiting, self._num_waiting_tokens = {}, 0
        for stream in streams:
            stream.give_up()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Outputs):
            self._deliver(message.items)
        elif isinstance(message, Hello):
            self._down_since = None
            self._has_served.set()
            if message.version != PROTOCOL_VERSION:
                raise ProtocolError(f"engine speaks version {message.version}, this worker {PROTOCOL_VERSION}")

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """What one message brought came at one time, so different gaps are few, however many streams there are."""
        now = time.monotonic()
        num_gaps: dict[float, int] = {}  # time of a stream's last token -> streams of which it is
        for output in outputs:
            stream = self._live.get(output.request_id)
            if stream is None:
                continue  # aborted meanwhile
            if last_at := stream.last_token_at:
                if output.token_id >= 0:
                    num_gaps[last_at] = num_gaps.get(last_at, 0) + 1
            else:
                self._end_wait(output.request_id)
                if output.token_id >= 0:  # a refusal says nothing of how fast requests start
                    self._first_tokens.append(now)
            if output.finish_reason is not None:
                del self._live[output.request_id]
            stream.deliver(output, now)
        for last_at, count in num_gaps.items():
            self._observe_gaps(now - last_at, count)

    async def _watch(self) -> None:
        """Kill an engine that has work and does not step. It reads the board, so a stalled loop here accuses nobody."""
        board = self._board
        while True:
            await asyncio.sleep(self._limits.watchdog_s / 10)
            limit_s = max(self._limits.watchdog_s, board.longest_step_s)
            pid, beat = board.model_pid, board.engine_beat
            if board.model_state != ModelState.READY or time.monotonic() - beat <= limit_s:
                continue
            if pid == board.model_pid and beat == board.engine_beat:
                logger.error("the engine (pid %d) has not stepped for %.1f s: killed", pid, time.monotonic() - beat)
                board.model_state = ModelState.NONE  # the first web worker that sees it; the next one finds no READY
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class _Connection(asyncio.Protocol):
    """Frames over one socket. `lost` is done at end-of-file."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for message in take_frames(self._buffer):
                self._on_message(message)
        except ProtocolError:
            logger.exception("closing the connection to the engine")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: Message) -> None:
        """Write one frame; between the peer's death and our end-of-file it is lost: the resubmission carries it."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(RuntimeError, OSError):
                self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Close the socket; `lost` follows."""
        if self._transport is not None:
            self._transport.abort()
