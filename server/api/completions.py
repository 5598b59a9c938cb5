"""POST /v1/completions: OpenAI's shape, several prompts a call, streamed or whole."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.bodies import openapi_body, read_body
from server.api.completions_schema import (
    Choice,
    Completion,
    CompletionBody,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from server.api.errors import ModelNotFound, end_in_error_event
from server.api.generation import GenerationCall, GenerationRequest, Times, TokenEvent, hold_while_loading
from server.api.prompts import check_token_ids, encode_prompt, random_seed, resolve_top_k
from server.api.serving import Serving, serving_of
from server.api.sse import DONE_EVENT, EventStream, encode_event, unless_disconnected
from server.engine.messages import SamplingParams
from server.errors import InvalidRequest
from server.ops.sampling import bounded_penalty, bounded_temperature
from server.text.tokenizer import TooManyTokens

router = APIRouter(prefix="/v1")

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # OpenAI's
_U64 = 2**64
_EMPTY_TEXT = b'"text":""'  # nowhere else in an event: inside a string its quotes would be escaped


@dataclass(frozen=True, slots=True)
class _Call:
    """One admitted call: choice i is what request i of `running` makes."""

    running: GenerationCall
    new_completion: partial[Completion]

    def usage(self, num_generated: int | None = None) -> Usage:
        """Counts when so many tokens had been sent, or so far."""
        generations = self.running.generations
        if num_generated is None:
            num_generated = sum(generation.num_generated for generation in generations)
        num_prompt_tokens = sum(len(generation.request.token_ids) for generation in generations)
        num_cached = sum(generation.num_cached_tokens for generation in generations)
        return Usage(
            num_prompt_tokens, num_generated, num_prompt_tokens + num_generated, PromptTokensDetails(num_cached)
        )


@router.post("/completions", openapi_extra=openapi_body(CompletionBody))
async def complete(request: Request) -> Response:
    """Continue one or more prompts."""
    serving, body = serving_of(request), await read_body(CompletionBody, request)
    await hold_while_loading(serving, request)
    call = await _admit(serving, body)
    if body.stream:
        chunks = _stream_chunks(call, body.stream_options or StreamOptions())
        return EventStream(
            end_in_error_event(chunks, request.url.path, serving.metrics.count_error), call.running.close
        )
    with call.running:
        answer = await unless_disconnected(request.receive, _collect(call))
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _admit(serving: Serving, body: CompletionBody) -> _Call:
    """Everything that can be refused is refused here, before the first byte of an answer."""
    times = Times()
    _check_model(serving, body.model)
    _refuse_unsupported(body)
    prompts = await _encode_prompts(serving, body)
    requests = [_request_of(serving, body, token_ids) for token_ids in prompts]
    new_completion = partial(
        Completion,
        id=f"cmpl-{secrets.token_hex(12)}",
        object="text_completion",
        created=int(time.time()),
        model=serving.resolved.served_name,
    )
    return _Call(GenerationCall(serving, requests, times), new_completion)


def _check_model(serving: Serving, name: str | None) -> None:
    if name is not None and name not in serving.model_names:
        raise ModelNotFound(
            f"this server serves {serving.resolved.served_name}, not the model named here", "model", "model_not_found"
        )


def _refuse_unsupported(body: CompletionBody) -> None:
    wished = {
        "n": (body.n or 1) > 1,
        "best_of": (body.best_of or 1) > 1,
        "echo": bool(body.echo),
        "logprobs": body.logprobs is not None,
        "suffix": bool(body.suffix),
        "frequency_penalty": bool(body.frequency_penalty),
        "presence_penalty": bool(body.presence_penalty),
        "logit_bias": bool(body.logit_bias),
    }
    for name, is_wished in wished.items():
        if is_wished:
            raise InvalidRequest("is not supported by this server", name)


async def _encode_prompts(serving: Serving, body: CompletionBody) -> list[list[int]]:
    """A text, a list of texts, a list of ids, or a list of such lists; never mixed, never empty."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [await _encode_text(serving, body, prompt, "prompt")]
    if not isinstance(prompt, list):
        raise InvalidRequest(
            "must be a string, a list of strings, a list of token ids or a list of such lists", "prompt"
        )
    if not prompt:
        raise InvalidRequest("an empty list has no prompt", "prompt")
    if not isinstance(prompt[0], (str, list)):
        return [_checked_ids(serving, body, prompt, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"has {len(prompt)} prompts, at most {MAX_PROMPTS} are possible", "prompt")
    kind = type(prompt[0])
    return [await _encode_item(serving, body, item, kind, f"prompt.{i}") for i, item in enumerate(prompt)]


async def _encode_item(serving: Serving, body: CompletionBody, item: object, kind: type, param: str) -> list[int]:
    if not isinstance(item, kind):
        raise InvalidRequest("the prompts of a list must all be texts, or all be lists of token ids", param)
    await asyncio.sleep(0)  # 256 prompts in one turn would hold back the tokens of running streams
    if isinstance(item, str):
        return await _encode_text(serving, body, item, param)
    assert isinstance(item, list)
    return _checked_ids(serving, body, item, param)


async def _encode_text(serving: Serving, body: CompletionBody, text: str, param: str) -> list[int]:
    limit = serving.max_model_len
    try:
        return await encode_prompt(serving, text, param, max_tokens=limit)
    except TooManyTokens as error:
        raise _prompt_too_long(error.num_tokens, body.max_tokens, limit) from None


def _checked_ids(serving: Serving, body: CompletionBody, token_ids: list[int], param: str) -> list[int]:
    limit = serving.max_model_len
    if len(token_ids) >= limit:  # before a million ids are looked at
        raise _prompt_too_long(len(token_ids), body.max_tokens, limit)
    check_token_ids(serving, token_ids, param)
    return token_ids


def _request_of(serving: Serving, body: CompletionBody, token_ids: list[int]) -> GenerationRequest:
    max_tokens = _max_tokens(body.max_tokens, len(token_ids), serving.max_model_len)
    min_tokens = body.min_tokens or 0
    if min_tokens > (body.max_tokens or DEFAULT_MAX_TOKENS):
        raise InvalidRequest("must not be above max_tokens", "min_tokens")
    if body.stop_token_ids:
        check_token_ids(serving, body.stop_token_ids, "stop_token_ids")
    top_p = 1.0 if body.top_p is None else body.top_p
    temperature = 1.0 if body.temperature is None else body.temperature
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=bounded_temperature(temperature) if top_p else 0.0,
        top_k=resolve_top_k(max(body.top_k or 0, 0), serving.facts.vocab_size),
        top_p=top_p or 1.0,
        min_p=body.min_p or 0.0,
        repetition_penalty=bounded_penalty(body.repetition_penalty or 1.0),
        seed=random_seed() if body.seed is None else body.seed % _U64,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min(min_tokens, max_tokens),
        ignore_eos=bool(body.ignore_eos),
    )
    return GenerationRequest(token_ids, sampling, tuple(body.stop or ()), body.priority or 0)


def _max_tokens(wish: int | None, num_prompt_tokens: int, limit: int) -> int:
    """What is wished, or as much of it as the context holds."""
    if num_prompt_tokens >= limit:
        raise _prompt_too_long(num_prompt_tokens, wish, limit)
    return min(wish or DEFAULT_MAX_TOKENS, limit - num_prompt_tokens)


def _prompt_too_long(num_tokens: int, wish: int | None, limit: int) -> InvalidRequest:
    shown = wish or DEFAULT_MAX_TOKENS
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, you requested {num_tokens} tokens "
        f"in the prompt (max_tokens {shown if shown < _U64 else 'far more'}). At most {limit - 1} are possible, so "
        "that one can be generated.",
        "prompt",
        "context_length_exceeded",
    )


async def _collect(call: _Call) -> Completion:
    wholes = await call.running.whole_texts()
    choices = [Choice(i, whole.text, None, _finish_reason(whole.finish)) for i, whole in enumerate(wholes)]
    return call.new_completion(choices=choices, usage=call.usage())


async def _stream_chunks(call: _Call, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    encode = _encoder(call, options)
    async with aclosing(call.running.batches()) as batches:
        async for events in batches:
            yield b"".join(map(encode, events))
    if options.include_usage:
        yield encode_event(call.new_completion(choices=[], usage=call.usage()))
    yield DONE_EVENT


def _encoder(call: _Call, options: StreamOptions) -> Callable[[TokenEvent], bytes]:
    """Makes a chunk of an event. Most differ in their text alone: the rest is encoded once (0.2 us a chunk, not 2)."""
    num_sent = itertools.count(1)
    frames: dict[int, tuple[bytes, bytes]] = {}  # choice -> what stands before and behind its text

    def usage() -> Usage | msgspec.UnsetType | None:
        if options.continuous_usage_stats:
            return call.usage(next(num_sent))
        return None if options.include_usage else msgspec.UNSET

    def encode_whole(index: int, text: str, finish_reason: str | None) -> bytes:
        choice = Choice(index, text, None, finish_reason)
        return encode_event(call.new_completion(choices=[choice], usage=usage()))

    def encode(event: TokenEvent) -> bytes:
        index = event.request_index
        if event.finish is not None or options.continuous_usage_stats:
            return encode_whole(index, event.text, _finish_reason(event.finish))
        if (frame := frames.get(index)) is None:
            before, _, behind = encode_whole(index, "", None).partition(_EMPTY_TEXT)
            frame = frames[index] = (before + _EMPTY_TEXT[:-2], behind)
        return frame[0] + msgspec.json.encode(event.text) + frame[1]

    return encode


def _finish_reason(finish: str | None) -> str | None:
    return None if finish is None else "length" if finish == "length" else "stop"
