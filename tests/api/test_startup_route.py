"""The timeline over HTTP: from the board, at any time, on both of its paths."""

import pytest

from server.launch.board import Role
from tests.api.service import ApiService


@pytest.mark.parametrize("path", ["/startup", "/health/startup"])
def test_the_timeline_is_served_as_json(service: ApiService, path: str) -> None:
    answer = service.client.get(path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    view = answer.json()
    assert {"stages", "critical_path", "processes", "checklist", "graphs", "restarts", "ready_s"} <= view.keys()
    assert {"role", "pid", "stage", "begin_s", "end_s", "bytes", "rate", "expected_s", "passed", "check"} <= view[
        "stages"
    ][0].keys()
    assert service.client.head(path).status_code == 200


def test_the_timeline_is_drawn(service: ApiService) -> None:
    answer = service.client.get("/startup.svg")
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert "tokenizer" in answer.text


def test_a_service_that_is_still_loading_shows_how_far_it_is(start_service) -> None:
    service = start_service(with_engine=False)
    service.board.begin_stage(Role.LOADER, "weights")
    view = service.client.get("/startup").json()
    assert view["ready_s"] is None
    (weights,) = [row for row in view["stages"] if row["stage"] == "weights"]
    assert weights["end_s"] is None
    assert weights["passed"] is None
