"""Which source wins, and how a mistake is named."""

import json

import pytest

from server.errors import StartupError
from server.settings.load import load_settings, profile_names

PORT = "MODEL_SERVER_SERVER__PORT"


def overrides(**values):
    return json.dumps({key.replace("__", "."): value for key, value in values.items()})


def test_the_demo_profile_is_the_default():
    assert load_settings(environ={}) == load_settings("demo", {})
    assert load_settings(environ={}).model.path == "models/demo"


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_loads(profile):
    assert load_settings(profile, {}) == load_settings(environ={"MODEL_SERVER_PROFILE": profile})


def test_each_source_wins_over_the_one_before(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("[server]\nport = 1001\nkeep_alive_s = 61\nweb_workers = 2\ndrain_limit_s = 9\n")
    environ = {
        "MODEL_SERVER_CONFIG": str(own),
        PORT: "1002",
        "MODEL_SERVER_SERVER__KEEP_ALIVE_S": "62",
        "MODEL_SERVER_SERVER__WEB_WORKERS": "3",
        "MODEL_SERVER_OVERRIDES": overrides(server__port=1003, server__keep_alive_s=63),
    }
    server = load_settings("test", environ, {"server.port": 1004}).server
    assert (server.port, server.keep_alive_s, server.web_workers, server.drain_limit_s) == (1004, 63, 3, 9)
    assert load_settings("test", {}).server.drain_limit_s == 5  # the profile's
    assert load_settings("demo", {}).server.drain_limit_s == 30  # the base's


def test_text_becomes_the_type_of_its_field():
    environ = {
        "MODEL_SERVER_KV__PREFIX_CACHE": "false",
        "MODEL_SERVER_KV__BLOCK_SIZE": "32",
        "MODEL_SERVER_SERVER__LAME_DUCK_S": "0.5",
        "MODEL_SERVER_ENGINE__DEVICE": "cpu",
        "MODEL_SERVER_MODEL__PATH": "123",
    }
    settings = load_settings("demo", environ, {"server.port": "8001"})
    assert settings.kv.prefix_cache is False
    assert settings.kv.block_size == 32
    assert settings.server.lame_duck_s == 0.5
    assert settings.engine.device == "cpu"
    assert settings.model.path == "123"
    assert settings.server.port == 8001


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        load_settings(environ={}).server.port = 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MODEL_SERVER_SERVER__PRT": "1"}, ["MODEL_SERVER_SERVER__PRT", "did you mean MODEL_SERVER_SERVER__PORT?"]),
        (
            {"MODEL_SERVER_PORT": "9000"},
            ["MODEL_SERVER_PORT is not a setting", "did you mean MODEL_SERVER_SERVER__PORT?"],
        ),
        ({"MODEL_SERVER_SEVER__PORT": "1"}, ["did you mean MODEL_SERVER_SERVER__PORT?"]),
        ({"MODEL_SERVER_PROFIL": "demo"}, ["did you mean MODEL_SERVER_PROFILE?"]),
        ({"MODEL_SERVER_PROFILE": "dmo"}, ["'dmo' does not exist", "did you mean demo?", "demo, h200, test"]),
        ({"MODEL_SERVER_PROFILE": "../../etc"}, ["does not exist", "demo, h200, test"]),
        ({PORT: "abc"}, [PORT, "server.port is 'abc' (str)", "expected a whole number >= 0 and <= 65535"]),
        ({PORT: "70000"}, ["server.port is '70000'", "<= 65535"]),
        ({PORT: "1.5"}, ["server.port"]),
        ({PORT: ""}, ["server.port is ''"]),
        ({"MODEL_SERVER_SERVER__LAME_DUCK_S": "nan"}, ["server.lame_duck_s is 'nan'", "a finite number >= 0"]),
        ({"MODEL_SERVER_SERVER__LAME_DUCK_S": "inf"}, ["server.lame_duck_s is 'inf'"]),
        ({"MODEL_SERVER_KV__BLOCK_SIZE": "12"}, ["kv.block_size", "one of 8, 16, 32, 64"]),
        ({"MODEL_SERVER_KV__PREFIX_CACHE": "maybe"}, ["kv.prefix_cache", "expected true or false"]),
        ({"MODEL_SERVER_ENGINE__BACKEND": "Cuda"}, ["engine.backend", "one of auto, cuda, torch"]),
        ({"MODEL_SERVER_OVERRIDES": "{"}, ["MODEL_SERVER_OVERRIDES is not JSON"]),
        ({"MODEL_SERVER_OVERRIDES": "[]"}, ["MODEL_SERVER_OVERRIDES must be an object"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(server__prt=1)}, ["no key server.prt", "did you mean port?"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(sever__port=1)}, ["no section [sever]", "did you mean server?"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(port=1)}, ["'port' is not of the form section.field"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(server__port=True)}, ["server.port is True (bool)"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(server__port=None)}, ["server.port is None"]),
        ({"MODEL_SERVER_OVERRIDES": overrides(model__path=5)}, ["model.path is 5 (int)", "expected a string"]),
        ({"MODEL_SERVER_CONFIG": "/nonexistent.toml"}, ["/nonexistent.toml cannot be read", "No such file"]),
    ],
)
def test_mistakes_are_named(environ, expected):
    with pytest.raises(StartupError) as refusal:
        load_settings(environ=environ)
    for part in expected:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", ["no key server.prot", "did you mean port?"]),
        ("[servers]\nport = 1", ["no section [servers]", "did you mean server?"]),
        ("zebra = 1", ["no section [zebra]"]),
        ("server = 5", ["[server] must be a table", "server = 5"]),
        ('[server]\nport = "8000"', ["server.port is '8000' (str)", "expected a whole number"]),
        ("[server]\nport = 8000.0", ["server.port is 8000.0 (float)"]),
        ("[server]\nlame_duck_s = nan", ["server.lame_duck_s is nan"]),
        ("[kv]\nprefix_cache = 1", ["kv.prefix_cache is 1 (int)", "true or false"]),
        ("[server", ["is not TOML"]),
        ("[server]\nhost = '\udcff'", ["is not TOML"]),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path, text, expected):
    own = tmp_path / "own.toml"
    own.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StartupError) as refusal:
        load_settings("demo", {"MODEL_SERVER_CONFIG": str(own)})
    for part in [str(own), *expected]:
        assert part in str(refusal.value)


def test_variables_of_kubernetes_services_are_not_ours():
    environ = {
        "MODEL_SERVER_SERVICE_HOST": "10.0.0.1",
        "MODEL_SERVER_SERVICE_PORT": "8000",
        "MODEL_SERVER_SERVICE_PORT_HTTP": "8000",
        "MODEL_SERVER_PORT": "tcp://10.0.0.1:8000",
        "MODEL_SERVER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "MODEL_SERVER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "MODEL_SERVER_CANARY_SERVICE_HOST": "10.0.0.2",
        "MODEL_SERVER_CANARY_PORT": "tcp://10.0.0.2:8000",
    }
    assert load_settings("demo", environ) == load_settings("demo", {})


def test_missing_config_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("server.settings.load.__file__", str(tmp_path / "a" / "b" / "load.py"))
    with pytest.raises(StartupError, match=r"config/base\.toml is missing"):
        load_settings(environ={})


def test_installed_package_brings_its_own_config(monkeypatch, tmp_path):
    profiles = tmp_path / "server" / "config" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "demo.toml").write_text("")
    (profiles.parent / "base.toml").write_text("[server]\nport = 1\n")
    monkeypatch.setattr("server.settings.load.__file__", str(tmp_path / "server" / "settings" / "load.py"))
    with pytest.raises(StartupError, match=r"base\.toml.*missing required field"):
        load_settings(environ={})
