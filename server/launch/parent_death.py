"""No process of the service outlives its parent: the kernel sends SIGKILL when the forking thread ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_ppid: int) -> None:
    """Call in the child, in its main thread and after any change of user (which clears the request).

    Fork from main threads only: the signal fires when the *thread* that forked ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_ppid:  # the parent died before the request was made
        os._exit(1)
