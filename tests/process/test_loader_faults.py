"""The real service, and a loader that dies, hangs or finds its files changed."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.launch.board import Board, ExitCode, LoaderState, ModelState
from server.weights.checksum_file import ALGORITHM, CHECKSUM_FILE
from tests.loaded_weights import open_folder
from tests.process.conftest import StartService
from tests.process.harness import ProcessService, TokenStream
from tests.process.held_file import HeldFile, start_with_waiting_loader

NUM_TOKENS = 20

StartHeld = Callable[..., tuple[ProcessService, HeldFile]]


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """One of its own, to be damaged."""
    return shutil.copytree(tiny_model, tmp_path / "m")


@pytest.fixture
def start_held(start: StartService, model: Path) -> Iterator[StartHeld]:
    """A service of `model` whose loader waits for the file in the middle of its work."""
    files: list[HeldFile] = []

    def start_service(**settings: object) -> tuple[ProcessService, HeldFile]:
        service, file = start_with_waiting_loader(start, model, **settings)
        files.append(file)
        service.wait_for(lambda board: board.model_state == ModelState.STARTING, "a model worker that waits")
        return service, file

    yield start_service
    for file in files:
        file.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[int]:
    """What the model says when nothing happens."""
    service = ProcessService(tmp_path_factory.mktemp("p"), {"model.path": str(tiny_model)})
    try:
        return TokenStream(service.wait_ready(), NUM_TOKENS).start().finish().token_ids
    finally:
        service.kill_all()


def loader_of(board: Board) -> int:
    assert board.loader_state == LoaderState.LOADING
    assert board.loader_pid > 0
    return int(board.loader_pid)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_loader_that_dies_is_replaced_by_the_model_worker(
    start_held: StartHeld, expected: list[int], signal_number: int
) -> None:
    service, file = start_held()
    os.kill(loader_of(service.board()), signal_number)
    service.wait_for(lambda board: bool(board.loader_failure), "the loader's end")
    file.let_go()
    service.wait_ready()
    assert TokenStream(service, NUM_TOKENS).start().finish().token_ids == expected
    assert f"the loader was killed by signal {signal_number}" in service.log
    assert service.board().num_engine_starts == 1
    assert service.end(signal.SIGTERM).exit_code == 0


def test_a_loader_that_hangs_is_replaced_by_the_model_worker(start_held: StartHeld, expected: list[int]) -> None:
    service, file = start_held()
    loader = loader_of(service.board())
    os.kill(loader, signal.SIGSTOP)
    service.wait_for(lambda _: loader not in service.processes(), "the loader's end")
    file.let_go()
    service.wait_ready()
    assert TokenStream(service, NUM_TOKENS).start().finish().token_ids == expected
    assert "of silence" in service.log


def test_a_model_worker_killed_while_it_waits_leaves_the_loader_alone(
    start_held: StartHeld, expected: list[int]
) -> None:
    service, file = start_held()
    old = service.board()
    os.kill(old.model_pid, signal.SIGKILL)
    service.wait_for(lambda board: board.model_pid not in (0, old.model_pid), "a second model worker")
    assert loader_of(service.board()) in service.processes()
    file.let_go()
    service.wait_ready()
    assert TokenStream(service, NUM_TOKENS).start().finish().token_ids == expected


def test_two_deaths_while_loading_end_the_service_with_both_reasons(start_held: StartHeld) -> None:
    service, _ = start_held()
    os.kill(loader_of(service.board()), signal.SIGKILL)
    service.wait_for(lambda _: "taking over from the loader" in service.log, "the take-over")
    os.kill(service.board().model_pid, signal.SIGKILL)
    ended = service.end()
    assert ended.exit_code == ExitCode.ENGINE_FAILED, service.log
    assert (ended.survivors, ended.files) == ((), ())
    last = service.log.splitlines()[-1]
    assert "the loader was killed by signal 9" in service.log
    assert "could not be loaded in 2 attempts" in last, service.log


def assert_permanent(service: ProcessService, complaint: str) -> None:
    """Exit code 4, at once, and one clear line."""
    ended = service.end()
    assert ended.exit_code == ExitCode.PERMANENT, service.log
    assert (ended.survivors, ended.files) == ((), ())
    assert complaint in service.log.splitlines()[-1]
    assert "Traceback" not in service.log


def test_a_file_truncated_while_it_is_loaded_ends_the_service(start_held: StartHeld, model: Path) -> None:
    service, file = start_held()
    file.truncate(5000)
    file.let_go()
    assert_permanent(service, f"{model}/model.safetensors: was changed since it was verified")


def test_a_checkpoint_that_has_vanished_when_the_load_is_taken_over_ends_the_service(
    start_held: StartHeld, model: Path
) -> None:
    service, _ = start_held()
    loader = loader_of(service.board())
    (model / "model.safetensors").rename(model / "elsewhere")
    os.kill(loader, signal.SIGKILL)
    assert_permanent(service, f"{model}/model.safetensors: does not exist")


def test_a_file_replaced_when_the_load_is_taken_over_ends_the_service(start_held: StartHeld, model: Path) -> None:
    service, _ = start_held()
    loader = loader_of(service.board())
    shutil.copy(model / "config.json", model / "other")
    (model / "other").rename(model / "model.safetensors")
    os.kill(loader, signal.SIGKILL)
    assert_permanent(service, f"{model}/model.safetensors: was changed since it was verified")


def test_weights_that_are_not_those_of_the_checksums_end_the_service(start: StartService, model: Path) -> None:
    checkpoint, _ = open_folder(model)
    sums = dict.fromkeys(checkpoint.tensors, "0123456789abcdef")
    (model / CHECKSUM_FILE).write_text(json.dumps({"version": 1, "algorithm": ALGORITHM, "tensors": sums}))
    service = start(model__path=str(model))
    assert_permanent(service, f"{model}/model.safetensors: tensor 'model.embed_tokens.weight' has checksum")


def test_a_stop_during_a_load_is_a_stop(start_held: StartHeld) -> None:
    service, _ = start_held()
    ended = service.end(signal.SIGTERM)
    assert ended.exit_code == 0, service.log
    assert ended.exit_s < 5
    assert (ended.survivors, ended.files) == ((), ())
