"""Writes tiny random checkpoints in Hugging Face layout, one family at a time, as transformers 5 would write them.

Knows config.json, tensor names and safetensors files; knows nothing of the server that reads them, so it can judge it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Family = Literal["qwen2", "qwen2.5-tied", "qwen3", "llama3"]
FAMILIES: tuple[Family, ...] = ("qwen2", "qwen2.5-tied", "qwen3", "llama3")
ARCHITECTURES = {
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2.5-tied": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "llama3": ("LlamaForCausalLM", "llama"),
}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# With 16 dimensions or more some frequencies are kept, some are blended and some are divided by the factor.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(
    family: Family = "qwen2",
    *,
    dtype: str = "float32",
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    vocab_size: int = 320,
    max_position: int = 512,
    tied: bool | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> dict[str, object]:
    """A config.json with the keys and spellings of transformers 5. `head_dim` None: hidden / heads, 32 for qwen3."""
    architecture, model_type = ARCHITECTURES[family]
    config: dict[str, object] = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": dtype,
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position,
        "model_type": model_type,
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": family == "qwen2.5-tied" if tied is None else tied,
        "transformers_version": "5.17.0",
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    if family == "llama3":
        config |= {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_parameters": LLAMA3_ROPE}
        config["head_dim"] = head_dim or hidden_size // num_heads
    else:
        config |= {"layer_types": ["full_attention"] * num_layers, "max_window_layers": 28}
        config |= {"sliding_window": None, "use_sliding_window": False}
    if family == "qwen3":
        config |= {"attention_bias": False, "head_dim": head_dim or 32}
    elif head_dim is not None:
        config["head_dim"] = head_dim
    return config


def tiny_tensors(config: Mapping[str, object], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights for `config`, by their names in transformers: logits vary, biases are not 0, norms are not 1.

    Drawn in fp32 and rounded, so that one seed gives the same model in each dtype.
    """
    hidden, inner, vocab, num_layers, num_heads, num_kv_heads = (
        int(str(config[key]))
        for key in (
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    head_dim = int(str(config.get("head_dim") or hidden // num_heads))
    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
    is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    attention_bias = bool(config.get("attention_bias"))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden, std=0.2)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = 1 + normal(hidden, std=0.1)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, hidden, std=0.15)
            if is_qwen2 or attention_bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=0.2)
            if is_qwen3 and name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = 1 + normal(head_dim, std=0.1)
        tensors[prefix + "self_attn.o_proj.weight"] = normal(hidden, q_rows, std=0.15)
        if attention_bias:
            tensors[prefix + "self_attn.o_proj.bias"] = normal(hidden, std=0.2)
        tensors[prefix + "post_attention_layernorm.weight"] = 1 + normal(hidden, std=0.1)
        tensors[prefix + "mlp.gate_proj.weight"] = normal(inner, hidden, std=0.15)
        tensors[prefix + "mlp.up_proj.weight"] = normal(inner, hidden, std=0.15)
        tensors[prefix + "mlp.down_proj.weight"] = normal(hidden, inner, std=0.15)
    tensors["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocab, hidden, std=0.2)
    dtype = TORCH_DTYPES[str(config["dtype"])]
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], num_shards: int = 1) -> list[Path]:
    """model.safetensors, or numbered shards with consecutive runs of `tensors` and their index. Returns the shards."""
    if num_shards == 1:
        path = folder / "model.safetensors"
        save_file(dict(tensors), path, metadata={"format": "pt"})
        return [path]
    names = list(tensors)
    paths, weight_map = [], {}
    for shard in range(num_shards):
        path = folder / f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        members = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: tensors[name] for name in members}, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, path.name)
        paths.append(path)
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return paths


def write_tiny_model(
    folder: Path,
    family: Family = "qwen2",
    *,
    dtype: str = "float32",
    seed: int = 0,
    num_shards: int = 1,
    config_changes: Mapping[str, object] | None = None,
    with_tokenizer: bool = False,
    **config_options: Any,
) -> Path:
    """Make `folder` and write config.json, generation_config.json and weights into it; returns it.

    `config_options` are those of `tiny_config`. `config_changes` are merged into config.json after the weights were
    drawn from the unchanged config.
    """
    config = tiny_config(family, dtype=dtype, **config_options)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, tiny_tensors(config, seed=seed), num_shards)
    config |= dict(config_changes or {})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"_from_model_config": True, "transformers_version": "5.17.0"}
    if config["eos_token_id"] is not None:
        generation["eos_token_id"] = config["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")
    if with_tokenizer:
        from tests.tiny_tokenizer import write_tiny_tokenizer

        write_tiny_tokenizer(folder, int(str(config["vocab_size"])))
    return folder
