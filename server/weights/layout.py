"""Where every tensor of the served model lies in the one weight allocation, and which source bytes fill it.

One rule from config facts to offsets: master, loader and model worker compute the same layout, so none travels.

    <name>                     rows come from (source rows in this order)
    embed.weight               model.embed_tokens.weight
    layers.N.input_norm.weight model.layers.N.input_layernorm.weight
    layers.N.qkv.weight|bias   per KV head g: q rows of its query heads, k rows of g, v rows of g
    layers.N.q_norm.weight     (qk_norm)    layers.N.k_norm.weight
    layers.N.out.weight|bias   self_attn.o_proj
    layers.N.mlp_norm.weight   post_attention_layernorm
    layers.N.gate_up.weight    per block b of num_mlp_blocks: gate rows of b, up rows of b
    layers.N.down.weight       mlp.down_proj
    final_norm.weight          model.norm.weight
    head.weight                lm_head.weight (only if untied)

Each tensor starts at a multiple of ALIGNMENT bytes.
"""

from dataclasses import dataclass

from server.models.facts import DType, ModelFacts

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_rows` consecutive rows of a source tensor, placed at `dest_row` of the destination tensor."""

    source: str
    source_row: int
    dest_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One destination tensor: [rows] or [rows, cols], row-major, at byte `offset` of the allocation."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    offset: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All tensors in offset order; `total_bytes` is a multiple of ALIGNMENT."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int

    def __getitem__(self, name: str) -> TensorSpec:
        raise NotImplementedError


def weight_layout(facts: ModelFacts) -> WeightLayout:
    """The layout of a model. A pure function of its facts."""
    raise NotImplementedError
