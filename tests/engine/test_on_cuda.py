"""What a model worker of the cuda backend does before it has a GPU's answer."""

from types import SimpleNamespace
from typing import cast

import pytest

from server.engine import on_cuda
from server.errors import EngineDead, StartupError
from server.launch.board import Board
from server.ops.cuda.driver import Driver

DRIVER = cast(Driver, SimpleNamespace(facts=SimpleNamespace(arch="sm_75")))


@pytest.mark.parametrize(("ready_at", "kind"), [(0.0, StartupError), (1.0, EngineDead)])
def test_missing_kernels_are_permanent_unless_the_service_has_run_with_some(
    monkeypatch: pytest.MonkeyPatch, ready_at: float, kind: type[Exception]
) -> None:
    """Rebuilt under a running service they are no reason for systemd not to start it again."""
    monkeypatch.setattr(on_cuda, "read_manifest", lambda _: None)
    board = Board.create()
    board.ready_at = ready_at
    with pytest.raises(kind, match="run scripts/build-kernels"):
        on_cuda._kernels(board, DRIVER)
