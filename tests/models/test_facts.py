"""facts_from_config reads what transformers writes, and refuses by name what the decoder does not know."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from server.errors import StartupError
from server.models.facts import RopeScaling, facts_from_config
from tests.tiny_models import FAMILIES, LLAMA3_ROPE, Family, tiny_config

QWEN2_7B = {  # as published, written by transformers 4
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SLIDING = {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1, "sliding_window": 128}
LLAMA_31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_a_config_of_transformers_4_is_read() -> None:
    facts = facts_from_config(QWEN2_7B)
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (28, 28, 4, 128)
    assert (facts.dtype, facts.rope_theta, facts.rope_scaling, facts.tied_head) == ("bfloat16", 1e6, None, False)
    assert (facts.qkv_bias, facts.out_bias, facts.qk_norm) == (True, False, False)
    assert (facts.group_size, facts.qkv_rows, facts.num_mlp_blocks) == (7, 4608, 4)
    assert facts.kv_bytes_per_token == 57344


def test_old_and_new_spelling_of_llama3_scaling_mean_the_same() -> None:
    new = tiny_config("llama3") | {"rope_parameters": LLAMA_31_SCALING | {"rope_theta": 500000.0}}
    old = tiny_config("llama3") | {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": LLAMA_31_SCALING}
    assert facts_from_config(new) == facts_from_config(old)
    facts = facts_from_config(new)
    assert (facts.rope_theta, facts.rope_scaling) == (500000.0, RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_rewrites_keeps_its_facts(tmp_path: Path, family: Family) -> None:
    config = tiny_config(family, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string())
    assert facts_from_config(again) == facts_from_config(config)


def test_each_family_has_its_own_switches() -> None:
    switches = {family: facts_from_config(tiny_config(family)) for family in FAMILIES}
    assert [f.qkv_bias for f in switches.values()] == [True, True, False, False]
    assert [f.qk_norm for f in switches.values()] == [False, False, True, False]
    assert [f.tied_head for f in switches.values()] == [False, True, False, False]
    assert [f.head_dim for f in switches.values()] == [16, 16, 32, 16]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_attention_bias_means_qkv_and_out(family: Family) -> None:
    facts = facts_from_config(tiny_config(family) | {"attention_bias": True})
    assert facts.qkv_bias
    assert facts.out_bias


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    config = tiny_config("qwen3")
    for key in ("rms_norm_eps", "rope_parameters", "hidden_act", "tie_word_embeddings", "head_dim", "dtype"):
        del config[key]
    facts = facts_from_config(config)
    assert (facts.rms_eps, facts.rope_theta, facts.head_dim, facts.dtype) == (1e-6, 10000.0, 128, "float32")
    llama = tiny_config("llama3") | {"num_key_value_heads": None, "head_dim": None}
    assert facts_from_config(llama).num_kv_heads == 4
    assert facts_from_config(llama).head_dim == 16


def test_a_window_that_is_switched_off_is_fine() -> None:
    config = tiny_config("qwen2")
    del config["layer_types"]
    facts = facts_from_config(config)
    assert facts_from_config(config | {"sliding_window": 128}) == facts
    assert facts_from_config(config | {"use_sliding_window": True, "sliding_window": 128}) == facts  # from layer 28 on
    assert facts_from_config(config | {"use_sliding_window": True}) == facts


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen2", {"architectures": ["Qwen2MoeForCausalLM"]}, "supported: Qwen2ForCausalLM, Qwen3ForCausalLM, Llama"),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ("qwen2", {"architectures": None}, "architectures is None"),
        ("qwen2", {"architectures": [{}]}, "architectures"),
        ("qwen2", {"architectures": "Qwen2ForCausalLM"}, "architectures"),
        ("qwen2", {"model_type": "qwen2_vl"}, "model_type is 'qwen2_vl'"),
        ("qwen2", {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "auto_map.*never run"),
        ("qwen2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen2", {"num_experts": 8}, "num_experts is 8"),
        ("llama3", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama3", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ("llama3", {"sliding_window": 128}, "sliding_window is 128"),
        ("qwen2", SLIDING, "sliding_window is 128"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen2", {"hidden_size": 0}, "hidden_size is 0"),
        ("qwen2", {"hidden_size": 64.0}, "hidden_size is 64.0"),
        ("qwen2", {"hidden_size": 66}, "hidden_size is 66"),
        ("qwen2", {"vocab_size": True}, "vocab_size is True"),
        ("qwen2", {"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ("qwen2", {"num_hidden_layers": 10**6, "layer_types": None}, "num_hidden_layers is 1000000"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("qwen2", {"head_dim": 15}, "head_dim is 15"),
        ("qwen2", {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ("qwen2", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ("qwen2", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("qwen2", {"rope_theta": float("nan")}, "rope_theta is nan"),
        ("qwen2", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ("qwen2", {"dtype": ["float32"]}, "dtype"),
        ("qwen2", {"rope_theta": 5.0}, "rope_theta is 5.0.*10000"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        ("qwen2", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic'"),
        ("qwen2", {"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ("qwen2", {"rope_scaling": [4]}, "rope_scaling is"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama3", {"rope_parameters": LLAMA3_ROPE | {"factor": None}}, "rope_parameters.factor is missing"),
        ("llama3", {"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ("llama3", {"original_max_position_embeddings": 65}, "original_max_position_embeddings is 65"),
        ("llama3", {"rope_parameters": LLAMA3_ROPE | {"attention_factor": 2.0}}, "rope_parameters.attention_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family: Family, changes: dict[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        facts_from_config(tiny_config(family) | changes)
