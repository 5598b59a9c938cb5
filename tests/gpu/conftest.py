"""Everything here needs a GPU, is marked so, and is skipped with the reason where there is none."""

from pathlib import Path

import pytest
import torch

from tests.runner.tiny_engine import TinyModel, make_tiny_model
from tests.tiny_models import FAMILIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda.is_available() is false: no GPU, or a torch without CUDA")
    return "cuda"


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """fp32 on the GPU."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param, device=device)


@pytest.fixture(scope="session")
def qwen2_bf16(device: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", dtype="bfloat16", device=device)


@pytest.fixture(scope="session")
def qwen2_fp32(device: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", device=device)
