"""Runs a function over many items in threads, so that a signal can end it at any moment.

A pool of concurrent.futures cannot: a handler that raises while the main thread is inside one of its locks leaves the
lock held, and the shutdown waits for it for ever. Here the main thread holds no lock that a worker wants.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.002


def for_each(work: Callable[[T], None], items: Iterable[T], num_threads: int = 0) -> None:
    """Call `work` for every item, in `num_threads` threads, 0: as many as there are cores. Items are taken in order.

    The first failure, or an exception in the calling thread (Ctrl-C), stops all threads and is raised.
    """
    boxed, lock = ((item,) for item in items), threading.Lock()  # so that an end is told from any item
    failures: list[BaseException] = []
    ended: list[None] = []

    def run() -> None:
        try:
            while not failures:
                with lock:
                    found = next(boxed, None)
                if found is None:
                    break
                work(found[0])
        except BaseException as error:  # handed to the caller's thread, which raises it
            failures.append(error)
        finally:
            ended.append(None)

    threads = [threading.Thread(target=run) for _ in range(num_threads or len(os.sched_getaffinity(0)))]

    def wait() -> None:
        # Not by join: an exception in it makes Python take a running thread for one that has ended.
        while len(ended) < sum(thread.ident is not None for thread in threads):
            time.sleep(_POLL_S)

    try:
        _start(threads)
        wait()
    except BaseException as error:
        failures.append(error)
        wait()
        raise
    if failures:
        raise failures[0]


def _start(threads: Iterable[threading.Thread]) -> None:
    """Without a signal in between: starting one takes a lock that the new thread wants."""
    if threading.current_thread() is not threading.main_thread():
        for thread in threads:
            thread.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        for thread in threads:
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
