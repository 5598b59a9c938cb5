"""`model-server make-model`: a checkpoint of a known shape with random weights, for benchmarks without downloads."""

import shutil
from pathlib import Path

from server.cli.byte_tokenizer import write_byte_tokenizer
from server.errors import StartupError
from server.models.facts import facts_from_config
from server.models.vocabulary import read_vocabulary
from server.weights.convert import parse_dtype
from server.weights.random_weights import write_random_weights
from server.weights.writer import new_folder, write_json

MAX_SHARD_BYTES = 4_000_000_000  # qwen2-7b in bfloat16: 4 files, as published
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

_QWEN2: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
_QWEN3 = _QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_LLAMA3: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def _shape(
    family: dict[str, object],
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    max_position: int,
    *,
    head_dim: int = 128,
    is_tied: bool = False,
) -> dict[str, object]:
    return family | {
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position,
        "head_dim": head_dim,
        "tie_word_embeddings": is_tied,
        "use_cache": True,
    }


# The published sizes; the tiny ones keep each family's switches at a size that a CPU runs at once.
SHAPES: dict[str, dict[str, object]] = {
    "qwen2-0.5b": _shape(_QWEN2, 896, 4864, 24, 14, 2, 151936, 32768, head_dim=64, is_tied=True),
    "qwen2-1.5b": _shape(_QWEN2, 1536, 8960, 28, 12, 2, 151936, 32768, is_tied=True),
    "qwen2-7b": _shape(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 32768),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, 8, 151936, 40960),
    "llama3-8b": _shape(_LLAMA3, 4096, 14336, 32, 32, 8, 128256, 131072),
    "tiny-qwen2": _shape(_QWEN2, 256, 512, 4, 4, 2, 512, 4096, head_dim=64, is_tied=True),
    "tiny-qwen3": _shape(_QWEN3, 256, 512, 4, 4, 2, 512, 4096, head_dim=64),
    "tiny-llama3": _shape(_LLAMA3, 256, 512, 4, 4, 2, 512, 32768, head_dim=64),
}


def make_model(shape: str, target: Path, *, seed: int, dtype: str, tokenizer: Path | None = None) -> None:
    """Write a checkpoint with the sizes of `shape` and random weights as the new folder `target`.

    The same shape, seed and dtype give the same bytes on any machine. `tokenizer` is a folder whose tokenizer files are
    copied; without one the tokens are bytes. Raises StartupError for an unknown shape or dtype, or if `target` exists.
    """
    if shape not in SHAPES:
        raise StartupError(f"shape {shape!r} is unknown; known: {', '.join(SHAPES)}")
    if seed < 0:
        raise StartupError(f"seed {seed} is negative; 0 or more is expected")
    config = SHAPES[shape] | {"torch_dtype": parse_dtype(dtype)}
    facts = facts_from_config(config)
    with new_folder(target) as partial:
        if tokenizer is None:
            end_ids = write_byte_tokenizer(partial, facts.vocab_size)
        else:
            end_ids = _copy_tokenizer(tokenizer, partial, facts.vocab_size)
        write_json(partial / "config.json", config | {"eos_token_id": end_ids or None})
        write_random_weights(partial, facts, seed, MAX_SHARD_BYTES)
    print(f"{target}: {shape} in {dtype}, seed {seed}, {sum(f.stat().st_size for f in target.iterdir()) / 1e9:.2f} GB")


def _copy_tokenizer(source: Path, target: Path, vocab_size: int) -> list[int]:
    """Copy the tokenizer's files. Returns the ids that end a text."""
    vocabulary = read_vocabulary(source)
    if vocabulary.num_token_ids > vocab_size:
        raise StartupError(
            f"{source / 'tokenizer.json'}: the largest id is {vocabulary.num_token_ids - 1}; "
            f"the model has {vocab_size} ids"
        )
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return list(vocabulary.eos_token_ids)
