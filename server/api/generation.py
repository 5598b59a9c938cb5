"""The one straight line: validated GenerationRequests -> the engine's tokens -> text with stop strings -> events.

A stream reads events as they come, as many at once as wait; a whole answer is read once, at its end. Knows neither HTTP
nor a wire shape.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, Self

import msgspec
from starlette.requests import Request

from server.api.serving import Serving
from server.api.sse import unless_disconnected
from server.engine.inbox import Inbox
from server.engine.messages import FinishReason, SamplingParams, TokenOutput
from server.errors import InvalidRequest, Overloaded, RequestFailed, ServerError
from server.text.detokenizer import IncrementalDetokenizer

Finish = Literal["length", "eos", "stop"]
_FINISH: dict[FinishReason, Finish] = {"length": "length", "eos": "eos", "stop_token": "stop"}
_ENDS_TEXT: tuple[FinishReason | None, ...] = ("eos", "stop_token")  # the token ended the text and is no part of it


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Checked against the model and its limits: only this reaches the engine, so the type is the proof."""

    token_ids: list[int]
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    priority: int = 0


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One token of the call's request number `request_index`, its `number`-th (from 1).

    `text` is what it makes certain: empty while a character or a possible stop string is incomplete. Joined texts are
    the whole text. `finish` is set on a request's last event and only there.
    """

    request_index: int
    number: int
    token_id: int
    text: str
    logprob: float | None
    is_special: bool
    finish: Finish | None


class WholeText(msgspec.Struct, frozen=True, gc=False):
    """The text of one request, and why it ended."""

    text: str
    finish: Finish


@dataclass(slots=True)
class Times:
    """time.monotonic() of a request's milestones; 0 until then."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_s: float = 0.0  # in the engine's queue


class Generation:
    """One admitted request: turns its outputs into events or into its whole text, one of the two."""

    def __init__(self, serving: Serving, index: int, request: GenerationRequest, times: Times, inbox: Inbox) -> None:
        """Admit it: raises NotReady or Overloaded, before the first byte of an answer."""
        self.request = request
        self.times = times
        self.num_generated = 0
        self.num_cached_tokens = 0
        self.is_open = True
        self.index = index
        self._metrics = serving.metrics
        self._special_ids = serving.tokenizer.special_ids
        self._detokenizer = IncrementalDetokenizer(serving.tokenizer, request.token_ids, request.stop_strings)
        self._stream = serving.engine.submit(request.token_ids, request.sampling, request.priority, inbox)
        times.admitted = time.monotonic()

    @property
    def request_id(self) -> int:
        """The engine's name for it."""
        return self._stream.request_id

    def close(self) -> None:
        """Free the request in the engine, unless it has ended. Safe to call twice."""
        self._stream.abort()
        if self.is_open:
            self.is_open = False
            self._metrics.requests_aborted.inc()

    def accept(self, output: TokenOutput) -> TokenEvent:
        """The event of the next output. Raises as `check` does."""
        self.check(output)
        self._note(output, 1)
        text, finish = self._text_of(output.token_id, output.finish_reason)
        if finish is not None:
            self._end(finish)
        logprob = output.logprob if isfinite(output.logprob) else None
        is_special = output.token_id in self._special_ids
        return TokenEvent(self.index, self.num_generated, output.token_id, text, logprob, is_special, finish)

    def accept_all(self, outputs: Sequence[TokenOutput]) -> WholeText:
        """The text of all its outputs, which are good; for a request without stop strings."""
        assert not self.request.stop_strings, "only events tell which token completed a stop string"
        reason = outputs[-1].finish_reason
        assert reason is not None, "it has ended"
        self._note(outputs[0], len(outputs))
        token_ids = [output.token_id for output in outputs]
        if reason in _ENDS_TEXT:
            del token_ids[-1]
        text = self._detokenizer.push_all(token_ids) + self._detokenizer.finish()
        self._end(_FINISH[reason])
        return WholeText(text, _FINISH[reason])

    def check(self, output: TokenOutput) -> None:
        """Raises RequestFailed, Overloaded or InvalidRequest for an output that says so."""
        if output.token_id < 0:
            self.is_open = False
            raise _failure_of(output)

    def _text_of(self, token_id: int, reason: FinishReason | None) -> tuple[str, Finish | None]:
        """What the token adds to the text, and why it is the last, if it is."""
        detokenizer = self._detokenizer
        finish = None if reason is None else _FINISH[reason]
        if reason in _ENDS_TEXT:
            return detokenizer.finish(), finish
        text = detokenizer.push(token_id)
        if reason is not None:
            text += detokenizer.finish()
        return text, "stop" if detokenizer.stopped else finish

    def _note(self, first: TokenOutput, count: int) -> None:
        """Count outputs, of which `first` is the first."""
        times, stream = self.times, self._stream
        if not self.num_generated:
            self.num_cached_tokens = first.num_cached_tokens
            times.first_token = stream.first_token_at
            times.queue_s = first.queue_ms / 1e3
            self._metrics.queue_time.observe(times.queue_s)
            self._metrics.time_to_first_token.observe(times.first_token - times.arrived)
        self.num_generated += count
        times.last_token = stream.last_token_at

    def _end(self, finish: Finish) -> None:
        self.is_open = False
        self._stream.abort()  # a stop string ends the text before the engine knows
        self._metrics.request_latency.observe(self.times.last_token - self.times.arrived)
        self._metrics.count_finished("length" if finish == "length" else "stop")


class GenerationCall:
    """The admitted requests of one call, which are read together: by `batches` or `whole_texts`, once.

    Use it as a context manager, or `close` it in any case: that aborts what still runs. The first failure ends it.
    """

    def __init__(self, serving: Serving, requests: Sequence[GenerationRequest], times: Times) -> None:
        """Admit all of them or none: raises NotReady or Overloaded."""
        self.generations: list[Generation] = []
        self._inbox = Inbox()
        try:
            for index, request in enumerate(requests):
                self.generations.append(Generation(serving, index, request, times, self._inbox))
        except Exception:
            self.close()
            raise
        self._by_id = {generation.request_id: generation for generation in self.generations}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free in the engine whatever still runs. Safe to call twice."""
        for generation in self.generations:
            generation.close()

    async def batches(self) -> AsyncGenerator[list[TokenEvent], None]:
        """The events in order, as many at once as have come: one for each token until a reader falls behind.

        Raises RequestFailed, Overloaded, InvalidRequest or EngineDead after the events before.
        """
        while outputs := await self._inbox.take():
            events: list[TokenEvent] = []
            failure: ServerError | None = None
            for output in outputs:
                generation = self._by_id[output.request_id]
                if not generation.is_open:
                    continue  # came after its stop string, before the engine knew
                try:
                    events.append(generation.accept(output))
                except ServerError as error:
                    failure = error
                    break
            if events:
                yield events
            if failure is not None:
                raise failure

    async def whole_texts(self) -> list[WholeText]:
        """The texts of all requests, in their order. Raises as `batches` does."""
        if any(generation.request.stop_strings for generation in self.generations):
            return await self._joined_texts()
        outputs: list[list[TokenOutput]] = [[] for _ in self.generations]
        for output in await self._inbox.take_when_ended():
            generation = self._by_id[output.request_id]
            generation.check(output)
            outputs[generation.index].append(output)
        return [generation.accept_all(own) for generation, own in zip(self.generations, outputs, strict=True)]

    async def _joined_texts(self) -> list[WholeText]:
        parts: list[list[str]] = [[] for _ in self.generations]
        finishes: dict[int, Finish] = {}
        async for events in self.batches():
            for event in events:
                parts[event.request_index].append(event.text)
                if event.finish is not None:
                    finishes[event.request_index] = event.finish
        return [WholeText("".join(texts), finishes[index]) for index, texts in enumerate(parts)]


async def hold_while_loading(serving: Serving, request: Request) -> None:
    """Call when the body has been read. Returns once an engine is there or the request is not to wait for the first.

    Raises NotReady or Overloaded, so that the status says it, or ClientDisconnect.
    """
    if not serving.board.ready_at:
        await unless_disconnected(request.receive, serving.engine.wait_until_served())


def _failure_of(output: TokenOutput) -> ServerError:
    if output.finish_reason == "refused":
        return InvalidRequest(output.error)
    if output.finish_reason == "overloaded":
        return Overloaded(output.error)
    return RequestFailed(output.error)
