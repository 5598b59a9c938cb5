"""Each tiny model is made once per family."""

import pytest
import torch

from tests.runner.tiny_engine import TinyModel, make_tiny_model
from tests.tiny_models import FAMILIES

torch.set_num_threads(1)


@pytest.fixture(scope="session", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2")
