"""A tokenizer whose tokens are the 256 bytes and a few markers: for models that were never trained on any other.

Knows tokenizer.json; does not know models.
"""

import json
from pathlib import Path

from server.errors import StartupError
from server.text.token_pieces import byte_level_alphabet

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
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(marker_ids), ensure_ascii=False), encoding="utf-8")
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


def _tokenizer(marker_ids: dict[str, int]) -> dict[str, object]:
    """The content of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": marker} | flags for marker, token_id in marker_ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_level_alphabet(), "merges": []},
    }
