"""The record outlives its writers, and its lock tells whether somebody is loading."""

import os
import signal

from server.weights.record import LoadRecord


def test_marks_and_sums_are_what_was_stored() -> None:
    record = LoadRecord(num_chunks=5, num_tensors=3)
    assert record.missing() == [0, 1, 2, 3, 4]
    assert (record.sums, record.is_complete) == (None, False)
    record.mark_arrived(3)
    record.store_sums([1, 2**64 - 1, 0])
    record.mark_complete()
    assert record.missing() == [0, 1, 2, 4]
    assert record.sums == (1, 2**64 - 1, 0)
    assert record.is_complete


def test_attempts_count_until_one_succeeds() -> None:
    record = LoadRecord(1, 1)
    assert [record.count_attempt(), record.count_attempt()] == [1, 2]
    record.mark_complete()
    assert record.count_attempt() == 1


def test_forgotten_content_keeps_its_sums_and_counts_as_a_failure() -> None:
    record = LoadRecord(2, 1)
    record.mark_arrived(0)
    record.store_sums([7])
    record.mark_complete()
    record.forget_content()
    assert (record.missing(), record.sums, record.is_complete) == ([0, 1], (7,), False)
    assert record.count_attempt() == 2


def test_mappings_count_those_before() -> None:
    record = LoadRecord(1, 1)
    assert [record.count_mapping() for _ in range(3)] == [0, 1, 2]


def test_the_lock_belongs_to_one_and_ends_with_it() -> None:
    record = LoadRecord(1, 1)
    lock_fd = record.try_lock()
    assert lock_fd is not None
    assert record.try_lock() is None
    os.close(lock_fd)
    again = record.try_lock()
    assert again is not None
    os.close(again)


def test_a_killed_child_leaves_its_marks_and_its_lock() -> None:
    record = LoadRecord(2, 1)
    lock_fd = record.try_lock()
    assert lock_fd is not None
    pid = os.posix_spawn("/bin/sleep", ["sleep", "100"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, lock_fd, 100)])
    os.close(lock_fd)
    assert record.try_lock() is None, "the child inherited it"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    free = record.try_lock()
    assert free is not None
    os.close(free)
