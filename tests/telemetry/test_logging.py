"""One format for every role."""

import io
import logging
import re

import pytest

from server.telemetry.logging import configure_logging, request_id


@pytest.fixture
def lines():
    """What has been logged since `configure_logging`; the loggers are put back."""
    names = (None, "gunicorn.error", "uvicorn", "uvicorn.error", "uvicorn.asgi", "gunicorn.access", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    saved = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    configure_logging("web", "info", stream)
    yield lambda: stream.getvalue().splitlines()
    for logger, (handlers, level, propagate) in zip(loggers, saved, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_line_tells_when_what_who_and_where(lines):
    logging.getLogger("server.api").warning("hello %d", 5)
    (line,) = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING web\[\d+\] server\.api: hello 5", line)


def test_line_names_the_request_that_is_served(lines):
    token = request_id.set("ab12")
    logging.getLogger("x").info("a")
    request_id.reset(token)
    logging.getLogger("x").info("b")
    assert ["request=ab12" in line for line in lines()] == [True, False]


def test_message_cannot_forge_a_line(lines):
    logging.getLogger("x").info("a\r\n2026 ERROR forged")
    assert len(lines()) == 1


def test_traceback_follows_its_line(lines):
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert lines()[0].endswith("x: failed")
    assert lines()[-1] == "ValueError: no"


def test_levels_and_foreign_loggers_follow(lines):
    logging.getLogger("x").debug("quiet")
    logging.getLogger("gunicorn.error").info("once")
    logging.getLogger("uvicorn.error").info("once")
    logging.getLogger("uvicorn.access").info("never")
    assert [line.rpartition(" ")[2] for line in lines()] == ["once", "once"]


def test_a_fork_changes_the_role_and_doubles_no_line(lines):
    stream = io.StringIO()
    configure_logging("model", "debug", stream)
    logging.getLogger("x").debug("a")
    assert lines() == []
    (line,) = stream.getvalue().splitlines()
    assert " DEBUG model[" in line
