"""Rotation frequencies equal those that transformers computes in fp32 tensors."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from server.models.facts import RopeScaling, facts_from_config
from server.models.rope import inverse_frequencies
from tests.tiny_models import Family, write_tiny_model


@pytest.mark.parametrize("family", ["qwen2", "llama3"])
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10000.0), (64, 500000.0), (128, 1000000.0), (96, 1e6)])
def test_frequencies_are_those_of_transformers(tmp_path: Path, family: Family, head_dim: int, theta: float) -> None:
    folder = write_tiny_model(tmp_path, family, head_dim=head_dim)
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters["rope_theta"] = theta
    facts = dataclasses.replace(facts_from_config(json.loads((folder / "config.json").read_text())), rope_theta=theta)
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    found = np.array(inverse_frequencies(facts), dtype=np.float32)
    assert found.astype(np.float64).tolist() == list(inverse_frequencies(facts)), "not fp32 values"
    # transformers' powers and quotients are off by a unit in the last place here and there.
    assert np.abs(found.view(np.int32) - expected.view(np.int32)).max() <= 2


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2", head_dim=64)
    plain = facts_from_config(json.loads((folder / "config.json").read_text()))
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))
    ratios = [new / old for new, old in zip(inverse_frequencies(scaled), inverse_frequencies(plain), strict=True)]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1 / 8)
    assert ratios == sorted(ratios, reverse=True)
    assert any(ratio * 0.999 > 1 / 8 and ratio < 0.999 for ratio in ratios)
