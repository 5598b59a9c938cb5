"""Work in threads ends with the first failure, and with a signal at any moment."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random

import pytest

from server.weights.threads import for_each


def test_every_item_is_worked_on_once() -> None:
    seen: list[int] = []
    for_each(seen.append, iter(range(1000)))
    assert sorted(seen) == list(range(1000))


def test_the_first_failure_ends_all_and_is_raised() -> None:
    taken: list[int] = []
    before = set(threading.enumerate())

    def items() -> Iterator[int]:
        for number in range(10**9):
            taken.append(number)
            yield number

    def work(number: int) -> None:
        if number == 100:
            raise ValueError("item 100")

    with pytest.raises(ValueError, match="item 100"):
        for_each(work, items())
    assert len(taken) < 10**6
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_no_kind_of_failure_is_taken_for_the_end() -> None:
    def work(number: int | None) -> None:
        if number is None:
            raise StopIteration

    with pytest.raises(StopIteration):
        for_each(work, [1, 2, None, 3])


ENDLESS = """
import itertools, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
from server.weights.threads import for_each
print("ready", flush=True)
for_each(lambda number: sum(range(number % 50)), itertools.count())
"""


@pytest.mark.parametrize("seed", range(20))
def test_a_signal_ends_it_wherever_it_comes(seed: int) -> None:
    """A pool of concurrent.futures has hung here, with the main thread waiting for a lock of its own."""
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(Random(seed).uniform(0, 0.02))
        os.kill(process.pid, signal.SIGTERM)
        try:
            assert process.wait(20) == 143
        finally:
            process.kill()
