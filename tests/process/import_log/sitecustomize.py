"""Python runs this at the start of a process with this folder on PYTHONPATH: who imported what, and who forked whom.

A line for each: `PID import NAME` and `PID fork PARENT`, appended to the file IMPORT_LOG. Packages named in
FORBIDDEN_IMPORTS (comma-separated) cannot be imported.
"""

import os
import sys

_log = os.open(os.environ["IMPORT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_forbidden = frozenset(filter(None, os.environ.get("FORBIDDEN_IMPORTS", "").split(",")))


def _on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import":  # a module that is not loaded yet, whoever finds it
        name = str(arguments[0])
        if name.partition(".")[0] in _forbidden:
            raise ImportError(f"{name} must not be imported here")
        os.write(_log, f"{os.getpid()} import {name}\n".encode())


sys.addaudithook(_on_event)
os.register_at_fork(after_in_child=lambda: os.write(_log, f"{os.getpid()} fork {os.getppid()}\n".encode()))
