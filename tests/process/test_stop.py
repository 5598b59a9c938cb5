"""The stop: by signal, at any moment, with and without streams; and that nothing is left."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from server.launch.board import Board, ModelState, Role, StopMode
from tests.process.conftest import StartService
from tests.process.harness import Ended, ProcessService, TokenStream, is_port_open

QUICK_S = 3.0
_SIGNALLED_BEFORE_PYTHON_LISTENS = -signal.SIGTERM


def assert_clean(ended: Ended, service: ProcessService, limit_s: float = QUICK_S) -> None:
    """Everything is gone in time and the runtime folder is empty."""
    assert ended.survivors == (), service.log
    assert ended.all_gone_s < limit_s, service.log
    assert ended.files == (), service.log


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_an_idle_service_ends_quickly_and_leaves_nothing(start: StartService, signal_number: int) -> None:
    service = start(server__web_workers=2).wait_ready()
    address = service.address()
    assert address is not None
    ended = service.end(signal_number)
    assert ended.exit_code == 0
    assert_clean(ended, service)
    assert not is_port_open(address)
    assert "Traceback" not in service.log
    assert "ERROR" not in service.log


def test_sigterm_lets_streams_finish_and_refuses_new_requests(start: StartService) -> None:
    service = start(server__lame_duck_s=1.0, server__drain_limit_s=30).wait_ready()
    streams = [TokenStream(service, 300).start() for _ in range(8)]
    for stream in streams:
        stream.wait_for_tokens(1)
    os.kill(service.pid, signal.SIGTERM)
    service.wait_for(lambda board: board.stop == StopMode.DRAIN, "the drain")
    assert service.get("/health") == 503
    assert TokenStream(service, 5).start().finish().status == 503
    ended = service.end()
    assert ended.exit_code == 0
    for stream in streams:
        assert stream.finish().is_complete, stream
        assert len(stream.token_ids) == 300
    assert_clean(ended, service, limit_s=30 + QUICK_S)


def test_the_drain_limit_ends_a_stream_that_takes_too_long(start: StartService) -> None:
    service = start(server__drain_limit_s=2).wait_ready()
    stream = TokenStream(service, 8000).start().wait_for_tokens(1)
    ended = service.end(signal.SIGTERM)
    assert ended.exit_code == 0
    assert_clean(ended, service, limit_s=2 + QUICK_S)
    assert not stream.finish().is_complete


def test_sigquit_waits_for_nobody(start: StartService) -> None:
    service = start().wait_ready()
    stream = TokenStream(service, 8000).start().wait_for_tokens(1)
    ended = service.end(signal.SIGQUIT)
    assert ended.exit_code == 0
    assert_clean(ended, service)
    assert not stream.finish().is_complete


def test_sigint_during_a_drain_makes_it_quick(start: StartService) -> None:
    service = start(server__drain_limit_s=30).wait_ready()
    stream = TokenStream(service, 8000).start().wait_for_tokens(1)
    os.kill(service.pid, signal.SIGTERM)
    service.wait_for(lambda board: board.stop == StopMode.DRAIN, "the drain")
    ended = service.end(signal.SIGINT)
    assert ended.exit_code == 0
    assert_clean(ended, service)
    assert not stream.finish().is_complete


def test_ctrl_c_in_a_terminal_reaches_the_whole_group_and_still_ends_in_order(start: StartService) -> None:
    service = start().wait_ready()
    os.killpg(service.pid, signal.SIGINT)
    ended = service.end()
    assert ended.exit_code == 0
    assert_clean(ended, service)
    assert "Traceback" not in service.log


def test_a_killed_master_takes_everything_with_it(start: StartService) -> None:
    service = start(server__web_workers=2).wait_ready()
    address = service.address()
    assert address is not None
    TokenStream(service, 8000).start().wait_for_tokens(1)
    ended = service.end(signal.SIGKILL)
    assert ended.survivors == ()
    assert ended.all_gone_s < QUICK_S
    assert not is_port_open(address)


def test_hup_and_usr2_touch_no_process(start: StartService) -> None:
    service = start().wait_ready()
    stream = TokenStream(service, 300).start().wait_for_tokens(1)
    before = sorted(service.processes())
    os.kill(service.pid, signal.SIGHUP)
    os.kill(service.pid, signal.SIGUSR2)
    assert stream.finish().is_complete
    assert sorted(service.processes()) == before
    assert "SIGHUP: no setting can change" in service.log
    assert "SIGUSR2 refused" in service.log


def test_a_hang_up_of_the_terminal_ends_nobody(start: StartService) -> None:
    service = start().wait_ready()
    before = sorted(service.processes())
    os.killpg(service.pid, signal.SIGHUP)
    assert TokenStream(service, 50).start().finish().is_complete
    assert sorted(service.processes()) == before


def start_moments(seed: int, count: int) -> list[float]:
    """Moments as shares of a whole start, one in each of `count` equal parts: reproducible and evenly spread."""
    rng = random.Random(seed)
    edges = [1.1 * index / count for index in range(count + 1)]
    return [rng.uniform(low, high) for low, high in pairwise(edges)]


@pytest.mark.parametrize("share", start_moments(seed=1, count=10))
def test_sigterm_at_any_moment_of_the_start_leaves_nothing(start: StartService, start_s: float, share: float) -> None:
    service = start()
    time.sleep(share * start_s)
    ended = service.end(signal.SIGTERM)
    assert ended.exit_code in (0, _SIGNALLED_BEFORE_PYTHON_LISTENS), service.log
    assert_clean(ended, service)
    assert "Traceback" not in service.log


@pytest.mark.parametrize("share", start_moments(seed=2, count=10))
def test_sigkill_of_the_master_at_any_moment_of_the_start_leaves_no_process(
    start: StartService, start_s: float, share: float
) -> None:
    service = start()
    time.sleep(share * start_s)
    ended = service.end(signal.SIGKILL)
    assert ended.survivors == ()
    assert ended.all_gone_s < QUICK_S


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stop_during_a_download_ends_the_download(start: StartService, tmp_path: Path, signal_number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and never answers
        hub.settimeout(60)
        environ = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
        }
        service = start(model__path="org/tiny", environ=environ)
        connection, _ = hub.accept()
        assert len(service.processes()) == 2
        ended = service.end(signal_number)
        connection.close()
    assert ended.survivors == ()
    assert ended.all_gone_s < QUICK_S
    assert ended.exit_code == (0 if signal_number == signal.SIGTERM else -signal.SIGKILL)


MOMENTS: dict[str, Callable[[Board], bool]] = {
    "the arbiter imports": lambda board: bool(board.start[Role.ARBITER].num_stages),
    "the arbiter has imported": lambda board: any(
        stage.name == b"imports" and stage.end for stage in board.start[Role.ARBITER].rows()
    ),
    "init of the model worker": lambda board: board.model_state == ModelState.STARTING,
    "the engine is being built": lambda board: board.start[Role.MODEL].num_stages > 2,
}


@pytest.mark.parametrize("delay_ms", [0, 8])
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_where_a_signal_could_get_lost_is_not_lost(start: StartService, moment: str, delay_ms: int) -> None:
    service = start()
    service.wait_for(MOMENTS[moment], moment)
    time.sleep(delay_ms / 1000)
    ended = service.end(signal.SIGTERM)
    assert ended.exit_code == 0
    assert_clean(ended, service)
