"""A start that had to compile its imports says so, and what that costs."""

import importlib
import logging
import sys
import time

import pytest

from server.launch.bytecode import warn_if_compiled

_NAME = "compiled_or_not"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / f"{_NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    def load(*, writes_bytecode):
        monkeypatch.setattr("sys.dont_write_bytecode", not writes_bytecode)
        monkeypatch.delitem(sys.modules, _NAME, raising=False)
        return importlib.import_module(_NAME)

    return load


def warnings(caplog, started_at):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "server.launch"):
        warn_if_compiled([_NAME, "sys", "not.loaded"], started_at, "2 s")
    return caplog.messages


def test_missing_bytecode_is_a_warning_with_its_cost(module, caplog):
    module(writes_bytecode=False)
    (message,) = warnings(caplog, time.monotonic())
    assert f"no bytecode of {_NAME}: compiling costs 2 s at every start" in message
    assert "PYTHONDONTWRITEBYTECODE" in message


def test_only_the_first_start_compiles(module, caplog):
    before = time.monotonic() - 1
    module(writes_bytecode=True)
    (message,) = warnings(caplog, before)
    assert f"compiled {_NAME} at this start, which cost 2 s" in message
    assert warnings(caplog, time.monotonic() + 1) == []  # a later process
