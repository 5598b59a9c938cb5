"""Writes the demo model in Hugging Face layout: weights, configuration, tokenizer.

python -m scripts.demo.export --work-dir build/demo --weights final.safetensors --to models/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from scripts.demo.dialogues import CHAT_TEMPLATE
from scripts.demo.model import Architecture
from scripts.demo.tokenizer import SPECIAL_TOKENS

END_OF_TEXT, _, END_OF_TURN = SPECIAL_TOKENS
END_OF_TEXT_ID, IM_START_ID, END_OF_TURN_ID = 4093, 4094, 4095


def config(arch: Architecture) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_positions,
        "rope_theta": arch.rope_theta,
        "rms_norm_eps": arch.rms_norm_eps,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def generation_config() -> dict[str, object]:
    return {
        "eos_token_id": [END_OF_TURN_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": False,
    }


def tokenizer_config(arch: Architecture) -> dict[str, object]:
    ids = zip((END_OF_TEXT_ID, IM_START_ID, END_OF_TURN_ID), SPECIAL_TOKENS, strict=True)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token_id): {"content": token, **flags, "special": True} for token_id, token in ids
        },
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": arch.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    arch = Architecture()
    args.to.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config(arch),
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(arch),
    }
    for name, content in files.items():
        (args.to / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(args.work_dir / "tokenizer.json", args.to / "tokenizer.json")
    shutil.copyfile(args.weights, args.to / "model.safetensors")


if __name__ == "__main__":
    main()
