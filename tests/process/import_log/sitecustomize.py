"""Python runs this at the start of a process with this folder on PYTHONPATH: who imported what, and who forked whom.

A line for each, appended to the file IMPORT_LOG: `PID import NAME`; `PID fork NUMBER`, said by the parent before its
fork of that number; `PID born PARENT NUMBER`, said by the child as soon as it runs. Packages named in FORBIDDEN_IMPORTS
(comma-separated) cannot be imported.
"""

import os
import sys

_log = os.open(os.environ["IMPORT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_forbidden = frozenset(filter(None, os.environ.get("FORBIDDEN_IMPORTS", "").split(",")))


_num_forks = 0


def _write(line: str) -> None:
    os.write(_log, f"{os.getpid()} {line}\n".encode())


def _on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "import":  # a module that is not loaded yet, whoever finds it
        name = str(arguments[0])
        if name.partition(".")[0] in _forbidden:
            raise ImportError(f"{name} must not be imported here")
        _write(f"import {name}")


def _before_fork() -> None:
    global _num_forks
    _num_forks += 1
    _write(f"fork {_num_forks}")


sys.addaudithook(_on_event)
os.register_at_fork(before=_before_fork, after_in_child=lambda: _write(f"born {os.getppid()} {_num_forks}"))
