"""The timeline is computed from the board alone, so these tests write boards by hand."""

import itertools
import re
from pathlib import Path

import pytest

import server
from server.launch.board import Board, ModelState, Role
from server.telemetry.stage_table import CHECKLIST, STAGES
from server.telemetry.timeline import describe_start, read_startup, ready_at
from server.telemetry.waterfall import draw_waterfall

EXEC = 100.0


def started(model_ready: float = 3.0, web_ready: float = 2.0, loader_ready: float = 2.5) -> Board:
    """A whole start; arguments in seconds since exec."""
    board = Board.create()
    board.started_at = EXEC
    board.begin_life(Role.LOADER, EXEC + 0.5)
    board.begin_life(Role.ARBITER, EXEC + 0.7)
    board.begin_life(Role.MODEL, EXEC + 1.0)
    board.begin_life(Role.WEB, EXEC + 1.8)
    stages = {
        Role.MASTER: {"python and gunicorn": 0.0, "fork loader": 0.4, "fork arbiter": 0.52, "app": 0.75},
        Role.LOADER: {"context": 0.55, "allocate": 1.15, "weights": 1.2},
        Role.ARBITER: {"imports": 0.75, "fork model worker": 0.98},
        Role.MODEL: {
            "wait for memory": 1.02,
            "context": 1.18,  # before the loader's "allocate" is over: the memory has come
            "wait for weights": 1.4,
            "first token": max(1.4, loader_ready) + 0.01,
        },
        Role.WEB: {"uvicorn": 1.85},
    }
    for role, names in stages.items():
        for name, begin in names.items():
            board.begin_stage(role, name, EXEC + begin)
    ends = {
        Role.MASTER: 1.9,
        Role.LOADER: loader_ready,
        Role.ARBITER: 1.05,
        Role.MODEL: model_ready,
        Role.WEB: web_ready,
    }
    for role, end in ends.items():
        track = board.start[role]
        track.end(EXEC + end)
        track.ready_at = EXEC + end
    board.start[Role.LOADER].stages[3].num_bytes = 65 * 10**9
    board.web_ready_at, board.ready_at = EXEC + web_ready, EXEC + model_ready
    board.model_state = ModelState.READY
    return board


def path_of(board: Board) -> list[tuple[str, str | None]]:
    return [(part.role, part.stage) for part in read_startup(board, "cuda").critical_path]


def test_the_stages_that_are_known_are_those_that_processes_begin() -> None:
    sources = "".join(path.read_text() for path in Path(server.__file__).parent.rglob("*.py"))
    begun = set(re.findall(r'begin_stage\(Role\.([A-Z]+), "([^"]+)"', sources))
    of_any_role = set(re.findall(r'begin_stage\(role, "([^"]+)"', sources))  # of whoever begins a life
    known = {(role.name, name) for role, name in STAGES if name not in of_any_role}
    assert known == begun
    assert {stage for item in CHECKLIST for stage in item.stages} <= STAGES.keys()


def test_the_critical_path_goes_from_a_wait_to_its_cause_and_from_a_fork_to_the_parent() -> None:
    assert path_of(started()) == [
        ("master", "python and gunicorn"),
        ("master", "fork loader"),
        ("loader", "fork"),
        ("loader", "context"),
        ("loader", "allocate"),
        ("loader", "weights"),
        ("model", "wait for weights"),
        ("model", "first token"),
    ]


def test_a_wait_that_found_its_cause_done_is_nobodys_fault() -> None:
    path = path_of(started(loader_ready=1.3))
    assert ("loader", "weights") not in path
    assert path[-5:] == [
        ("loader", "context"),
        ("loader", "allocate"),  # of whose memory the model worker waited before its context
        ("model", "context"),
        ("model", "wait for weights"),
        ("model", "first token"),
    ]
    assert ("arbiter", "imports") not in path


def test_the_critical_path_ends_where_the_last_of_model_and_web_was_ready() -> None:
    path = path_of(started(web_ready=3.5))
    assert path[-3:] == [("master", "app"), ("web", "fork"), ("web", "uvicorn")]


@pytest.mark.parametrize(
    ("model", "web", "loader"), [*itertools.product((2.6, 3.0), (1.9, 2.7, 4.0), (1.25, 1.35, 2.5))]
)
def test_the_critical_path_reaches_from_exec_to_ready_without_a_gap(model: float, web: float, loader: float) -> None:
    view = read_startup(started(model, web, loader), "cuda")
    assert view.ready_s == pytest.approx(max(model, web))
    path = view.critical_path
    assert path[0].begin_s == 0
    assert path[-1].end_s == view.ready_s
    assert all(before.end_s == after.begin_s for before, after in itertools.pairwise(path))
    assert all(part.stage and part.seconds > 0 for part in path)
    marked = {(row.role, row.stage) for row in view.stages if row.is_critical}
    assert marked == {(part.role, part.stage) for part in path}


def test_time_without_a_stage_is_shown_as_such_and_lowers_the_cover() -> None:
    board = started()
    stage = board.start[Role.MODEL].stages[2]  # context, 1.18 to 1.4
    stage.end = EXEC + 1.2
    view = read_startup(board, "cuda")
    (model,) = [process for process in view.processes if process.role == "model"]
    assert model.covered == pytest.approx(1 - 0.2 / 2.0)
    assert {process.covered for process in view.processes if process.role != "model"} == {1.0}


def test_rows_carry_bytes_rates_and_checks_and_expectations_only_of_the_known_machine() -> None:
    board = started()
    (row,) = [row for row in read_startup(board, "cuda").stages if row.stage == "weights"]
    assert (row.bytes, row.rate, row.passed) == (65 * 10**9, 50 * 10**9, True)
    assert "every byte" in row.check
    assert row.expected_s is None
    board.device_name = b"NVIDIA H200"
    expected = {(row.role, row.stage): row.expected_s for row in read_startup(board, "cuda").stages}
    assert expected["loader", "weights"] == pytest.approx(65 / 48, abs=1e-3)
    assert expected["model", "context"] == 0.19
    assert expected["model", "wait for weights"] is None
    assert not any(row.expected_s for row in read_startup(board, "torch").stages)


def test_while_it_starts_nothing_is_ready_and_the_last_stage_runs() -> None:
    board = Board.create()
    board.started_at = EXEC
    board.begin_stage(Role.MASTER, "checkpoint", EXEC)
    view = read_startup(board, "torch")
    assert (view.ready_s, view.critical_path, ready_at(board)) == (None, [], None)
    (row,) = view.stages
    assert (row.end_s, row.passed) == (None, None)
    assert {item.item: item.passed for item in view.checklist}["weights"] is None
    assert "starting" in draw_waterfall(view)


def test_a_stage_in_which_its_process_died_has_not_passed_and_ends_with_the_next_attempt() -> None:
    board = Board.create()
    board.started_at = EXEC
    board.begin_stage(Role.MODEL, "context", EXEC + 1)
    board.start[Role.MODEL].stages[0].pid = -1  # written by a process that is gone
    board.begin_stage(Role.MODEL, "fork", EXEC + 2)
    first, second = read_startup(board, "torch").stages
    assert (first.passed, first.end_s, second.passed) == (False, 2.0, None)


def test_the_checklist_adds_up_its_stages() -> None:
    items = {item.item: item for item in read_startup(started(), "cuda").checklist}
    assert items["weights"].measured_s == pytest.approx(0.05 + 1.3)
    assert items["weights"].passed
    assert items["compile"].passed
    assert items["compile"].measured_s == 0
    assert items["KV pool"].passed is None  # no such stage has been seen


def test_a_restart_is_counted_and_measured_from_the_loss() -> None:
    board = started()
    board.num_engine_starts, board.num_arbiter_starts = 2, 1
    board.engine_beat = EXEC + 10
    board.note_loss()
    board.reaped_at = EXEC + 10.1
    board.begin_life(Role.MODEL, EXEC + 10.11)
    board.begin_stage(Role.MODEL, "context", EXEC + 10.12)
    board.restart[Role.MODEL].end(EXEC + 10.3)
    board.restart[Role.MODEL].ready_at = EXEC + 10.3
    restarts = read_startup(board, "cuda").restarts
    assert restarts["model"].count == 1
    assert restarts["model"].began_s == pytest.approx(10)
    assert restarts["model"].down_s == pytest.approx(0.3)
    assert [row.stage for row in restarts["model"].stages] == ["dying", "respawn", "fork", "context"]
    assert (restarts["arbiter"].count, restarts["arbiter"].stages) == (0, [])


def test_a_model_worker_that_died_with_its_arbiter_was_down_since_then() -> None:
    board = started()
    board.engine_beat = EXEC + 10
    board.note_loss()
    board.reaped_at = EXEC + 10.1
    board.begin_life(Role.ARBITER, EXEC + 10.11)
    board.begin_life(Role.MODEL, EXEC + 11)
    board.note_loss()  # the first attempt failed
    board.begin_life(Role.MODEL, EXEC + 11.5)
    board.restart[Role.ARBITER].ready_at, board.restart[Role.MODEL].ready_at = EXEC + 11, EXEC + 12
    restarts = read_startup(board, "cuda").restarts
    assert restarts["model"].began_s == restarts["arbiter"].began_s == pytest.approx(10)
    assert (restarts["arbiter"].down_s, restarts["model"].down_s) == (pytest.approx(1), pytest.approx(2))
    assert [row.stage for row in restarts["model"].stages] == ["fork", "respawn", "fork"]


def test_graphs_are_complete_when_all_that_are_wanted_are_captured() -> None:
    board = started()
    board.num_graphs, board.num_graphs_wanted = 1, 3
    assert not read_startup(board, "cuda").graphs.complete
    board.num_graphs = 3
    assert read_startup(board, "cuda").graphs.complete


def test_the_log_has_a_line_per_process_and_one_for_what_everyone_waited_for() -> None:
    lines = list(describe_start(started()))
    assert len(lines) == len(Role) + 1
    assert "context 0.220" in next(line for line in lines if line.startswith("model from 1.000 s on"))
    assert lines[-1].startswith("everyone waited for: master python and gunicorn 0.400")


def test_the_picture_has_a_bar_per_stage() -> None:
    view = read_startup(started(), "cuda")
    picture = draw_waterfall(view)
    assert picture.count("<rect") == len(view.stages) + 1
    assert "ready after 3.000 s" in picture
