"""A byte-level BPE tokenizer of a few hundred ids, in the Qwen2 folder layout, for tiny random models.

Every text can be encoded (256 byte tokens), common words are one token, and ids that are left over have no text, as
the padding rows of a real head.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WORDS = "the and of to in that was his it with as for he had you not at her sea ship which would there from said"


def write_tiny_tokenizer(folder: Path, vocab_size: int = 320) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder` (made if absent).

    All ids are below `vocab_size` (>= 259): bytes 0..255 in Qwen2's order, then merges, then the special tokens. Text
    ends with <|im_end|> or <|endoftext|>. Returns the special tokens' ids.
    """
    assert vocab_size >= MIN_VOCAB_SIZE, f"vocab_size {vocab_size}, at least {MIN_VOCAB_SIZE} ids are needed"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_level_bpe(max_merges=vocab_size - MIN_VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"]},
    )
    return ids


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: item b for byte b."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def _byte_level_bpe(max_merges: int) -> Tokenizer:
    alphabet = byte_alphabet()
    # Qwen2's and GPT-2's order: printable bytes first, in the order of the characters that stand for them.
    vocab = {character: index for index, character in enumerate(sorted(alphabet))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS.split():
        stem = alphabet[ord(" ")]
        for letter in word:
            if len(merges) < max_merges and stem + letter not in vocab:
                vocab[stem + letter] = len(vocab)
                merges.append((stem, letter))
            stem += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
