"""Makes a Qwen2 tokenizer folder from Qwen's published vocabulary in tests/data/qwen2.

The published file lists tokens in the order in which their merges were learned; tokenizer.json wants the merges.
"""

import base64
import functools
import hashlib
import itertools
import json
import lzma
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.tiny_tokenizer import SPECIAL_TOKENS, byte_alphabet

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLISHED_FILE = REPOSITORY / "tests" / "data" / "qwen2" / "qwen.tiktoken.xz"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Ranks = dict[bytes, int]


@functools.cache
def qwen2_folder() -> Path:
    """A read-only folder with tokenizer.json, tokenizer_config.json and generation_config.json of Qwen2-Instruct.

    Made in about 3 s, then kept in the repository's .cache until this file or the vocabulary changes.
    """
    sources = Path(__file__).read_bytes() + PUBLISHED_FILE.read_bytes()
    folder = REPOSITORY / ".cache" / f"qwen2-tokenizer-{hashlib.sha256(sources).hexdigest()[:16]}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        write_qwen2_tokenizer(made)
        try:
            made.rename(folder)
        except OSError:  # another test run was quicker
            assert folder.exists()
    return folder


def write_qwen2_tokenizer(folder: Path) -> None:
    """Write the three files into `folder`."""
    tokenizer = _tokenizer(_published_ranks())
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))


def _published_ranks() -> Ranks:
    lines = lzma.decompress(PUBLISHED_FILE.read_bytes()).splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def _tokenizer(ranks: Ranks) -> Tokenizer:
    characters = byte_alphabet()
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab={names[token]: rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """The pair that each token was merged from, in order of rank. Most tokens can be cut into two older ones in one
    way only; for the others the merges before it are replayed.
    """
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            cuts = [cut for cut in range(1, len(token)) if _are_older(ranks, token[:cut], token[cut:], rank)]
            yield (token[: cuts[0]], token[cuts[0] :]) if len(cuts) == 1 else _replayed(ranks, token, rank)


def _are_older(ranks: Ranks, left: bytes, right: bytes, rank: int) -> bool:
    return ranks.get(left, rank) < rank and ranks.get(right, rank) < rank


def _replayed(ranks: Ranks, token: bytes, rank: int) -> tuple[bytes, bytes]:
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
        first = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
        assert pair_ranks[first] < rank, f"{token!r} is not made of two older tokens"
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    left, right = parts
    return left, right
