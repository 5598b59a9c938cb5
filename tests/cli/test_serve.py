"""`model-server serve`: what reaches gunicorn, whatever folder it is called from."""

import json
import os
from pathlib import Path

import pytest

import server
from server.cli.serve import exec_gunicorn, gunicorn_config
from server.errors import StartupError
from server.settings.load import CONFIG_VARIABLE, OVERRIDES_VARIABLE, load_settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's folder; environment and folder are put back afterwards. Becoming gunicorn ends the call instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(OVERRIDES_VARIABLE, "")
    monkeypatch.setattr(os, "execv", lambda *_: None)
    return tmp_path


def test_a_relative_model_is_the_callers_and_the_profiles_paths_are_the_checkouts(elsewhere: Path) -> None:
    (elsewhere / "mine").mkdir()
    exec_gunicorn("", {"model.path": "mine"}, ["server.runtime_dir=run"])
    assert json.loads(os.environ[OVERRIDES_VARIABLE]) == {
        "model.path": str(elsewhere / "mine"),
        "server.runtime_dir": str(elsewhere / "run"),
    }
    assert Path.cwd() == Path(server.__file__).parents[1] == gunicorn_config().parent


def test_a_hub_id_stays_a_hub_id() -> None:
    exec_gunicorn("", {"model.path": "org/name"}, [])
    assert load_settings().model.path == "org/name"


def test_a_relative_settings_file_is_the_callers(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "mine.toml").write_text("[server]\nport = 8123\n")
    monkeypatch.setenv(CONFIG_VARIABLE, "mine.toml")
    exec_gunicorn("", {}, [])
    assert load_settings().server.port == 8123


def test_a_set_without_a_value_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--set port: expected SECTION\.FIELD=VALUE"):
        exec_gunicorn("", {}, ["port"])


def test_a_setting_without_its_section_is_refused_with_the_section() -> None:
    exec_gunicorn("", {}, ["port=9000"])
    with pytest.raises(StartupError, match=r"command line .*'port'.* did you mean server\.port\?"):
        load_settings()
