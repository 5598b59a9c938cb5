"""One process dies; the service lives on, or ends with the reason."""

import os
import resource
import shutil
import signal

import pytest

from server.launch.board import Board, ExitCode, ModelState
from server.settings.machine import detect_machine
from tests.process.conftest import StartService
from tests.process.harness import ProcessService, TokenStream, children

NUM_TOKENS = 500


def undisturbed(service: ProcessService, prompts: list[str], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """What streams of `prompts` must say."""
    streams = [TokenStream(service, num_tokens, prompt).start() for prompt in prompts]
    return [stream.finish().token_ids for stream in streams]


def wait_engine(service: ProcessService, number: int) -> Board:
    """The n-th engine is ready."""
    return service.wait_for(
        lambda board: board.num_engine_starts >= number and board.model_state == ModelState.READY, f"engine {number}"
    )


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_where_they_were_when_the_model_worker_dies(start: StartService, signal_number: int) -> None:
    service = start().wait_ready()
    prompts = ["the sea", "a ship", "it was"]
    expected = undisturbed(service, prompts)
    streams = [TokenStream(service, NUM_TOKENS, prompt).start() for prompt in prompts]
    for engine_number in (2, 3):
        num_seen = len(streams[0].token_ids)
        streams[0].wait_for_tokens(num_seen + 50)
        os.kill(service.board().model_pid, signal_number)
        wait_engine(service, engine_number)
    for stream, token_ids in zip(streams, expected, strict=True):
        assert stream.finish().is_complete, stream
        assert stream.token_ids == token_ids
    board = service.board()
    assert board.num_arbiter_starts == 1
    assert board.num_bad_forks == 0


def test_streams_survive_fifty_deaths_of_the_model_worker(start: StartService) -> None:
    """Kills from outside count for nothing: each life gives some tokens, and the text is the undisturbed one."""
    service = start().wait_ready()
    (expected,) = undisturbed(service, ["the sea"], num_tokens=1500)
    stream = TokenStream(service, 1500, "the sea").start()
    for engine_number in range(2, 52):
        stream.wait_for_tokens(len(stream.token_ids) + 20)
        os.kill(service.board().model_pid, signal.SIGKILL)
        wait_engine(service, engine_number)
    assert stream.finish().is_complete, stream
    assert stream.token_ids == expected
    board = service.board()
    assert (board.num_engine_starts, board.num_arbiter_starts, board.halt_code) == (51, 1, 0)


def test_streams_survive_the_death_of_the_dirty_arbiter(start: StartService) -> None:
    service = start().wait_ready()
    (expected,) = undisturbed(service, ["the sea"])
    stream = TokenStream(service, NUM_TOKENS, "the sea").start().wait_for_tokens(50)
    old = service.board()
    os.kill(old.arbiter_pid, signal.SIGKILL)
    assert stream.finish().is_complete, stream
    assert stream.token_ids == expected
    board = wait_engine(service, 2)
    assert board.num_arbiter_starts == 2
    assert old.model_pid not in service.processes()


def test_a_removed_runtime_folder_ends_the_service_after_its_streams(start: StartService) -> None:
    """Without it no dead process could be replaced: health said 200 while every request hung."""
    service = start().wait_ready()
    stream = TokenStream(service, NUM_TOKENS, "the sea").start().wait_for_tokens(20)
    shutil.rmtree(service.runtime_dir)
    ended = service.end()
    assert ended.exit_code == ExitCode.ENGINE_FAILED, service.log
    assert ended.survivors == ()
    assert stream.finish().is_complete, stream
    assert str(service.runtime_dir) in service.log.splitlines()[-1]
    assert "Traceback" not in service.log


def test_an_arbiter_killed_while_it_imports_is_replaced(start: StartService) -> None:
    service = start()
    board = service.wait_for(lambda board: board.arbiter_pid > 0, "a dirty arbiter")
    os.kill(board.arbiter_pid, signal.SIGKILL)
    service.wait_ready()
    assert service.board().num_arbiter_starts == 2


def test_an_arbiter_that_keeps_dying_ends_the_service(start: StartService) -> None:
    service = start(engine__max_boot_attempts=1)
    board = service.wait_for(lambda board: board.arbiter_pid > 0, "a dirty arbiter")
    os.kill(board.arbiter_pid, signal.SIGKILL)
    ended = service.end()
    assert ended.exit_code == 3
    assert (ended.survivors, ended.files) == ((), ())
    assert "the dirty arbiter died 1 times" in service.log


def test_a_killed_web_worker_is_replaced_and_takes_only_its_own_streams(start: StartService) -> None:
    service = start(server__web_workers=2).wait_ready()
    streams = [TokenStream(service, NUM_TOKENS).start() for _ in range(12)]
    for stream in streams:
        stream.wait_for_tokens(1)
    engine, (victim, other) = service.board().model_pid, service.web_workers()
    os.kill(victim, signal.SIGKILL)
    complete = [stream for stream in streams if stream.finish().is_complete]
    assert 0 < len(complete) < len(streams)
    assert all(len(stream.token_ids) == NUM_TOKENS for stream in complete)
    service.wait_for(lambda _: len(service.web_workers()) == 2, "a second web worker")
    assert other in service.web_workers()
    assert service.board().model_pid == engine
    service.wait_for(lambda board: board.num_running == 0, "no request of the dead worker in the engine")


def test_a_web_worker_stopped_alone_drains_and_is_replaced(start: StartService) -> None:
    service = start(server__drain_limit_s=30).wait_ready()
    stream = TokenStream(service, NUM_TOKENS).start().wait_for_tokens(1)
    (old,) = service.web_workers()
    os.kill(old, signal.SIGTERM)
    assert stream.finish().is_complete
    service.wait_for(lambda _: service.web_workers() not in ([], [old]), "a new web worker")
    service.wait_ready()


def test_a_model_worker_that_keeps_dying_while_it_starts_ends_the_service(start: StartService) -> None:
    service = start(engine__max_boot_attempts=2)
    killed: set[int] = set()

    def kill_if_starting(board: Board) -> bool:
        if board.model_state == ModelState.STARTING and board.model_pid not in killed:
            killed.add(board.model_pid)
            os.kill(board.model_pid, signal.SIGSEGV)
        return bool(board.halt_code)

    service.wait_for(kill_if_starting, "the end of the attempts")
    ended = service.end()
    assert ended.exit_code == 3
    assert (ended.survivors, ended.files) == ((), ())
    assert "died 2 times while starting" in service.log


def test_an_engine_that_cannot_start_ends_the_service_with_the_reason(start: StartService) -> None:
    memory_bytes = detect_machine().memory_bytes
    service = start(kv__pool_mib=memory_bytes >> 20, engine__max_boot_attempts=2)
    resource.prlimit(service.pid, resource.RLIMIT_AS, (memory_bytes, memory_bytes))  # the pool is all of it
    ended = service.end()
    assert ended.exit_code == 3, service.log
    assert (ended.survivors, ended.files) == ((), ())
    assert "the engine did not start in 2 attempts" in service.log


def test_nothing_is_left_as_a_zombie(start: StartService) -> None:
    service = start().wait_ready()
    os.kill(service.board().model_pid, signal.SIGKILL)
    board = wait_engine(service, 2)
    assert children(board.arbiter_pid) == [board.model_pid]
    assert all_children(service.pid) == 2


def all_children(pid: int) -> int:
    """Children of a process, zombies included."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return len(file.read().split())
