"""What each role of the real service has imported when it is ready. Each package is there for a reason; see
docs/decisions/004-imports-of-the-start.md before adding one.
"""

import importlib.util
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.process.conftest import StartService
from tests.process.harness import ROOT, ProcessService
from tests.tiny_models import write_tiny_model

_RECORDER = ROOT / "tests" / "process" / "import_log"
_MASTER_BEFORE_FORKS = {"gunicorn", "msgspec", "server", "typing_extensions"}
_HTTP = {
    "annotated_doc",
    "annotated_types",
    "anyio",
    "click",  # uvicorn's command line, which it imports whoever asks
    "fastapi",
    "opentelemetry",  # fastapi's
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "starlette",
    "tokenizers",
    "typing_inspection",
    "uvicorn",
    "uvicorn_worker",
}
_TORCH = {"cuda", "numpy", "torch", "torchgen", "tqdm"}  # what torch imports if it is there
_ALLOWED = {
    "master": _MASTER_BEFORE_FORKS | _HTTP,
    "loader": _MASTER_BEFORE_FORKS,
    "arbiter": _MASTER_BEFORE_FORKS | _TORCH,
    "model": _MASTER_BEFORE_FORKS | _TORCH,
    "web": _MASTER_BEFORE_FORKS | _HTTP | {"httptools", "uvloop"},
}
_ALLOWED_WITH_CUDA = _ALLOWED | {role: _MASTER_BEFORE_FORKS | {"cuda"} for role in ("loader", "arbiter", "model")}
_HEAVY = ("torch", "triton", "transformers", "numpy")


def _environ(folder: Path, forbidden: tuple[str, ...]) -> dict[str, str]:
    return {
        "PYTHONPATH": str(_RECORDER),
        "IMPORT_LOG": str(folder / "imports"),
        "FORBIDDEN_IMPORTS": ",".join(forbidden),
    }


def _packages_by_role(service: ProcessService, log: Path) -> dict[str, set[str]]:
    """Installed packages outside the standard library that each role, or an ancestor before its fork, imported."""
    loaded: defaultdict[str, set[str]] = defaultdict(set)
    at_fork: dict[tuple[str, str], set[str]] = {}
    for line in log.read_text().splitlines():
        pid, what, *arguments = line.split()
        if what == "import":
            loaded[pid].add(arguments[0].partition(".")[0])
        elif what == "fork":
            at_fork[pid, arguments[0]] = set(loaded[pid])
        else:
            loaded[pid] |= at_fork[arguments[0], arguments[1]]
    board = service.board()
    pids = {
        "master": service.pid,
        "loader": board.loader_pid,
        "arbiter": board.arbiter_pid,
        "model": board.model_pid,
        "web": service.web_workers()[0],
    }
    return {role: {name for name in loaded[str(pid)] if _is_package(name)} for role, pid in pids.items()}


def _newcomers(found: dict[str, set[str]], allowed: dict[str, set[str]]) -> dict[str, set[str]]:
    return {role: packages - allowed[role] for role, packages in found.items() if packages - allowed[role]}


def _is_package(name: str) -> bool:
    """Not of the standard library, and no optional import of something that is not there."""
    if name in sys.stdlib_module_names or name.startswith("_"):
        return False
    return importlib.util.find_spec(name) is not None


def test_no_role_has_imported_more_than_it_needs(start: StartService, tmp_path: Path) -> None:
    forbidden = ("triton", "transformers", "huggingface_hub", "jinja2", "typer")
    service = start(environ=_environ(tmp_path, forbidden)).wait_ready()
    found = _packages_by_role(service, tmp_path / "imports")
    assert _newcomers(found, _ALLOWED) == {}
    assert "torch" in found["model"]  # the record sees what there is
    assert "must not be imported" not in service.log


@pytest.mark.gpu
def test_no_process_of_the_cuda_backend_imports_torch(start: StartService, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m", dtype="bfloat16", hidden_size=256, head_dim=64, with_tokenizer=True)
    settings = {"model__path": str(model), "engine__backend": "cuda", "kv__pool_mib": 64}
    service = start(environ=_environ(tmp_path, _HEAVY), **settings).wait_ready()
    found = _packages_by_role(service, tmp_path / "imports")
    assert _newcomers(found, _ALLOWED_WITH_CUDA) == {}
    assert "must not be imported" not in service.log


@pytest.mark.parametrize(
    "modules",
    [
        ("gunicorn.app.wsgiapp", "server.launch.preload", "server.launch.master", "server.launch.dirty_arbiter"),
        ("server.launch.loader", "server.ops.cuda.nvidia", "server.weights.device_memory"),
        ("server.engine.worker", "server.engine.on_cuda"),
        ("server.launch.web_worker", "server.api.app"),
    ],
    ids=["master", "loader", "model worker", "web worker"],
)
def test_a_role_of_the_cuda_backend_needs_no_heavy_package(modules: tuple[str, ...], tmp_path: Path) -> None:
    code = "".join(f"import {module}\n" for module in modules)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=_environ(tmp_path, (*_HEAVY, "huggingface_hub", "jinja2", "typer")),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
