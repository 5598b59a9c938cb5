"""Steps whose kernels may begin before those before them have ended: the same to the bit, issued and replayed."""

from dataclasses import replace

import pytest
import torch

from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda import attention
from server.ops.cuda.nvidia import NvidiaDriver
from server.runner.graphs import StepGraphs
from tests.gpu.test_cuda_steps import LIMITS, Gpu, model_of, waves
from tests.runner.cuda_steps import Run, TinyWeights, run_requests

NUM_REPEATS = 5  # a race shows now and then


def gpu_of(*, early_launch: bool) -> Gpu:
    driver = NvidiaDriver.open(early_launch=early_launch)
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"{built_folder()} is missing: run scripts/build-kernels")
    images = manifest.images(driver.facts.arch)
    if not any(image.waits for image in images):
        pytest.skip(f"{driver.facts.arch} begins no kernel early")
    return Gpu(driver, images)


@pytest.fixture(scope="module")
def model() -> TinyWeights:
    return model_of("qwen3", "bfloat16", 128, 4, num_layers=12)


def run(model: TinyWeights, *, early_launch: bool) -> Run:
    gpu = gpu_of(early_launch=early_launch)
    gpu.driver.attach_thread()
    limits = replace(LIMITS, max_mixed_tokens=64)
    return run_requests(model, gpu.build(model, limits), waves(), num_in_flight=2)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("replays", [False, True])
def test_beginning_early_changes_no_bit(
    device: str, model: TinyWeights, monkeypatch: pytest.MonkeyPatch, replays: bool, branches: bool
) -> None:
    monkeypatch.setattr(attention, "BRANCHES", branches)
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    if not replays:
        monkeypatch.setattr(StepGraphs, "_may_record", lambda *_: False)
    expected = run(model, early_launch=False)
    for _ in range(NUM_REPEATS):
        found = run(model, early_launch=True)
        assert found.results == expected.results
        assert all(map(torch.equal, found.logits, expected.logits))
