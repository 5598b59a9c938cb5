"""A start that had to compile its imports says so, and what that costs."""

import importlib.util
import logging
import os
import sys
import time

import pytest

from server.launch.bytecode import HTTP_SAMPLE, TORCH_SAMPLE, warn_if_compiled
from server.launch.stages import IMPORTED_AT

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


def warnings(caplog, since):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "server.launch"):
        warn_if_compiled([_NAME, "sys", "not.loaded"], "2 s", since)
    return caplog.messages


def test_missing_bytecode_is_a_warning_with_its_cost(module, caplog):
    module(writes_bytecode=False)
    (message,) = warnings(caplog, time.monotonic())
    assert f"no bytecode of {_NAME}: compiling costs 2 s at every start" in message
    assert "PYTHONDONTWRITEBYTECODE" in message


def test_the_samples_are_modules_that_there_are():
    for name in (*HTTP_SAMPLE, *TORCH_SAMPLE):
        assert importlib.util.find_spec(name) is not None


def test_only_the_first_start_compiles(module, caplog):
    before = time.monotonic() - 1
    module(writes_bytecode=True)
    (message,) = warnings(caplog, before)
    assert f"compiled {_NAME} at this start, which cost 2 s" in message
    assert warnings(caplog, time.monotonic() + 1) == []  # a later process


def test_what_a_shell_compiled_before_it_became_this_process_was_not_compiled_by_the_start(module, caplog):
    cached = module(writes_bytecode=True).__spec__.cached
    imported_at = time.time() - time.monotonic() + IMPORTED_AT
    for seconds, expected in ((-1, 0), (1, 1)):
        os.utime(cached, (imported_at + seconds, imported_at + seconds))
        with caplog.at_level(logging.WARNING, "server.launch"):
            caplog.clear()
            warn_if_compiled([_NAME], "2 s")
        assert len(caplog.messages) == expected
