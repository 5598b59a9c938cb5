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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from server.models.facts import DTYPE_BYTES, DType, ModelFacts

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

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of one element for a tensor of one dimension."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, without the padding behind it."""
        return self.shape[0] * self.row_bytes


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All tensors in offset order; `total_bytes` is a multiple of ALIGNMENT."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    _by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {spec.name: spec for spec in self.tensors})

    def __getitem__(self, name: str) -> TensorSpec:
        return self._by_name[name]


def weight_layout(facts: ModelFacts) -> WeightLayout:
    """The layout of a model. A pure function of its facts."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, shape, segments in _tensors(facts):
        spec = TensorSpec(name, shape, facts.dtype, offset, segments)
        specs.append(spec)
        offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return WeightLayout(tuple(specs), offset)


def source_shapes(layout: WeightLayout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint must hold to fill `layout`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in layout.tensors:
        for segment in spec.segments:
            num_rows = shapes.get(segment.source, (0,))[0] + segment.num_rows
            shapes[segment.source] = (num_rows, *spec.shape[1:])
    return shapes


_Tensor = tuple[str, tuple[int, ...], tuple[Segment, ...]]


def _tensors(facts: ModelFacts) -> Iterator[_Tensor]:
    hidden = facts.hidden_size
    yield _whole("embed.weight", "model.embed_tokens.weight", facts.vocab_size, hidden)
    for layer in range(facts.num_layers):
        yield from _layer(facts, f"layers.{layer}.", f"model.layers.{layer}.")
    yield _whole("final_norm.weight", "model.norm.weight", hidden)
    if not facts.tied_head:
        yield _whole("head.weight", "lm_head.weight", facts.vocab_size, hidden)


def _layer(facts: ModelFacts, name: str, source: str) -> Iterator[_Tensor]:
    hidden, inner, q_rows = facts.hidden_size, facts.intermediate_size, facts.num_heads * facts.head_dim
    yield _whole(name + "input_norm.weight", source + "input_layernorm.weight", hidden)
    for kind, cols in (("weight", (hidden,)), ("bias", ())) if facts.qkv_bias else (("weight", (hidden,)),):
        yield name + "qkv." + kind, (facts.qkv_rows, *cols), _qkv_segments(facts, source + "self_attn.", kind)
    if facts.qk_norm:
        yield _whole(name + "q_norm.weight", source + "self_attn.q_norm.weight", facts.head_dim)
        yield _whole(name + "k_norm.weight", source + "self_attn.k_norm.weight", facts.head_dim)
    yield _whole(name + "out.weight", source + "self_attn.o_proj.weight", hidden, q_rows)
    if facts.out_bias:
        yield _whole(name + "out.bias", source + "self_attn.o_proj.bias", hidden)
    yield _whole(name + "mlp_norm.weight", source + "post_attention_layernorm.weight", hidden)
    yield name + "gate_up.weight", (2 * inner, hidden), _gate_up_segments(facts, source + "mlp.")
    yield _whole(name + "down.weight", source + "mlp.down_proj.weight", hidden, inner)


def _whole(name: str, source: str, *shape: int) -> _Tensor:
    return name, shape, (Segment(source, 0, 0, shape[0]),)


def _qkv_segments(facts: ModelFacts, source: str, kind: str) -> tuple[Segment, ...]:
    """Per KV group g: q rows of its query heads, k rows of g, v rows of g."""
    kv_rows = facts.head_dim
    rows = (("q", facts.group_size * kv_rows), ("k", kv_rows), ("v", kv_rows))
    return _interleave([(f"{source}{part}_proj.{kind}", num_rows) for part, num_rows in rows], facts.num_kv_heads)


def _gate_up_segments(facts: ModelFacts, source: str) -> tuple[Segment, ...]:
    """Per block b: gate rows of b, up rows of b."""
    num_rows = facts.intermediate_size // facts.num_mlp_blocks
    return _interleave([(f"{source}{part}_proj.weight", num_rows) for part in ("gate", "up")], facts.num_mlp_blocks)


def _interleave(parts: list[tuple[str, int]], num_blocks: int) -> tuple[Segment, ...]:
    """Each block holds the next `num_rows` rows of every part, in the order of `parts`."""
    segments: list[Segment] = []
    dest_row = 0
    for block in range(num_blocks):
        for source, num_rows in parts:
            segments.append(Segment(source, block * num_rows, dest_row, num_rows))
            dest_row += num_rows
    return tuple(segments)
