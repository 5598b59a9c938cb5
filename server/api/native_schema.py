"""What /generate, /generate_stream and POST / take and give: the shape of text-generation-inference.

Knows fields and their bounds. Does not know tokens, models or what is served.
"""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from server.api.bodies import Body, Items

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


def as_list(value: object) -> object:
    """One stop string stands for a list of one."""
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    Items[StopString],
    BeforeValidator(as_list),
    Field(max_length=MAX_STOP_STRINGS),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class GenerateParameters(Body):
    """`parameters`: unset or null is the default of the HTTP contract."""

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    do_sample: bool | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopStrings | None = None
    truncate: Annotated[int, Field(ge=1)] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    watermark: bool | None = None
    adapter_id: str | None = None
    grammar: Any = None


class GenerateBody(Body):
    """The body of POST /generate and /generate_stream."""

    inputs: str
    parameters: GenerateParameters | None = None


class CompatGenerateBody(GenerateBody):
    """The body of POST /, which chooses by `stream`."""

    stream: bool | None = None


class TokenizeBody(Body):
    """The body of POST /tokenize."""

    inputs: str


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    ids: Items[int]


class Token(msgspec.Struct, frozen=True):
    """`logprob` null: not a number that JSON knows. A special token has no text: joined texts are generated_text."""

    id: int
    text: str
    logprob: float | None
    special: bool


class Details(msgspec.Struct, frozen=True):
    """`details` of an answer that is not streamed. `seed` null: greedy."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[Token]
    tokens: list[Token]


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of /generate."""

    generated_text: str
    details: Details | None = None


class StreamDetails(msgspec.Struct, frozen=True):
    """`details` of the last event of a stream."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of /generate_stream; `index` counts from 1."""

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None


class Info(msgspec.Struct, frozen=True):
    """The answer of GET /info."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    max_input_tokens: int
    max_total_tokens: int
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    version: str
    sha: str | None
