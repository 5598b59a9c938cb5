"""The weight memory outlives whoever filled it, keeps its size, and cannot be written through a read-only mapping."""

import os
import subprocess
import sys

import pytest

from server.weights.memory import create_weight_memory, map_read_only, map_writable


def test_what_one_process_writes_another_reads_after_its_death() -> None:
    fd = create_weight_memory(4096)
    program = f"from server.weights.memory import map_writable; map_writable({fd})[:5] = b'bytes'"
    subprocess.run([sys.executable, "-c", program], pass_fds=[fd], check=True)
    assert map_read_only(fd)[:5] == b"bytes"


def test_a_read_only_mapping_refuses_writes() -> None:
    fd = create_weight_memory(4096)
    with pytest.raises(TypeError):
        map_read_only(fd)[0] = 1
    assert memoryview(map_read_only(fd)).readonly


def test_its_size_cannot_change() -> None:
    fd = create_weight_memory(4096)
    for num_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)


def test_a_mapping_outlives_the_descriptor_and_a_new_program_does_not_inherit_it() -> None:
    fd = create_weight_memory(4096)
    mapping = map_writable(fd)
    assert not os.get_inheritable(fd)
    os.close(fd)
    mapping[:1] = b"x"
    assert mapping[:1] == b"x"
