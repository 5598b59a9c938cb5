"""Fixtures: models made once per session, and services that never outlive their test."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.harness import ProcessService
from tests.tiny_models import write_tiny_model

StartService = Callable[..., ProcessService]
_MAX_POSITION = 8192


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends a text by itself and is loaded in milliseconds."""
    folder = tmp_path_factory.mktemp("tiny") / "m"
    write_tiny_model(folder, max_position=_MAX_POSITION, with_tokenizer=True)
    (folder / "generation_config.json").unlink()  # it and the tokenizer's config name the tokens that end a text
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"eos_token": None}))
    return folder


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of weights: the loader needs long enough to be caught at work."""
    return write_tiny_model(
        tmp_path_factory.mktemp("slow") / "m", hidden_size=512, intermediate_size=8192, with_tokenizer=True
    )


@pytest.fixture(scope="session")
def start_s(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> float:
    """How long a start takes on this machine, in seconds."""
    service = ProcessService(tmp_path_factory.mktemp("p"), {"model.path": str(tiny_model)})
    try:
        service.wait_ready()
        return time.monotonic() - service.started_at
    finally:
        service.kill_all()


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[StartService]:
    """Start a service of the tiny model; keyword arguments with `__` are settings, e.g. server__web_workers=2."""
    services: list[ProcessService] = []
    # Unix sockets have 108 bytes for their path, so the test's name cannot be part of it.
    base = tmp_path_factory.mktemp("p")
    numbers = itertools.count()

    def start_service(**keywords: object) -> ProcessService:
        settings = {"model.path": str(tiny_model)}
        settings |= {name.replace("__", "."): value for name, value in keywords.items() if "__" in name}
        options = {name: value for name, value in keywords.items() if "__" not in name}
        folder = base / str(next(numbers))
        folder.mkdir()
        services.append(ProcessService(folder, settings, **options))  # type: ignore[arg-type]
        return services[-1]

    yield start_service
    for service in services:
        service.kill_all()
