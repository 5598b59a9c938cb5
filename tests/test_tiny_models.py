"""The builder of tiny checkpoints writes what transformers loads without a missing or unexpected tensor."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import FAMILIES, Family, write_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "num_shards"), [("float32", 1), ("bfloat16", 3)])
def test_transformers_loads_each_family_completely(tmp_path: Path, family: Family, dtype: str, num_shards: int) -> None:
    folder = write_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert str(model.dtype) == f"torch.{dtype}"
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    assert logits.float().std() > 0.3


def test_one_seed_gives_the_same_weights_again(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "a", seed=3) / "model.safetensors"
    second = write_tiny_model(tmp_path / "b", seed=3) / "model.safetensors"
    other = write_tiny_model(tmp_path / "c", seed=4) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_config_is_what_transformers_writes(tmp_path: Path, family: Family) -> None:
    folder = write_tiny_model(tmp_path, family)
    written = json.loads((folder / "config.json").read_text())
    again = AutoConfig.from_pretrained(folder).to_diff_dict()
    assert {**written, "transformers_version": None} == {**again, "transformers_version": None}
