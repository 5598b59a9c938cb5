"""What config.json says about a dense decoder of the Llama family, as one frozen value.

Knows the architectures and their differences; does not know weights, files or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from server.errors import StartupError

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_LAYERS = 1024  # sanity bounds: far above any model, far below what would exhaust memory while being checked
MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling ("llama3" rope type), the only one supported besides none."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and switches of one model. Derived sizes are properties, so nothing can disagree."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: DType

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: per KV head, its query heads, then k, then v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_mlp_blocks(self) -> int:
        """gate and up are interleaved in this many blocks of rows, so that a tensor-parallel slice is contiguous."""
        return self.num_kv_heads if self.intermediate_size % self.num_kv_heads == 0 else 1

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes where config.json is silent. Biases None: config.json's attention_bias decides."""

    model_type: str
    qkv_bias: bool | None
    out_bias: bool | None
    qk_norm: bool
    default_head_dim: int | None


_FAMILIES = {
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, out_bias=False, qk_norm=False, default_head_dim=None),
    "Qwen3ForCausalLM": _Family("qwen3", qkv_bias=None, out_bias=None, qk_norm=True, default_head_dim=128),
    "LlamaForCausalLM": _Family("llama", qkv_bias=None, out_bias=None, qk_norm=False, default_head_dim=None),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

# Keys that change the maths in ways that the decoder does not know. A value in the tuple changes nothing.
_OFF: tuple[object, ...] = (None, False, 0, [], {})
_UNIT: tuple[object, ...] = (None, 1)
_REFUSED_KEYS: dict[str, tuple[tuple[object, ...], str]] = {
    "auto_map": (_OFF, "code shipped inside a checkpoint is never run"),
    "quantization_config": (_OFF, "quantised checkpoints are not supported; use the float32, bfloat16 or float16 one"),
    "compression_config": (_OFF, "compressed checkpoints are not supported"),
    "mlp_bias": (_OFF, "biases in the MLP are not supported"),
    "num_experts": (_OFF, "mixtures of experts are not supported"),
    "num_local_experts": (_OFF, "mixtures of experts are not supported"),
    "n_routed_experts": (_OFF, "mixtures of experts are not supported"),
    "vision_config": (_OFF, "only text models are supported"),
    "text_config": (_OFF, "only text models are supported"),
    "is_encoder_decoder": (_OFF, "only decoders are supported"),
    "add_cross_attention": (_OFF, "cross attention is not supported"),
    "pruned_heads": (_OFF, "pruned heads are not supported"),
    "dual_chunk_attention_config": (_OFF, "dual chunk attention is not supported"),
    "attention_chunk_size": (_OFF, "chunked attention is not supported"),
    "no_rope_layers": (_OFF, "layers without rotary positions are not supported"),
    "attn_logit_softcapping": (_OFF, "soft-capped logits are not supported"),
    "final_logit_softcapping": (_OFF, "soft-capped logits are not supported"),
    "clip_qkv": (_OFF, "clipped projections are not supported"),
    "partial_rotary_factor": (_UNIT, "partial rotary embeddings are not supported"),
    "logit_scale": (_UNIT, "scaled logits are not supported"),
    "logits_scaling": (_UNIT, "scaled logits are not supported"),
    "embedding_multiplier": (_UNIT, "scaled embeddings are not supported"),
    "residual_multiplier": (_UNIT, "scaled residuals are not supported"),
    "attention_multiplier": (_OFF, "a fixed attention scale is not supported"),
}


def _refuse(key: str, found: object, expected: str) -> StartupError:
    return StartupError(f"config.json: {key} is {found!r}; {expected}")


class _Keys:
    """Typed access to a JSON object. A null counts as a missing key; `default` None: the key must be there."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def _get(self, key: str, default: object, expected: str) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise StartupError(f"config.json: {self._prefix}{key} is missing; {expected} is needed")
        return default

    def size(self, key: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        expected = f"a whole number from 1 to {maximum}"
        value = self._get(key, default, expected)
        if type(value) is not int or not 1 <= value <= maximum:
            raise _refuse(self._prefix + key, value, f"{expected} is expected")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        expected = f"a number above 0 and below {MAX_NUMBER}"
        value = self._get(key, default, expected)
        if type(value) not in (int, float) or not 0 < cast(float, value) < MAX_NUMBER:
            raise _refuse(self._prefix + key, value, f"{expected} is expected")
        return float(cast(float, value))

    def flag(self, key: str) -> bool:
        value = self._get(key, False, "")
        if not isinstance(value, bool):
            raise _refuse(self._prefix + key, value, "true or false is expected")
        return value


def facts_from_config(config: Mapping[str, object]) -> ModelFacts:
    """Read a config.json of transformers 4 or 5. Whatever changes the maths is read, or refused by name.

    Where a key is absent the default of transformers holds. `dtype` is the config's, float32 if it names none.
    Raises StartupError with the key, what was found and what is supported.
    """
    architecture, family = _architecture(config)
    _refuse_unknown_maths(config)
    keys = _Keys(config)
    num_layers = keys.size("num_hidden_layers", maximum=MAX_LAYERS)
    max_position = keys.size("max_position_embeddings")
    _refuse_sliding_window(keys, family, num_layers, max_position)
    num_heads = keys.size("num_attention_heads")
    hidden_size = keys.size("hidden_size")
    rope_theta, rope_scaling = _rope(keys)
    attention_bias = keys.flag("attention_bias")
    return ModelFacts(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(keys, num_heads),
        head_dim=_head_dim(keys, family, hidden_size, num_heads),
        max_position=max_position,
        rms_eps=keys.positive("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        qk_norm=family.qk_norm,
        tied_head=keys.flag("tie_word_embeddings"),
        dtype=_dtype(config),
    )


def _architecture(config: Mapping[str, object]) -> tuple[str, _Family]:
    supported = f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in SUPPORTED_ARCHITECTURES:
        raise _refuse("architectures", found, supported)
    architecture = cast(str, found[0])
    family = _FAMILIES[architecture]
    model_type = config.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise _refuse("model_type", model_type, f"{family.model_type!r} belongs to {architecture}; {supported}")
    return architecture, family


def _refuse_unknown_maths(config: Mapping[str, object]) -> None:
    for key, (neutral, reason) in _REFUSED_KEYS.items():
        if config.get(key) not in neutral:
            raise _refuse(key, config[key], reason)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise _refuse("hidden_act", activation, "only 'silu' is supported")


def _num_kv_heads(keys: _Keys, num_heads: int) -> int:
    num_kv_heads = keys.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise _refuse(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads} is expected"
        )
    return num_kv_heads


def _head_dim(keys: _Keys, family: _Family, hidden_size: int, num_heads: int) -> int:
    if keys.values.get("head_dim") is None and family.default_head_dim is None and hidden_size % num_heads:
        raise _refuse("hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads} is expected")
    head_dim = keys.size("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise _refuse("head_dim", head_dim, "rotary embeddings need an even one")
    return head_dim


def _refuse_sliding_window(keys: _Keys, family: _Family, num_layers: int, max_position: int) -> None:
    """Refuse a window that some layer would use. Qwen configs often name one that is switched off."""
    config = keys.values
    layer_types = config.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        raise _refuse("layer_types", layer_types, f"{num_layers} times 'full_attention' is supported")
    if family.model_type == "llama":
        window = config.get("sliding_window")
        in_use = isinstance(window, int) and window < max_position
    else:
        window = config.get("sliding_window", 4096)
        is_on = keys.flag("use_sliding_window") and layer_types is None and window is not None
        in_use = is_on and keys.size("max_window_layers", 28) < num_layers
    if in_use:
        raise _refuse("sliding_window", window, "attention with a sliding window is not supported")


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    config = keys.values
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise _refuse(name, found, "an object is expected")
    rope = dict(found)
    rope_type = rope.pop("rope_type", None) or rope.pop("type", "default")
    rope.pop("type", None)
    inner = _Keys(rope, name + ".")
    outer_theta = keys.positive("rope_theta", inner.positive("rope_theta", 10000.0))
    theta = inner.positive("rope_theta", outer_theta)
    if theta != outer_theta:
        raise _refuse("rope_theta", outer_theta, f"{name}.rope_theta says {theta}; remove one of the two")
    known = {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if rope_type not in ("default", "llama3"):
        raise _refuse(f"{name}.rope_type", rope_type, "supported: 'default', 'llama3'")
    if rope.get("partial_rotary_factor") in _UNIT:
        rope.pop("partial_rotary_factor", None)
    unknown = sorted(set(rope) - (known if rope_type == "llama3" else {"rope_theta"}))
    if unknown:
        raise _refuse(f"{name}.{unknown[0]}", rope[unknown[0]], f"rope type {rope_type!r} has no such key")
    return theta, _llama3_scaling(keys, inner) if rope_type == "llama3" else None


def _llama3_scaling(keys: _Keys, rope: _Keys) -> RopeScaling:
    scaling = RopeScaling(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position=rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise _refuse(
            "high_freq_factor",
            scaling.high_freq_factor,
            f"more than low_freq_factor = {scaling.low_freq_factor} is expected",
        )
    # transformers lets a top-level key win over the one inside: two values would be two models.
    outer = keys.size("original_max_position_embeddings", scaling.original_max_position)
    if outer != scaling.original_max_position:
        raise _refuse(
            "original_max_position_embeddings",
            outer,
            f"rope says {scaling.original_max_position}; remove one of the two",
        )
    return scaling


def _dtype(config: Mapping[str, object]) -> DType:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    found = config.get(key) or "float32"
    name = found.removeprefix("torch.") if isinstance(found, str) else found
    for dtype in DTYPE_BYTES:
        if name == dtype:
            return dtype
    raise _refuse(key, found, f"supported: {', '.join(DTYPE_BYTES)}")
