"""The one straight line: a validated GenerationRequest -> the engine's tokens -> text with stop strings -> events.

Streamed and whole answers consume the same events. Knows neither HTTP nor a wire shape.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, Self

from starlette.requests import Request

from server.api.serving import Serving
from server.api.sse import unless_disconnected
from server.engine.messages import FinishReason, SamplingParams, TokenOutput
from server.errors import InvalidRequest, Overloaded, RequestFailed
from server.text.detokenizer import IncrementalDetokenizer

Finish = Literal["length", "eos", "stop"]
_FINISH: dict[FinishReason, Finish] = {"length": "length", "eos": "eos", "stop_token": "stop"}
_MERGED_EVENTS = 64  # of one merged stream, waiting for a slow client


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Checked against the model and its limits: only this reaches the engine, so the type is the proof."""

    token_ids: list[int]
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token. `text` is what it makes certain: empty while a character or a possible stop string is incomplete.

    Joined texts are the whole text. `finish` is set on the last event and only there.
    """

    token_id: int
    text: str
    logprob: float | None
    is_special: bool
    finish: Finish | None


@dataclass(slots=True)
class Times:
    """time.monotonic() of a request's milestones; 0 until then."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_s: float = 0.0  # in the engine's queue


class Generation:
    """An admitted request. Iterate once for its events; close it in any case, which aborts what still runs."""

    def __init__(self, serving: Serving, request: GenerationRequest, times: Times) -> None:
        """Admit it: raises NotReady or Overloaded, before the first byte of an answer."""
        self.request = request
        self.times = times
        self.num_generated = 0
        self.num_cached_tokens = 0
        self._metrics = serving.metrics
        self._special_ids = serving.tokenizer.special_ids
        self._detokenizer = IncrementalDetokenizer(serving.tokenizer, request.token_ids, request.stop_strings)
        self._stream = serving.engine.submit(request.token_ids, request.sampling, request.priority)
        self._is_open = True
        times.admitted = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the request in the engine, unless it has ended. Safe to call twice."""
        self._stream.abort()
        if self._is_open:
            self._is_open = False
            self._metrics.requests_aborted.inc()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """Raises RequestFailed, Overloaded or EngineDead if the engine gives the request up."""
        if not self._is_open:
            raise StopAsyncIteration
        output = await anext(self._stream)
        if output.token_id < 0:
            self._is_open = False
            raise _failure_of(output)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self._note_time(output.queue_ms / 1e3)
        text, finish = self._text_of(output)
        if finish is not None:
            self._end(finish)
        logprob = output.logprob if isfinite(output.logprob) else None
        return TokenEvent(output.token_id, text, logprob, output.token_id in self._special_ids, finish)

    def _text_of(self, output: TokenOutput) -> tuple[str, Finish | None]:
        """What the token adds to the text, and whether it is the last."""
        detokenizer = self._detokenizer
        if output.finish_reason in ("eos", "stop_token"):  # it ended the text and is no part of it
            return detokenizer.finish(), _FINISH[output.finish_reason]
        text = detokenizer.push(output.token_id)
        if output.finish_reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped:
            return text, "stop"
        return text, _FINISH[output.finish_reason] if output.finish_reason else None

    def _note_time(self, queue_s: float) -> None:
        now, times = time.monotonic(), self.times
        if self.num_generated:
            self._metrics.inter_token_latency.observe(now - times.last_token)
        else:
            times.first_token = now
            times.queue_s = queue_s
            self._metrics.queue_time.observe(queue_s)
            self._metrics.time_to_first_token.observe(now - times.arrived)
        self.num_generated += 1
        times.last_token = now

    def _end(self, finish: Finish) -> None:
        self._is_open = False
        self._stream.abort()  # a stop string ends the text before the engine knows
        self._metrics.request_latency.observe(self.times.last_token - self.times.arrived)
        self._metrics.count_finished("length" if finish == "length" else "stop")


async def hold_while_loading(serving: Serving, request: Request) -> None:
    """Call when the body has been read. Returns once an engine is there or the request is not to wait for the first.

    Raises NotReady or Overloaded, so that the status says it, or ClientDisconnect.
    """
    if not serving.board.ready_at:
        await unless_disconnected(request.receive, serving.engine.wait_until_served())


def open_generations(serving: Serving, requests: Sequence[GenerationRequest], times: Times) -> list[Generation]:
    """Admit all of them or, raising, none."""
    with ExitStack() as opened:
        generations = [opened.enter_context(Generation(serving, request, times)) for request in requests]
        opened.pop_all()
    return generations


async def merge_events(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Events of several requests as they come, each with its request's index. The first failure ends all."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TokenEvent | Exception | None]] = asyncio.Queue(_MERGED_EVENTS)
    pumps = [asyncio.create_task(_pump(index, generation, queue)) for index, generation in enumerate(generations)]
    try:
        num_open = len(generations)
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, generation: Generation, queue: asyncio.Queue[tuple[int, TokenEvent | Exception | None]]
) -> None:
    """Ends with None, or with the exception, which is the reader's to raise."""
    try:
        async for event in generation:
            await queue.put((index, event))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))


def _failure_of(output: TokenOutput) -> Exception:
    if output.finish_reason == "refused":
        return InvalidRequest(output.error)
    if output.finish_reason == "overloaded":
        return Overloaded(output.error)
    return RequestFailed(output.error)
