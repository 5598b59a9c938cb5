"""`model-server bench`: turns arguments into a plan, shows what was measured, and writes it to a file if asked."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import server
from server.bench.report import format_report, make_report
from server.bench.server_process import BenchFailed, ServerCommand
from server.bench.startup import KINDS, Plan, Run, measure
from server.cli.serve import gunicorn_config, merge_assignments
from server.errors import StartupError
from server.settings.load import load_settings
from server.settings.resolve import name_from_path
from server.weights.folder import HubAccess, find_folder

EXIT_FAILED = 1
_BODY = {"inputs": "The sea was", "parameters": {"max_new_tokens": 1}}
_ONLY_OURS = ("first-ever", "kill", "kill-many", "kill-arbiter", "requests")


def bench_startup(
    profile: str,
    overrides: dict[str, object],
    assignments: Sequence[str],
    what: str,
    num_runs: int,
    num_streams: int,
    json_file: Path | None,
    command: str,
    url: str,
    path: str,
    body: str,
    files: Path | None,
) -> None:
    """Measure, print, write. Raises StartupError for arguments that make no sense, BenchFailed if a run fails."""
    kinds = _kinds(what, bool(command))
    if command:
        tested = ServerCommand(tuple(shlex.split(command)), url=url or "http://127.0.0.1:{port}", is_ours=False)
        folder = files
    else:
        tested, model = our_command(profile, overrides, assignments)
        folder = files or model
    if json_file is not None and not json_file.parent.is_dir():
        raise StartupError(f"--json {json_file}: there is no folder {json_file.parent}")
    plan = Plan(tested, _files_of(folder), path, _parse_body(body), num_runs, num_streams)
    runs: list[Run] = []
    failures: dict[str, str] = {}
    unwritten = ""
    for kind in kinds:
        try:
            for run in measure(plan, kind):
                runs.append(run)
                print(_progress(run), flush=True)
        except BenchFailed as error:
            failures[kind] = str(error)
            print(f"{kind}: {error}", flush=True)
        report = make_report(runs, failures, command or f"model-server, profile {profile or 'demo'}, {folder}")
        if json_file is not None:  # after each kind: what was measured is not lost with the next one
            unwritten = write_report(json_file, msgspec.json.format(msgspec.json.encode(report), indent=1))
    print("\n" + format_report(report))
    if unwritten:
        raise BenchFailed(unwritten)
    if failures:
        sys.exit(EXIT_FAILED)


def write_report(file: Path, data: bytes) -> str:
    """Why it cannot be written; "" if it was. What was measured is shown all the same."""
    try:
        file.write_bytes(data)
    except OSError as error:
        return f"--json {file}: {error.strerror}"
    return ""


def _kinds(what: str, is_foreign: bool) -> list[str]:
    kinds = [kind.strip() for kind in what.split(",") if kind.strip()]
    if not kinds:
        kinds = [kind for kind in KINDS if not (is_foreign and kind in _ONLY_OURS)]
    for kind in kinds:
        if kind not in KINDS:
            raise StartupError(f"--what {kind}: there are {', '.join(KINDS)}")
        if is_foreign and kind in _ONLY_OURS:
            raise StartupError(f"--what {kind} knows our server only; with --command there are warm and cold")
    return kinds


def our_command(profile: str, overrides: dict[str, object], assignments: Sequence[str]) -> tuple[ServerCommand, Path]:
    """The server and the folder of its model, found once so that no run has to look for it."""
    merged = merge_assignments(overrides, assignments)
    settings = load_settings(profile or None, None, merged)
    root = Path(server.__file__).parents[1]  # what a profile means its paths from
    path = settings.model.path
    if "model.path" not in merged and (root / path).is_dir():
        path = str(root / path)
    folder = find_folder(path, settings.model.revision, HubAccess.from_environment(os.environ)).absolute()
    name = settings.model.served_name or name_from_path(path)
    merged |= {"model.path": str(folder), "model.served_name": name}
    arguments = (sys.executable, "-m", "gunicorn", "-c", str(gunicorn_config()))  # as the service unit starts it
    return ServerCommand(arguments, folder=root, profile=profile, overrides=merged), folder


def _files_of(folder: Path | None) -> tuple[Path, ...]:
    """What a server reads of a model: every file of its folder."""
    if folder is None:
        raise StartupError("--files is needed with --command: the folder whose page cache state is shown and changed")
    found = tuple(sorted(file for file in folder.iterdir() if file.is_file()))
    if not found:
        raise StartupError(f"--files {folder} holds no files")
    return found


def _parse_body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text) if text else _BODY
    except ValueError as error:
        raise StartupError(f"--body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise StartupError("--body must be a JSON object")
    return body


def _progress(run: Run) -> str:
    values = ", ".join(f"{name} {value:.3f}" for name, value in run.values.items())
    notes = ", ".join(f"{name} {value}" for name, value in run.notes.items())
    return f"{run.kind}: {values}  ({notes})"
