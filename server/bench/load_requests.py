"""The bodies of a load: random token ids as prompts, no two alike, greedy, and always of the same length.

Ids instead of text, so that every server gets prompts of exactly the same number of tokens. Knows POST
/v1/completions; does not know who sends the bodies, or when.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec
import numpy as np

from server.errors import StartupError

PATH = "/v1/completions"
# Of a server whose model is not at hand: in the usual vocabularies bytes and control tokens lie below or far above.
DEFAULT_TOKEN_IDS = range(300, 4000)
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """How long requests are. `num_shared`: leading tokens that all have in common. `batch`: prompts of one call."""

    num_prompt_tokens: int
    num_tokens: int
    num_shared: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.num_shared >= self.num_prompt_tokens:
            raise StartupError(
                f"--shared-prefix {self.num_shared}: must be less than the {self.num_prompt_tokens} --input-tokens"
            )

    @property
    def expected_tokens(self) -> int:
        """What one call generates."""
        return self.num_tokens * self.batch


class RequestMaker:
    """Makes one body after the other; the same seed gives the same bodies."""

    def __init__(self, shape: Shape, token_ids: range, model: str, seed: Sequence[int]) -> None:
        self._shape = shape
        self._token_ids = token_ids
        self._model = model
        self._random = np.random.default_rng(seed)
        # Not of the seed: the prefix is shared with the warm-up and between runs.
        self._prefix = self._draw(np.random.default_rng(0), shape.num_shared)

    def next_body(self, is_stream: bool) -> bytes:
        """JSON of the next request."""
        prompts = [self._next_prompt() for _ in range(self._shape.batch)]
        body: dict[str, object] = {
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "max_tokens": self._shape.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
        }
        if self._model:
            body["model"] = self._model
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def _next_prompt(self) -> list[int]:
        return self._prefix + self._draw(self._random, self._shape.num_prompt_tokens - self._shape.num_shared)

    def _draw(self, random: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = random.integers(self._token_ids.start, self._token_ids.stop, count).tolist()
        return ids


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _Config(msgspec.Struct):
    vocab_size: int


def ordinary_token_ids(folder: Path) -> range:
    """Ids of a model that are no control tokens: the longest run without an added one. Raises StartupError."""
    try:
        config = msgspec.json.decode((folder / _CONFIG_FILE).read_bytes(), type=_Config)
        tokenizer = msgspec.json.decode((folder / _TOKENIZER_FILE).read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(
            f"{folder}: which token ids there are cannot be read ({error}); name some: --token-ids 300:4000"
        ) from error
    return longest_run(config.vocab_size, (token.id for token in tokenizer.added_tokens))


def longest_run(vocab_size: int, excluded: Iterable[int]) -> range:
    """The longest range of ids below `vocab_size` that holds none of `excluded`."""
    cuts = [-1, *sorted({token_id for token_id in excluded if token_id < vocab_size}), vocab_size]
    runs = [range(before + 1, after) for before, after in pairwise(cuts)]
    return max(runs, key=len)


def parse_token_ids(text: str) -> range:
    """`LOW:HIGH`, HIGH excluded. Raises StartupError."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise StartupError(f"--token-ids {text}: LOW:HIGH is expected, e.g. 300:4000 (HIGH is excluded)")
    return range(int(low), int(high))


def parse_numbers(option: str, text: str, least: float) -> Sequence[float]:
    """Comma-separated numbers of at least `least`. Raises StartupError naming the option."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(not least <= number < inf for number in numbers):
        raise StartupError(f"{option} {text}: numbers of at least {least:g} are expected, separated by commas")
    return numbers
