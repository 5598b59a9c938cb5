"""Text to token ids and back, for one checkpoint.

Owns the `tokenizers` object and the ids that mean more than text. Does not know requests, streams or chat.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import processors

from server.errors import InvalidRequest, StartupError
from server.models.vocabulary import read_eos_token_ids
from server.text.config import TextConfig, read_text_config
from server.text.huge_heap import huge_heap
from server.text.token_pieces import TokenPieces

# Encoding runs at about 2.5 million characters a second and core (Qwen2's vocabulary): 2000 take 0.7 ms. More than that
# is not done on the event loop, where a hop to a thread and back costs 0.1 ms.
INLINE_MAX_CHARS = 2000
_HUGE_MIN_CHARS = 200_000  # no usual context holds that: its second of work must not delay prompts that are served
_NUM_THREADS = 2
_HEAP_BYTES_PER_FILE_BYTE = 20  # while it is read


class TooManyTokens(Exception):
    """A text has `num_tokens` tokens, which is more than wanted. Their ids were not even listed."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


class TokenSpan(msgspec.Struct, frozen=True):
    """One token of an encoded text: text[start:stop], in characters; parts of one character each repeat it."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer:
    """Built once in the master, before any fork; its threads start with the first long text, where that is needed.

    Loading an 11 MB tokenizer.json takes 0.25-0.4 s with the interpreter lock held, and starts no thread.
    `num_token_ids` is one more than the highest id that has text: the model's head may be wider. `special_ids` have no
    text unless asked for. `eos_token_ids` are sorted and agree with what the engine reads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TextConfig, eos_token_ids: tuple[int, ...]) -> None:
        # Some files carry the limits of their training run; a prompt is never cut or padded behind its author's back.
        backend.no_truncation()
        backend.no_padding()
        _choose_start_and_end(backend, config)
        added = backend.get_added_tokens_decoder()
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_token_ids = _num_token_ids(backend)
        self.pieces = TokenPieces(backend, self.special_ids, self.num_token_ids)
        self._backend = backend

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read a checkpoint's tokenizer.json and what belongs to it. Raises StartupError naming the file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{path} is missing: a checkpoint needs its tokenizer")
        try:
            with huge_heap(_HEAP_BYTES_PER_FILE_BYTE * path.stat().st_size):
                backend = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit, TimeoutError):
            raise
        except BaseException as error:  # plain Exception for most bad files, the panic of its Rust code for some
            raise StartupError(f"cannot read {path}: {error}") from error
        if not backend.get_vocab_size():
            raise StartupError(f"{path} has no tokens")
        return cls(backend, read_text_config(folder), read_eos_token_ids(folder, backend.token_to_id))

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """A prompt's ids. Names of special tokens in it become their ids, as in TGI and vLLM.

        `add_special_tokens`: with the start token that the checkpoint asks for. Empty if there is none and no text.
        `keep_last`: no more than so many, from the end. Releases the interpreter lock. Raises InvalidRequest for a lone
        surrogate, TooManyTokens beyond `max_tokens`.
        """
        token_ids = self._encode(self._backend, text, add_special_tokens, max_tokens)
        return token_ids if keep_last is None else token_ids[-keep_last:]

    async def encode_async(
        self,
        text: str,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """The same for the event loop: beyond INLINE_MAX_CHARS in a thread."""
        arguments = (text, add_special_tokens, max_tokens, keep_last)
        if len(text) <= INLINE_MAX_CHARS:
            return self.encode(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads_for(text), self.encode, *arguments)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is special: "<|im_end|>" is six characters and more, never a control token."""
        return self._encode(self._plain_backend, text, add_special_tokens=False, max_tokens=None)

    def encode_with_offsets(self, text: str) -> list[TokenSpan]:
        """What each token of a prompt covers; added special tokens cover nothing. Same errors as `encode`."""
        check_is_text(text)
        encoding = self._backend.encode_batch([text], add_special_tokens=True)[0]
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        return [TokenSpan(token_id, text[start:stop], start, stop) for token_id, (start, stop) in spans]

    async def encode_with_offsets_async(self, text: str) -> list[TokenSpan]:
        """The same for the event loop: in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads_for(text), self.encode_with_offsets, text)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; any id is taken, those without text add none. Never raises.

        Bytes that are no UTF-8 become U+FFFD, one for each cut-off character, also at the end.
        """
        piece = self.pieces.text_piece if skip_special_tokens else self.pieces.__getitem__
        text = b"".join(map(piece, token_ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.pieces.strips_first_space else text

    @staticmethod
    def _encode(
        backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        check_is_text(text)
        # NOTE: of the library's calls only the batch ones release the interpreter lock; one text starts no thread.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding))  # the list of a million ids would hold the lock for 10 ms
        token_ids: list[int] = encoding.ids
        return token_ids

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """The same model and rules without any added token. The model is shared, not copied."""
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain

    def _threads_for(self, text: str) -> ThreadPoolExecutor:
        return self._threads if len(text) < _HUGE_MIN_CHARS else self._huge_thread

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    @cached_property
    def _huge_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="tokenizer-huge")


def check_is_text(text: str) -> None:
    """Raises InvalidRequest if `text` holds half of a surrogate pair, which JSON escapes can smuggle in."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ord(text[error.start])
        raise InvalidRequest(f"lone surrogate U+{found:04X} at character {error.start}: this is not text") from error


def _choose_start_and_end(backend: tokenizers.Tokenizer, config: TextConfig) -> None:
    """Let add_bos_token and add_eos_token, if the config has them, replace the post-processor, as transformers does."""
    if config.add_bos_token is None and config.add_eos_token is None:
        return
    bos = config.special_tokens.get("bos_token") if config.add_bos_token else None
    eos = config.special_tokens.get("eos_token") if config.add_eos_token else None
    wanted = [token for token in (bos, eos) if token is not None and backend.token_to_id(token) is not None]
    template = [part for part in (bos, "$A", eos) if part in (*wanted, "$A")]
    ids = [(token, backend.token_to_id(token)) for token in wanted]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _num_token_ids(backend: tokenizers.Tokenizer) -> int:
    num_base = backend.get_vocab_size(with_added_tokens=False)
    if num_base and backend.id_to_token(num_base - 1) is None:  # ids with gaps: rare, and 50 ms to look at all
        num_base = max(backend.get_vocab(with_added_tokens=False).values()) + 1
    return max(num_base, max(backend.get_added_tokens_decoder(), default=-1) + 1)
