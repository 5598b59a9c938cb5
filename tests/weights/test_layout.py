"""The layout places every source row once, in the order that fused and tensor-parallel products need."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.models.facts import ModelFacts, facts_from_config
from server.weights.layout import ALIGNMENT, source_shapes, weight_layout
from tests.tiny_models import FAMILIES, Family, tiny_config, tiny_tensors


@st.composite
def any_facts(draw: st.DrawFn) -> ModelFacts:
    """Every shape of the family, odd ones too."""
    num_kv_heads = draw(st.integers(1, 4))
    return ModelFacts(
        architecture="LlamaForCausalLM",
        vocab_size=draw(st.integers(1, 40)),
        hidden_size=draw(st.integers(1, 24)),
        intermediate_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        max_position=64,
        rms_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )


@given(facts=any_facts())
def test_tensors_are_aligned_and_do_not_overlap(facts: ModelFacts) -> None:
    layout = weight_layout(facts)
    end = 0
    for spec in layout.tensors:
        assert spec.offset % ALIGNMENT == 0
        assert end <= spec.offset < end + ALIGNMENT
        end = spec.offset + spec.num_bytes
        assert layout[spec.name] is spec
    assert end <= layout.total_bytes < end + ALIGNMENT
    assert layout.total_bytes % ALIGNMENT == 0
    assert len({spec.name for spec in layout.tensors}) == len(layout.tensors)


@given(facts=any_facts())
def test_every_row_is_filled_once_from_a_source_row_that_is_used_once(facts: ModelFacts) -> None:
    layout = weight_layout(facts)
    used: dict[str, list[int]] = {}
    for spec in layout.tensors:
        filled = 0
        for segment in spec.segments:
            assert segment.dest_row == filled
            filled += segment.num_rows
            used.setdefault(segment.source, []).extend(range(segment.source_row, segment.source_row + segment.num_rows))
        assert filled == spec.shape[0]
    for source, shape in source_shapes(layout).items():
        assert sorted(used[source]) == list(range(shape[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_are_the_tensors_that_transformers_stores(family: Family) -> None:
    config = tiny_config(family)
    stored = {name: tuple(tensor.shape) for name, tensor in tiny_tensors(config).items()}
    assert source_shapes(weight_layout(facts_from_config(config))) == stored


def rows(facts: ModelFacts, name: str) -> list[tuple[str, int]]:
    """(last part of the source's name, source row) of each row of a tensor."""
    return [
        (segment.source.split(".")[-2], segment.source_row + i)
        for segment in weight_layout(facts)[name].segments
        for i in range(segment.num_rows)
    ]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_lies_per_group_of_heads(kind: str) -> None:
    facts = facts_from_config(tiny_config("qwen2", num_heads=4, num_kv_heads=2, head_dim=2))
    assert rows(facts, f"layers.1.qkv.{kind}") == [
        *(("q_proj", i) for i in range(4)),
        *(("k_proj", i) for i in range(2)),
        *(("v_proj", i) for i in range(2)),
        *(("q_proj", i) for i in range(4, 8)),
        *(("k_proj", i) for i in range(2, 4)),
        *(("v_proj", i) for i in range(2, 4)),
    ]


def test_gate_and_up_lie_in_blocks() -> None:
    facts = facts_from_config(tiny_config("qwen2", intermediate_size=4, num_kv_heads=2))
    gate_0, gate_1, up_0, up_1 = (
        [(part, 2 * b), (part, 2 * b + 1)] for part in ("gate_proj", "up_proj") for b in (0, 1)
    )
    assert rows(facts, "layers.0.gate_up.weight") == gate_0 + up_0 + gate_1 + up_1
    undivided = dataclasses.replace(facts, intermediate_size=3)
    assert rows(undivided, "layers.0.gate_up.weight") == [("gate_proj", i) for i in range(3)] + [
        ("up_proj", i) for i in range(3)
    ]


def test_half_of_the_fused_rows_is_a_tensor_parallel_slice() -> None:
    """With two ranks, the first half of the rows computes what the first half of each projection computes."""
    config = tiny_config("qwen3", num_heads=4, num_kv_heads=2)
    facts, tensors = facts_from_config(config), tiny_tensors(config)
    spec = weight_layout(facts)["layers.0.qkv.weight"]
    fused = torch.cat([tensors[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments])
    prefix = "model.layers.0.self_attn."
    halves = [tensors[f"{prefix}{name}_proj.weight"].chunk(2)[0] for name in ("q", "k", "v")]
    assert torch.equal(fused.chunk(2)[0], torch.cat(halves))


def test_the_head_is_laid_out_only_if_untied() -> None:
    names = {
        family: [s.name for s in weight_layout(facts_from_config(tiny_config(family))).tensors] for family in FAMILIES
    }
    assert "head.weight" not in names["qwen2.5-tied"]
    assert names["qwen2"][-1] == "head.weight"
