"""How every role logs: plain lines on stderr with time, level, role, process and, where there is one, the request.

Owns the format and the request id of the running task. Prompts and generated text are never logged.
"""

import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="")

# Servers that bring handlers of their own; with them a line would appear twice, in two formats.
_ADOPTED_LOGGERS = ("gunicorn.error", "uvicorn", "uvicorn.error", "uvicorn.asgi")
# One line per request costs more than it tells: metrics count requests and measure their times.
_SILENCED_LOGGERS = ("gunicorn.access", "uvicorn.access")


class LineFormatter(logging.Formatter):
    """`2026-11-05T12:00:00.123Z INFO web[4242] request=ab12 server.api.native: text`"""

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._role = role

    def converter(self, timestamp: float | None) -> time.struct_time:
        return time.gmtime(timestamp)

    def formatMessage(self, record: logging.LogRecord) -> str:
        current = request_id.get()
        request = f" request={current}" if current else ""
        moment = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z"
        who = f"{self._role}[{record.process}]{request}"
        # A newline inside a message could forge a line of its own; a traceback is appended after this.
        message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return f"{moment} {record.levelname} {who} {record.name}: {message}"


def configure_logging(role: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything that this process logs to `stream` (stderr) in one format. Call again after a fork: the role."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _ADOPTED_LOGGERS:
        adopted = logging.getLogger(name)
        adopted.handlers, adopted.propagate = [], True
        adopted.setLevel(logging.NOTSET)
    for name in _SILENCED_LOGGERS:
        silenced = logging.getLogger(name)
        silenced.handlers, silenced.propagate = [], False
