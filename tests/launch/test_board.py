import subprocess
import sys

from server.launch.board import Board, ExitCode, Role, StopMode
from server.launch.stages import MAX_STAGES
from server.telemetry.timeline import running_stages

FORK_ROLES = """
import os
from server.launch.board import Board, Role
from server.launch.stages import MAX_STAGES
board = Board.create()
pids = []
for role in Role:
    if (pid := os.fork()) == 0:
        for number in range(MAX_STAGES):
            with board.stage(role, f"{role.name.lower()} {number}"):
                pass
        os._exit(0)
    pids.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
stages = board.timeline()
assert [stage.begin for stage in stages] == sorted(stage.begin for stage in stages)
assert all(stage.name.split()[0] == stage.role for stage in stages)
assert {stage.pid for stage in stages} == set(pids)
print(len({stage.name for stage in stages}))
"""


def test_roles_that_write_the_timeline_at_once_lose_no_row() -> None:
    # In a process of its own: forking the test runner is unsafe once another test has started a thread.
    output = subprocess.run([sys.executable, "-c", FORK_ROLES], capture_output=True, text=True, check=True).stdout
    assert int(output) == len(Role) * MAX_STAGES


def test_a_role_that_has_used_up_its_rows_says_what_runs_now_and_disturbs_nobody() -> None:
    board = Board.create()
    for _ in range(MAX_STAGES):
        assert board.begin_stage(Role.MODEL, "again") is not None
    board.track(Role.MODEL).stages[MAX_STAGES - 1].pid = 1  # the process of the last row has died
    for name in ("too many", "wait for weights"):
        assert board.begin_stage(Role.MODEL, name) is not None
    assert running_stages(board) == ["model wait for weights for 0 s"]
    board.mark_ready(Role.MODEL)
    assert running_stages(board) == []
    assert names(board, Role.MODEL)[-2:] == ["again", "wait for weights"]
    assert board.begin_stage(Role.WEB, "first") is not None


def names(board: Board, role: Role) -> list[str]:
    return [stage.name.decode() for stage in board.track(role).rows()]


def test_a_stage_ends_when_the_next_one_begins_and_the_last_one_when_the_role_is_ready() -> None:
    board = Board.create()
    board.begin_life(Role.MODEL, 1.0)
    board.begin_stage(Role.MODEL, "context", 2.0)
    with board.stage(Role.MODEL, "kernels"):
        pass
    board.begin_stage(Role.MODEL, "first token")
    board.mark_ready(Role.MODEL)
    assert board.begin_stage(Role.MODEL, "too late") is None
    first, second, third, last = board.track(Role.MODEL).rows()
    assert names(board, Role.MODEL) == ["fork", "context", "kernels", "first token"]
    assert (first.begin, first.end, second.begin) == (1.0, 2.0, 2.0)
    assert second.end == third.begin <= third.end <= last.begin <= last.end == board.track(Role.MODEL).ready_at


def test_failed_attempts_stay_on_the_timeline_of_the_start() -> None:
    board = Board.create()
    board.begin_life(Role.MODEL, 1.0)
    board.note_loss()
    board.begin_life(Role.MODEL, board.reaped_at + 1)
    assert names(board, Role.MODEL) == ["fork", "respawn", "fork"]
    assert [stage.name for stage in board.timeline()] == [b"fork", b"respawn", b"fork"]


def test_a_restart_has_rows_of_its_own_that_begin_with_the_loss() -> None:
    board = Board.create()
    board.begin_life(Role.MODEL, 1.0)
    board.mark_ready(Role.MODEL)
    board.ready_at = board.engine_beat = 5.0
    for attempts in (2, 1):  # of which the last one is ready
        board.engine_beat += 1
        lost_at = board.engine_beat
        for _ in range(attempts):
            board.note_loss()
            board.begin_life(Role.MODEL, board.reaped_at + 1)
        board.mark_ready(Role.MODEL)
        assert names(board, Role.MODEL) == ["dying", *["respawn", "fork"] * attempts]
        assert board.track(Role.MODEL).stages[0].begin == lost_at
    assert [stage.name for stage in board.timeline()] == [b"fork"]


def test_the_loss_of_an_arbiter_stands_on_its_own_timeline_not_on_its_model_workers() -> None:
    board = Board.create()
    board.ready_at = board.engine_beat = 5.0
    board.note_loss()
    for role in (Role.WEB, Role.ARBITER, Role.MODEL):
        board.begin_life(role, board.reaped_at + 1)
    assert names(board, Role.ARBITER) == ["dying", "respawn", "fork"]
    assert names(board, Role.MODEL) == names(board, Role.WEB) == ["fork"]


def test_a_stage_that_raises_stays_unfinished() -> None:
    board = Board.create()
    try:
        with board.stage(Role.MASTER, "checkpoint"):
            raise ValueError
    except ValueError:
        pass
    (stage,) = board.timeline()
    assert stage.begin > 0
    assert stage.end == 0


def test_the_first_reason_to_halt_stands() -> None:
    board = Board.create()
    board.halt(ExitCode.PERMANENT, "no such file: ü" + "x" * 1000)
    board.halt(ExitCode.ENGINE_FAILED, "a consequence")
    assert board.halt_code == ExitCode.PERMANENT
    assert board.halt_reason.decode().startswith("no such file: ü")


def test_the_stop_only_rises_and_keeps_its_begin() -> None:
    board = Board.create()
    board.raise_stop(StopMode.QUICK)
    begin = board.stop_at
    board.raise_stop(StopMode.DRAIN)
    assert (board.stop, board.stop_at) == (StopMode.QUICK, begin)


HOLDER = """
from server.launch.board import Board
board = Board.create()
for port in (1234, 5):
    board.port = port
    print(port, flush=True)
    input()
"""


def test_a_snapshot_is_a_copy_of_the_board_of_another_process() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1234\n"
        copy = Board.snapshot(holder.pid)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "5\n"
        assert copy is not None
        assert copy.port == 1234
        holder.communicate("\n")


def test_there_is_no_snapshot_of_a_process_without_a_board() -> None:
    assert Board.snapshot(1 << 30) is None
