"""A tokenizer whose tokens are the 256 bytes and a few markers: for models that were never trained on any other.

Knows tokenizer.json; does not know models.
"""

import json
from pathlib import Path

from server.errors import StartupError

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_TOKENS = 256 + len(MARKERS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_tokenizer(folder: Path, vocab_size: int) -> list[int]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json. Returns the ids that end a text.

    Id b is byte b, the markers follow; ids from 259 to `vocab_size` have no text. Raises StartupError if too few.
    """
    if vocab_size < NUM_TOKENS:
        raise StartupError(f"vocab_size {vocab_size} is too small for a byte tokenizer; {NUM_TOKENS} ids are needed")
    marker_ids = {marker: 256 + i for i, marker in enumerate(MARKERS)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": marker,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for marker, token_id in marker_ids.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": {c: b for b, c in enumerate(_byte_characters())}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    end_ids = [marker_ids["<|im_end|>"], marker_ids["<|endoftext|>"]]
    generation = {"eos_token_id": end_ids, "pad_token_id": marker_ids["<|endoftext|>"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return end_ids


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table): a printable one is itself."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
