"""What POST /v1/completions takes and gives: OpenAI's shape with vLLM's extensions.

Knows fields and their bounds. Does not know tokens, models or what is served.
"""

from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from server.api.bodies import Body, Items
from server.api.native_schema import MAX_SEED, StopStrings

MIN_SEED = -(2**63)
MAX_PRIORITY = 2**31 - 1
MAX_STOP_TOKEN_IDS = 128  # each token of a request is compared with them, and each prompt of a call carries them

Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class StreamOptions(Body):
    """`include_usage`: a last chunk with the counts. `continuous_usage_stats`: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionBody(Body):
    """`prompt` is checked by the route: millions of ids are no work for a validator of unions.

    top_p 0 is greedy, as on OpenAI's servers; temperature unset is 1.
    """

    prompt: Prompt
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: StopStrings | None = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt needed no computing."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all choices of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(msgspec.Struct, frozen=True):
    """`finish_reason` null: more follows."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    """An answer, or a chunk of a streamed one. `usage` is absent unless asked for, null until it is due."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, frozen=True):
    """One entry of GET /v1/models."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models."""

    object: str
    data: list[Model]
