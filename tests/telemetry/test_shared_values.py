"""Each living process has a row of its own, and what the dead have counted stays."""

import os

import pytest

from server.telemetry.shared_values import MAX_ROWS, SharedValues


def in_child(work):
    """Run `work` in a fork that ends without a word, as if killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_what_dead_processes_added_stays_whatever_their_number():
    values = SharedValues()
    first, second = values.new_value(), values.new_value()
    first.inc(0.5)
    for _ in range(MAX_ROWS + 10):
        in_child(lambda: second.inc(2))
    assert first.get() == 0.5
    assert second.get() == 2 * (MAX_ROWS + 10)


def test_processes_that_add_at_the_same_time_lose_nothing():
    values = SharedValues()
    value = values.new_value()
    value.inc(1)

    def add_many():
        for _ in range(20_000):
            value.inc(1)

    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            add_many()
            os._exit(0)
        pids.append(pid)
    add_many()
    for pid in pids:
        os.waitpid(pid, 0)
    assert value.get() == 80_001
