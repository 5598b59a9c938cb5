"""The timeline of the real service: nothing of a process's time is unseen, and the critical path is the whole start."""

import http.client
import itertools
import json
import os
import signal
import time
from typing import Any

from server.launch.board import ExitCode, ModelState, Role
from tests.process.conftest import StartService
from tests.process.harness import ProcessService

TOLERANCE_S = 0.05


def startup_of(service: ProcessService) -> dict[str, Any]:
    address = service.address()
    assert address is not None
    connection = http.client.HTTPConnection(*address, timeout=5)
    connection.request("GET", "/startup")
    view: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return view


def test_stages_leave_no_gap_and_the_critical_path_adds_up_to_ready(start: StartService) -> None:
    service = start(server__web_workers=2).wait_ready()
    seen_s = time.monotonic() - service.started_at
    view = startup_of(service)
    assert view["ready_s"] <= seen_s + TOLERANCE_S
    assert {process["role"] for process in view["processes"]} == {role.name.lower() for role in Role}
    for process in view["processes"]:
        assert process["covered"] >= 0.95, process
        assert process["ready_s"] is not None
        rows = [row for row in view["stages"] if row["role"] == process["role"]]
        assert all(before["end_s"] <= after["begin_s"] for before, after in itertools.pairwise(rows))
        assert all(row["passed"] for row in rows)
    named_s = sum(part["end_s"] - part["begin_s"] for part in view["critical_path"] if part["stage"])
    assert abs(named_s - view["ready_s"]) < TOLERANCE_S
    assert f"ready after {view['ready_s']:.2f} s" in service.log
    assert "everyone waited for: master python and gunicorn" in service.log
    assert view["restarts"]["model"]["count"] == 0


def test_restarts_of_model_worker_and_arbiter_have_timelines_of_their_own(start: StartService) -> None:
    service = start().wait_ready()
    first = startup_of(service)
    for engine, victim, role in ((2, service.board().model_pid, "model"), (3, service.board().arbiter_pid, "arbiter")):
        os.kill(victim, signal.SIGKILL)
        service.wait_for(
            lambda board, engine=engine: board.num_engine_starts == engine and board.model_state == ModelState.READY,
            "the next engine",
        )
        view = startup_of(service)
        restart = view["restarts"][role]
        names = [row["stage"] for row in restart["stages"]]
        assert restart["count"] == 1
        assert names[:3] == ["dying", "respawn", "fork"]
        assert abs(sum(row["seconds"] for row in restart["stages"]) - restart["down_s"]) < TOLERANCE_S
    assert view["restarts"]["model"]["count"] == 2
    assert view["restarts"]["model"]["stages"][0]["stage"] == "fork"
    assert view["stages"] == first["stages"]


def test_a_start_that_hangs_ends_with_the_stage_it_hung_in(start: StartService) -> None:
    service = start(engine__load_deadline_s=1)
    board = service.wait_for(lambda board: board.arbiter_pid > 0, "a dirty arbiter")
    os.kill(board.arbiter_pid, signal.SIGSTOP)
    ended = service.end()
    assert (ended.exit_code, ended.survivors) == (ExitCode.ENGINE_FAILED, ())
    assert "engine.load_deadline_s): arbiter " in service.log
