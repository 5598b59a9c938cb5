"""The torch backend on a GPU: fp32 as transformers, bf16 no farther from fp32 than transformers in bf16."""

from pathlib import Path

import pytest

from server.engine.messages import SamplingParams
from tests.gpu.accuracy import measure
from tests.runner.tiny_engine import TinyEngine, TinyModel, assert_as_reference, batch_limits
from tests.tiny_models import FAMILIES, Family, write_tiny_model

PROMPTS = [
    [(7 * request + 3 * token) % 320 for token in range(length)] for request, length in enumerate([1, 9, 40, 75])
]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_fp32_equals_transformers_in_ragged_batches(model: TinyModel, num_in_flight: int) -> None:
    engine = TinyEngine(model, batch_limits(max_batched_tokens=32), num_in_flight=num_in_flight)
    for request_id, prompt in enumerate(PROMPTS):
        engine.add(request_id, prompt)
    engine.run()
    for request_id, prompt in enumerate(PROMPTS):
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


def test_fp32_equals_transformers_at_odd_chunk_sizes(model: TinyModel) -> None:
    for chunk_size in (1, 2, 3, 7, 8, 9, 31):
        engine = TinyEngine(model, batch_limits(max_batched_tokens=chunk_size, max_num_requests=1))
        engine.add(0, PROMPTS[2], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.run()
        assert_as_reference(model, PROMPTS[2], engine.outputs[0], engine.logits[0])


def test_fp32_survives_preemption_and_prefix_hits(model: TinyModel) -> None:
    engine = TinyEngine(model, batch_limits(num_blocks=1 + 24), num_in_flight=2)
    for request_id in range(4):
        engine.add(request_id, PROMPTS[2] + [request_id])
    engine.run()
    engine.add(4, PROMPTS[2] + [0])
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefix_hit_tokens > 0
    for request_id in range(5):
        prompt = PROMPTS[2] + [request_id % 4]
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_accurate_as_transformers(tmp_path: Path, device: str, family: Family, dtype: str) -> None:
    folder = write_tiny_model(tmp_path, family, dtype=dtype, num_layers=4, hidden_size=128, intermediate_size=256)
    assert measure(folder, num_prompts=8, num_tokens=100, device=device)
