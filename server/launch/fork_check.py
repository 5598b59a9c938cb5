"""Before every fork: one thread, and CUDA untouched. Either would poison the child.

A thread's locks are inherited without the thread; a CUDA context does not survive a fork.
`torch.cuda.is_initialized()` proves nothing, so this looks at /proc and asks the driver.
"""

import ctypes
import logging
import os
import re
import time
from functools import partial
from pathlib import Path

from server.launch.board import Board

logger = logging.getLogger(__name__)

_CUDA_ERROR_NOT_INITIALIZED = 3  # what every call but a few answers before cuInit, and in a child forked after it
_CUDA_DEVICE = re.compile(r"/dev/(nvidia\d+|nvidia-uvm)")
_forked_at = 0.0


def fork_violations() -> list[str]:
    """What forbids a fork of this process now, in words. Empty: nothing."""
    found = []
    num_tasks = len(list(Path("/proc/self/task").iterdir()))
    if num_tasks > 1:
        found.append(f"{num_tasks} threads")
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except OSError:  # the descriptor of the listing itself
            continue
        if _CUDA_DEVICE.fullmatch(target):
            found.append(f"{target} is open")
    if _is_cuda_initialised():
        found.append("CUDA is initialised")
    return found


def _is_cuda_initialised() -> bool:
    """Ask the driver, if an import has mapped it: a CUDA build of torch links it, and that alone does no harm."""
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    num_devices = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(num_devices)) != _CUDA_ERROR_NOT_INITIALIZED)


def check_every_fork(board: Board) -> None:
    """From now on each os.fork() of this process and its children is counted, and logged if it breaks the rules."""
    os.register_at_fork(before=partial(_check, board))


def forked_at() -> float:
    """time.monotonic() when this process's parent began to fork it (of the last fork, in the parent)."""
    return _forked_at


def _check(board: Board) -> None:
    global _forked_at  # set in the parent, inherited by the child
    _forked_at = time.monotonic()
    # Counted, not raised: exceptions of this callback are swallowed.
    board.num_forks += 1
    if found := fork_violations():
        board.num_bad_forks += 1
        logger.error("unsafe fork of process %d: %s", os.getpid(), ", ".join(found))
