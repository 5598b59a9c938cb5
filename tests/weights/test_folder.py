"""find_folder takes a folder, a hub cache folder or a hub id, without network when the model is cached."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.errors import StartupError
from server.weights import download
from server.weights.folder import HubAccess, find_folder
from server.weights.index import open_checkpoint
from tests.tiny_models import write_tiny_model

COMMIT = "b7f2a1c0"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """cache/models--org--tiny as huggingface_hub lays it out: snapshots of links into blobs."""
    model = write_tiny_model(tmp_path / "plain", num_shards=2, with_tokenizer=True)
    repository = tmp_path / "cache" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(model.iterdir())):
        blob = repository / "blobs" / f"blob{number}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return repository


def offline(repository: Path) -> HubAccess:
    return HubAccess(cache=repository.parent, is_offline=True)


def online(repository: Path) -> HubAccess:
    return HubAccess(cache=repository.parent, is_offline=False)


def test_a_plain_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_folder(str(tmp_path), "main", HubAccess(tmp_path, is_offline=True)) == tmp_path


def test_a_cache_folder_is_followed_to_the_snapshot_of_the_revision(repository: Path) -> None:
    snapshot = repository / "snapshots" / COMMIT
    assert find_folder(str(repository), "main", offline(repository)) == snapshot
    assert find_folder(str(repository), COMMIT, offline(repository)) == snapshot
    assert find_folder(str(snapshot), "main", offline(repository)) == snapshot
    with pytest.raises(StartupError, match=f"revision 'v2' is not in this cache folder; found: {COMMIT}"):
        find_folder(str(repository), "v2", offline(repository))


@pytest.mark.parametrize("access", [offline, online])
def test_a_cached_hub_id_needs_neither_network_nor_the_hub_library(repository: Path, access: object) -> None:
    hub = access(repository)  # type: ignore[operator]
    checkpoint = open_checkpoint("org/tiny", "main", hub)
    assert checkpoint.folder == repository / "snapshots" / COMMIT
    program = (
        "import sys, pathlib; from server.weights.folder import HubAccess; from server.weights.index import *;"
        f"open_checkpoint('org/tiny', 'main', HubAccess(pathlib.Path({str(hub.cache)!r}), {hub.is_offline}));"
        "sys.exit('huggingface_hub' in sys.modules or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_read_only_cache_is_enough(repository: Path) -> None:
    paths = [path for path in repository.rglob("*") if not path.is_symlink()]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    listing = sorted(repository.rglob("*"))
    open_checkpoint("org/tiny", "main", online(repository))
    assert sorted(repository.rglob("*")) == listing
    for path in paths:
        path.chmod(modes[path])


def test_a_dangling_link_in_a_snapshot_is_named_with_its_target(repository: Path) -> None:
    link = repository / "snapshots" / COMMIT / "model-00002-of-00002.safetensors"
    target = link.readlink()
    link.resolve().unlink()
    with pytest.raises(StartupError, match=f"{link.name}: is a dangling link; its target {target} does not exist"):
        open_checkpoint("org/tiny", "main", offline(repository))
    with pytest.raises(StartupError, match="is a dangling link"):
        open_checkpoint(str(repository), "main", online(repository))


def test_an_unfinished_download_is_named_when_offline(repository: Path) -> None:
    (repository / "snapshots" / COMMIT / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(StartupError, match=r"files that it names are missing: model-00001-of-00002.safetensors"):
        open_checkpoint("org/tiny", "main", offline(repository))


def test_a_cached_id_of_another_revision_is_refused_when_offline_with_what_there_is(repository: Path) -> None:
    with pytest.raises(StartupError, match=f"revision 'v2' is not in this cache folder; found: {COMMIT}"):
        find_folder("org/tiny", "v2", offline(repository))


def test_an_unfinished_download_is_continued_by_the_hub_library(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "snapshots" / COMMIT / "model-00001-of-00002.safetensors").unlink()
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-4:-1])
        return subprocess.CompletedProcess(command, 0, stdout=f"{repository / 'snapshots' / COMMIT}\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert find_folder("org/tiny", "main", online(repository)) == repository / "snapshots" / COMMIT
    assert asked == [["org/tiny", "main", str(repository.parent)]]


def test_an_uncached_id_is_refused_when_offline_with_all_that_was_tried(repository: Path) -> None:
    with pytest.raises(StartupError, match=r"org/other: there is no such folder.*hub cache .*HF_HUB_OFFLINE"):
        find_folder("org/other", "main", offline(repository))


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("", "model.path is empty"),
        ("/nowhere/model", "no such folder, and it is not a hub id"),
        ("a/b/c", "not a hub id"),
        ("-x/y", "not a hub id"),
        ("../x", "not a hub id"),
    ],
)
def test_what_is_neither_folder_nor_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, named: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # where ../x is nothing
    with pytest.raises(StartupError, match=named):
        find_folder(path, "main", HubAccess(tmp_path, is_offline=False))


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    with pytest.raises(StartupError, match="is not a folder"):
        find_folder(str(file), "main", HubAccess(tmp_path, is_offline=True))


def test_a_failed_download_ends_with_the_reason(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # for the library in the other process: no network in a test
    with pytest.raises(StartupError, match=r"org/other: there is no such folder, and the hub did not give it: \w+:"):
        find_folder("org/other", "main", online(repository))
    capfd.readouterr()


def test_a_download_that_the_library_finds_in_its_cache_is_used(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (repository / "snapshots" / COMMIT / "tokenizer.json").unlink()  # not complete: the hub is asked
    found = find_folder("org/tiny", "main", online(repository))
    assert found == repository / "snapshots" / COMMIT


def test_the_download_program_says_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(hub_id: str, **_: object) -> str:
        raise PermissionError(f"{hub_id} is gated\nask for access")

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    assert download.main("org/tiny", "main", "/cache") == 1
    assert capsys.readouterr().out == "PermissionError: org/tiny is gated\n"


def test_the_download_program_reports_on_stdout(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(hub_id: str, **options: object) -> str:
        asked.update(options, hub_id=hub_id)
        return str(repository / "snapshots" / COMMIT)

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    assert download.main("org/tiny", "v1", "/cache") == 0
    assert capsys.readouterr().out.strip() == str(repository / "snapshots" / COMMIT)
    assert (asked["hub_id"], asked["revision"], asked["cache_dir"]) == ("org/tiny", "v1", "/cache")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in download.PATTERNS)


@pytest.mark.parametrize(
    ("environ", "cache", "is_offline"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a", False),
        ({"HF_HOME": "/b", "HF_HUB_OFFLINE": "1"}, "/b/hub", True),
        ({"XDG_CACHE_HOME": "/c", "HF_HUB_OFFLINE": "0"}, "/c/huggingface/hub", False),
        ({"HF_HOME": "/b", "TRANSFORMERS_OFFLINE": "yes"}, "/b/hub", True),
    ],
)
def test_the_environment_is_read_as_huggingface_hub_does(environ: dict[str, str], cache: str, is_offline: bool) -> None:
    assert HubAccess.from_environment(environ) == HubAccess(Path(cache), is_offline)
    program = "import json, huggingface_hub.constants as c; print(json.dumps([c.HF_HUB_CACHE, c.HF_HUB_OFFLINE]))"
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert json.loads(answer) == [cache, is_offline]
