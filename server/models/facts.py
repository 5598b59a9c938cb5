"""What config.json says about a dense decoder of the Llama family, as one frozen value.

Knows the architectures and their differences; does not know weights, files or devices.
"""

from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


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


def facts_from_config(config: dict[str, object]) -> ModelFacts:
    """Read a config.json. Raises StartupError naming the key, what was found and what is supported."""
    raise NotImplementedError
