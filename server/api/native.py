"""POST /generate, /generate_stream, POST /, /info, /tokenize, /detokenize: the shape of text-generation-inference."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

import server
from server.api.bodies import openapi_body, read_body
from server.api.errors import end_in_error_event
from server.api.generation import (
    Finish,
    Generation,
    GenerationCall,
    GenerationRequest,
    Times,
    TokenEvent,
    hold_while_loading,
)
from server.api.native_schema import (
    MAX_STOP_STRINGS,
    CompatGenerateBody,
    Details,
    DetokenizeBody,
    GenerateBody,
    Generated,
    GenerateParameters,
    Info,
    StreamDetails,
    StreamEvent,
    Token,
    TokenizeBody,
)
from server.api.prompts import check_token_ids, encode_prompt, random_seed, resolve_top_k
from server.api.serving import Serving, serving_of
from server.api.sse import EventStream, encode_event, unless_disconnected
from server.engine.messages import SamplingParams
from server.errors import InvalidRequest
from server.ops.sampling import bounded_penalty, bounded_temperature
from server.text.tokenizer import TooManyTokens

router = APIRouter()

_SPANS_A_TURN = 2000  # of a million that one body can ask for: 0.5 ms of the event loop
_FINISH_WORDS: dict[Finish, str] = {"length": "length", "eos": "eos_token", "stop": "stop_sequence"}


@dataclass(frozen=True, slots=True)
class _Call:
    """One admitted call: what runs, and how its answer is to look. `seed` None: greedy. `prefix`: text before it."""

    running: GenerationCall
    seed: int | None
    prefix: str
    wants_details: bool

    @property
    def generation(self) -> Generation:
        """Its one request."""
        return self.running.generations[0]


@router.post("/generate", openapi_extra=openapi_body(GenerateBody))
async def generate(request: Request) -> Response:
    """Generate text and answer when it is complete."""
    serving, body = serving_of(request), await read_body(GenerateBody, request)
    await hold_while_loading(serving, request)
    call = await _admit(serving, body, with_logprobs=_wants_details(body), full_text_default=False)
    return await _whole_answer(serving, call, request, as_list=False)


@router.post("/generate_stream", openapi_extra=openapi_body(GenerateBody))
async def generate_stream(request: Request) -> Response:
    """Generate text and send an event for each token."""
    serving, body = serving_of(request), await read_body(GenerateBody, request)
    await hold_while_loading(serving, request)
    return _streamed_answer(serving, await _admit_stream(serving, body, full_text_default=False), request)


@router.post("/", openapi_extra=openapi_body(CompatGenerateBody))
async def generate_compat(request: Request) -> Response:
    """Either of the two, chosen by `stream`: what huggingface_hub's InferenceClient calls."""
    serving, body = serving_of(request), await read_body(CompatGenerateBody, request)
    await hold_while_loading(serving, request)
    if body.stream:
        return _streamed_answer(serving, await _admit_stream(serving, body, full_text_default=True), request)
    call = await _admit(serving, body, with_logprobs=_wants_details(body), full_text_default=True)
    return await _whole_answer(serving, call, request, as_list=True)


@router.get("/info")
async def info(request: Request) -> Response:
    """What is served, and its limits."""
    serving = serving_of(request)
    engine = serving.settings.engine
    return _json(
        Info(
            model_id=serving.resolved.served_name,
            model_sha=serving.revision,
            model_dtype=serving.facts.dtype,
            model_device_type=serving.resolved.device,
            max_input_tokens=serving.max_model_len - 1,
            max_total_tokens=serving.max_model_len,
            max_concurrent_requests=engine.max_num_requests + engine.max_waiting_requests,
            max_best_of=1,
            max_stop_sequences=MAX_STOP_STRINGS,
            version=server.__version__,
            sha=None,
        )
    )


@router.post("/tokenize", openapi_extra=openapi_body(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, and which characters each covers."""
    serving, body = serving_of(request), await read_body(TokenizeBody, request)
    spans = await serving.tokenizer.encode_with_offsets_async(body.inputs)
    parts = []
    for start in range(0, len(spans), _SPANS_A_TURN):
        parts.append(msgspec.json.encode(spans[start : start + _SPANS_A_TURN])[1:-1])
        await asyncio.sleep(0)
    return Response(b"[" + b",".join(parts) + b"]", media_type="application/json")


@router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    serving, body = serving_of(request), await read_body(DetokenizeBody, request)
    if body.ids:
        check_token_ids(serving, body.ids, "ids")
    text = await asyncio.to_thread(serving.tokenizer.decode, body.ids, skip_special_tokens=False)
    return _json({"text": text})


async def _admit(serving: Serving, body: GenerateBody, with_logprobs: bool, full_text_default: bool) -> _Call:
    """Everything that can be refused is refused here, before the first byte of an answer."""
    times = Times()
    parameters = body.parameters or GenerateParameters()
    _refuse_unsupported(parameters)
    token_ids = await _encode(serving, body.inputs, parameters)
    sampling = _sampling_of(parameters, serving, len(token_ids), with_logprobs)
    request = GenerationRequest(token_ids, sampling, tuple(parameters.stop or ()))
    wants_full_text = full_text_default if parameters.return_full_text is None else parameters.return_full_text
    return _Call(
        running=GenerationCall(serving, [request], times),
        seed=sampling.seed if sampling.temperature else None,
        prefix=body.inputs if wants_full_text else "",
        wants_details=bool(parameters.details),
    )


async def _encode(serving: Serving, text: str, parameters: GenerateParameters) -> list[int]:
    if parameters.truncate is not None:
        return await encode_prompt(serving, text, "inputs", keep_last=parameters.truncate)
    limit = serving.max_model_len
    try:
        return await encode_prompt(serving, text, "inputs", max_tokens=limit)
    except TooManyTokens as error:
        raise _prompt_too_long(error.num_tokens, parameters.max_new_tokens, limit) from None


async def _admit_stream(serving: Serving, body: GenerateBody, full_text_default: bool) -> _Call:
    if body.parameters is not None and body.parameters.decoder_input_details:
        raise InvalidRequest("is not possible while streaming", "parameters.decoder_input_details")
    return await _admit(serving, body, with_logprobs=True, full_text_default=full_text_default)


def _wants_details(body: GenerateBody) -> bool:
    return body.parameters is not None and bool(body.parameters.details)


def _refuse_unsupported(parameters: GenerateParameters) -> None:
    wished = {
        "typical_p": parameters.typical_p is not None,
        "frequency_penalty": bool(parameters.frequency_penalty),
        "decoder_input_details": bool(parameters.decoder_input_details),
        "top_n_tokens": bool(parameters.top_n_tokens),
        "best_of": (parameters.best_of or 1) > 1,
        "watermark": bool(parameters.watermark),
        "adapter_id": parameters.adapter_id is not None,
        "grammar": parameters.grammar is not None,
    }
    for name, is_wished in wished.items():
        if is_wished:
            raise InvalidRequest("is not supported by this server", f"parameters.{name}")


def _sampling_of(
    parameters: GenerateParameters, serving: Serving, num_prompt_tokens: int, with_logprobs: bool
) -> SamplingParams:
    """Sampling happens if do_sample is true or a parameter of it is set, unless the temperature is 0; else greedy."""
    samples = (
        bool(parameters.do_sample)
        or bool(parameters.temperature)
        or parameters.top_k is not None
        or parameters.top_p is not None
    )
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    return SamplingParams(
        max_tokens=_max_tokens(parameters.max_new_tokens, num_prompt_tokens, serving.max_model_len),
        temperature=bounded_temperature(temperature) if samples else 0.0,
        top_k=resolve_top_k(parameters.top_k or 0, serving.facts.vocab_size),
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        repetition_penalty=bounded_penalty(parameters.repetition_penalty or 1.0),
        seed=random_seed() if parameters.seed is None else parameters.seed,
        logprobs=with_logprobs,
    )


def _max_tokens(wish: int | None, num_prompt_tokens: int, limit: int) -> int:
    """The wish, which must fit; without one, what is left of the context."""
    if num_prompt_tokens >= limit:
        raise _prompt_too_long(num_prompt_tokens, wish, limit)
    if wish is None:
        return limit - num_prompt_tokens
    if num_prompt_tokens + wish > limit:
        raise InvalidRequest(
            f"`inputs` tokens + `max_new_tokens` must be <= {limit}. Given: {num_prompt_tokens} `inputs` tokens and "
            f"{wish if wish < 10**12 else 'far more'} `max_new_tokens`",
            "parameters.max_new_tokens",
        )
    return wish


def _prompt_too_long(num_tokens: int, wish: int | None, limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens (max_new_tokens {wish}); prompt and output together may have "
        f"{limit}, so at most {limit - 1} for the prompt",
        "inputs",
    )


async def _whole_answer(serving: Serving, call: _Call, request: Request, as_list: bool) -> Response:
    read = _with_details if call.wants_details else _text_alone
    with call.running:
        answer = await unless_disconnected(request.receive, read(call))
    headers = _request_headers(serving, call.generation) | _time_headers(call.generation)
    return _json([answer] if as_list else answer, headers)


async def _text_alone(call: _Call) -> Generated:
    [whole] = await call.running.whole_texts()
    return Generated(call.prefix + whole.text)


async def _with_details(call: _Call) -> Generated:
    events = [event async for batch in call.running.batches() for event in batch]
    finish = events[-1].finish
    assert finish is not None, "the last event of a generation says why it is the last"
    tokens = [_token(event) for event in events]
    details = Details(_FINISH_WORDS[finish], len(events), call.seed, [], tokens)
    return Generated(call.prefix + "".join(event.text for event in events), details)


def _streamed_answer(serving: Serving, call: _Call, request: Request) -> Response:
    chunks = end_in_error_event(_stream_chunks(call), request.url.path, serving.metrics.count_error)
    return EventStream(chunks, call.running.close, _request_headers(serving, call.generation))


async def _stream_chunks(call: _Call) -> AsyncGenerator[bytes, None]:
    texts = [call.prefix]
    async with aclosing(call.running.batches()) as batches:
        async for events in batches:
            texts += [event.text for event in events]
            yield b"".join([_encode_token(call, event, texts) for event in events])


def _encode_token(call: _Call, event: TokenEvent, texts: list[str]) -> bytes:
    """One event; `texts` is only looked at for the last."""
    if event.finish is None:
        return encode_event(StreamEvent(event.number, _token(event), None, None))
    details = StreamDetails(
        finish_reason=_FINISH_WORDS[event.finish],
        generated_tokens=event.number,
        seed=call.seed,
        input_length=len(call.generation.request.token_ids),
    )
    return encode_event(StreamEvent(event.number, _token(event), "".join(texts), details))


def _token(event: TokenEvent) -> Token:
    return Token(event.token_id, event.text, event.logprob, event.is_special)


def _request_headers(serving: Serving, generation: Generation) -> dict[str, str]:
    """Known when the request is admitted, so streams have them too. Times in milliseconds."""
    times = generation.times
    return {
        "x-compute-type": f"{serving.resolved.device}+{serving.resolved.backend}",
        "x-validation-time": _milliseconds(times.admitted - times.arrived),
        "x-prompt-tokens": str(len(generation.request.token_ids)),
    }


def _time_headers(generation: Generation) -> dict[str, str]:
    times = generation.times
    inference_s = times.last_token - times.admitted - times.queue_s
    return {
        "x-compute-time": _milliseconds(times.last_token - times.arrived),
        "x-total-time": _milliseconds(times.last_token - times.arrived),
        "x-queue-time": _milliseconds(times.queue_s),
        "x-inference-time": _milliseconds(inference_s),
        "x-time-per-token": _milliseconds(inference_s / generation.num_generated),
        "x-generated-tokens": str(generation.num_generated),
    }


def _milliseconds(duration_s: float) -> str:
    return f"{duration_s * 1e3:.3f}"


def _json(value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
