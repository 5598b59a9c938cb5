import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.errors import StartupError
from server.launch.runtime_dir import RuntimeDir

ACQUIRE = """
import sys
from pathlib import Path
from server.launch.runtime_dir import RuntimeDir
RuntimeDir(Path(sys.argv[1])).acquire()
print("acquired", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short path: sockets in it must have room. `acquire` changes TMPDIR, which is put back."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", "")
    return tmp_path_factory.mktemp("r") / "run"


def test_it_is_created_for_this_user_alone(folder: Path) -> None:
    RuntimeDir(folder).acquire()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TMPDIR"] == str(folder)


def test_a_second_instance_is_refused_and_touches_nothing(folder: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", ACQUIRE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "acquired\n"
        (folder / "engine.sock").touch()
        second = RuntimeDir(folder)
        with pytest.raises(StartupError, match="in use by another instance"):
            second.acquire()
        second.release()
        assert (folder / "engine.sock").exists()
    finally:
        first.communicate("")
    RuntimeDir(folder).acquire()
    assert not (folder / "engine.sock").exists()


def test_leftovers_go_and_foreign_files_stay(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "gunicorn-dirty-abc").mkdir()
    (folder / "gunicorn-dirty-abc" / "arbiter.sock").touch()
    (folder / "gunicorn-dirty-name.pid").write_text("1")
    (folder / "mine").touch()
    run = RuntimeDir(folder)
    run.acquire()
    run.write_address("::1", 80)
    assert (folder / "address").read_text() == "[::1]:80\n"
    assert {path.name for path in folder.iterdir()} == {"lock", "mine", "address"}
    run.release()
    assert {path.name for path in folder.iterdir()} == {"lock", "mine"}


def test_a_path_too_long_for_a_socket_is_refused_with_the_excess(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"at least \d+ bytes shorter"):
        RuntimeDir(tmp_path / ("x" * 90)).acquire()


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StartupError, match="mode 0777"):
        RuntimeDir(folder).acquire()


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    target = folder.parent / "target"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)
    with pytest.raises(StartupError, match="not a folder"):
        RuntimeDir(folder).acquire()


def test_process_names_differ_per_folder(folder: Path) -> None:
    assert RuntimeDir(folder).proc_name != RuntimeDir(folder / "other").proc_name
    assert RuntimeDir(folder).proc_name == RuntimeDir(folder).proc_name


def test_it_is_intact_until_it_or_its_socket_goes(folder: Path) -> None:
    run = RuntimeDir(folder)
    run.acquire()
    run.engine_socket.touch()
    assert run.is_intact()
    run.engine_socket.unlink()
    assert not run.is_intact()
    folder.rename(folder.with_name("away"))
    assert not run.is_intact()
    other = RuntimeDir(folder)
    other.acquire()
    other.engine_socket.touch()
    assert other.is_intact()
    assert not run.is_intact()


def test_its_folder_is_locked_against_cleaners(folder: Path) -> None:
    run = RuntimeDir(folder)
    run.acquire()
    fd = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
