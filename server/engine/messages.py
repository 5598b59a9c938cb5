"""What web and model workers say to each other: length-prefixed msgpack over one Unix stream socket per pair.

Frame = 4-byte little-endian length + msgpack of one tagged Struct. Nothing here knows sockets or requests' state.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 8 << 20
_LENGTH_BYTES = 4

# refused: the request can never be served (InvalidRequest). overloaded: no room for it now (Overloaded).
FinishReason = Literal["length", "eos", "stop_token", "error", "refused", "overloaded"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to choose tokens. Everything is validated and resolved before it gets here: no None, no "default".

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. `max_tokens` counts output
    tokens of the whole request, `seed` is a u64. EOS ids are not among `stop_token_ids`; `ignore_eos` covers only them.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool = False


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Engine to web worker, first frame of every connection."""

    version: int
    pid: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Web worker to engine: a new request, or one that goes on after an engine died.

    token_ids[:num_prompt_tokens] is the prompt; what follows was generated (and delivered) before.
    `request_id` is unique over all web workers of the service: random 32 bits of the process, then a counter.
    A lower `priority` value runs earlier (see server.scheduler.request.PRIORITY_HEAD_START).
    """

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Web worker to engine: the one arrow back. Unknown ids are ignored: the request may just have finished."""

    request_id: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One generated token, or a final event without one (token_id -1: the request failed or was refused).

    finish_reason is set on the last output of a request and only there. `logprob` is NaN unless asked for.
    num_cached_tokens and queue_ms (from arrival to its first step) stand on the first output.
    """

    request_id: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached_tokens: int = 0
    queue_ms: float = 0.0


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Engine to web worker: everything that one step produced for this peer."""

    step: int
    items: list[TokenOutput]


Message = Hello | Submit | Abort | Outputs
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ProtocolError(Exception):
    """The peer sent something that is no frame of ours; the connection must be closed."""


def encode_frame(message: Message) -> bytes:
    """One frame, ready to send. Raises ProtocolError if it would exceed MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes, at most {MAX_FRAME_BYTES} fit in a frame")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def take_frames(buffer: bytearray) -> Sequence[Message]:
    """Decode the complete frames at the front of `buffer` and remove them; a partial frame stays.

    Raises ProtocolError for an oversized length or an undecodable payload.
    """
    messages: list[Message] = []
    position = 0
    while len(buffer) - position >= _LENGTH_BYTES:
        length = int.from_bytes(buffer[position : position + _LENGTH_BYTES], "little")
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES} are allowed")
        end = position + _LENGTH_BYTES + length
        if len(buffer) < end:
            break
        try:
            messages.append(_decoder.decode(buffer[position + _LENGTH_BYTES : end]))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"undecodable frame: {error}") from error
        position = end
    del buffer[:position]
    return messages
