"""Which ids a checkpoint's tokenizer can name, and which of them end a text.

The engine needs these two facts without the tokenizers library; the web workers' Tokenizer must agree (tested).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from server.errors import StartupError

_T = TypeVar("_T")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _BpeModel(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    model: _BpeModel
    added_tokens: list[_AddedToken] = []


class _TokenObject(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _TokenObject | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class Vocabulary(msgspec.Struct, frozen=True):
    """num_token_ids: one more than the highest id that has text. eos_token_ids: sorted, may be empty."""

    num_token_ids: int
    eos_token_ids: tuple[int, ...]


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read tokenizer.json, tokenizer_config.json and generation_config.json of a checkpoint folder.

    Raises StartupError if tokenizer.json is missing, empty or not of a vocabulary kind.
    """
    tokenizer = _read(folder / "tokenizer.json", _TokenizerFile)
    if tokenizer is None:
        raise StartupError(f"{folder / 'tokenizer.json'} is missing: a checkpoint needs its tokenizer")
    token_ids = dict(tokenizer.model.vocab)
    token_ids.update({token.content: token.id for token in tokenizer.added_tokens})
    if not token_ids:
        raise StartupError(f"{folder / 'tokenizer.json'} has no tokens")
    return Vocabulary(max(token_ids.values()) + 1, read_eos_token_ids(folder, token_ids.get))


def read_eos_token_ids(folder: Path, token_id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """The sorted ids that end a text: those of generation_config.json (else config.json) and the tokenizer's eos_token.

    `token_id_of` gives a token's id, None if there is no such token.
    """
    return tuple(sorted(_eos_of_generation(folder) | _eos_of_tokenizer(folder, token_id_of)))


def _eos_of_generation(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = _read(folder / name, _GenerationConfig)
        eos = config.eos_token_id if config else None
        found |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        if found:  # generation_config.json wins: config.json repeats the base model's id
            break
    return found


def _eos_of_tokenizer(folder: Path, token_id_of: Callable[[str], int | None]) -> set[int]:
    config = _read(folder / "tokenizer_config.json", _TokenizerConfig)
    token = config.eos_token if config else None
    content = token.content if isinstance(token, _TokenObject) else token
    token_id = token_id_of(content) if content is not None else None
    return set() if token_id is None else {token_id}


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
