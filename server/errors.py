"""The exception tree. Which class is raised decides who suffers: one request, or the process.

ServerError
├── InvalidRequest   the request is wrong: 422 on the native routes, 400 on the OpenAI ones
├── Overloaded       a queue is full: 429 with Retry-After
├── NotReady         loading, draining or stalled: 503 with Retry-After
├── RequestFailed    this request alone failed: 424 native, 500 OpenAI
├── EngineDead       the engine is gone: 503, the process exits
└── StartupError     the service cannot start as configured: exit code 4, never restarted
"""


class ServerError(Exception):
    """Root of everything that the server raises on purpose."""


class InvalidRequest(ServerError):
    """What the client sent is wrong. `param` names the field in the client's words; `code` is OpenAI's or None."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(ServerError):
    """No room for the request now. `retry_after_s` is an estimate, which the HTTP side bounds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(ServerError):
    """The service does not take requests at the moment."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(ServerError):
    """An admitted request ended without its answer; its neighbours are untouched."""


class EngineDead(ServerError):
    """The engine cannot go on; whoever raises it ends the process."""


class StartupError(ServerError):
    """A permanent fault of settings, checkpoint or machine, found before anything was allocated."""
