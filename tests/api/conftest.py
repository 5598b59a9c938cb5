"""One service for all tests that leave it as they found it, and a factory for those that need another."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.api.service import ApiService


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiService]:
    with ApiService(tmp_path_factory.mktemp("api")) as service:
        yield service


@pytest.fixture
def service(shared_service: ApiService) -> Iterator[ApiService]:
    """Idle before and after each test, and with a plain answer unchanged by whatever the test sent."""
    yield shared_service
    shared_service.runner.broken_ids.clear()
    answer = shared_service.post("/generate", {"inputs": "plain", "parameters": {"max_new_tokens": 8}})
    assert answer.json() == {"generated_text": "plainpla"}
    assert shared_service.client.get("/health").status_code == 200
    shared_service.check_idle()


@pytest.fixture
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ApiService]]:
    # Unix sockets have 108 bytes for their path, so the test's name cannot be part of it.
    folder = tmp_path_factory.mktemp("a")
    numbers = itertools.count()
    with ExitStack() as started:

        def start(**options: object) -> ApiService:
            (own := folder / str(next(numbers))).mkdir()
            return started.enter_context(ApiService(own, **options))  # type: ignore[arg-type]

        yield start
