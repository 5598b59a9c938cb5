"""What is found on a machine, by its files alone."""

import sys

import pytest

from server.settings.machine import detect_machine, find_library, quota_cores


def touch(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_gpus_are_device_nodes_with_a_number(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        touch(tmp_path / "dev" / name)
    machine = detect_machine(tmp_path)
    assert machine.num_gpus == 2
    assert not machine.has_cuda  # no driver library
    touch(tmp_path / "usr/lib64/libcuda.so.1")
    assert detect_machine(tmp_path).has_cuda


def test_libcuda_is_found_where_the_linker_would(tmp_path):
    name = "libcuda.so.1"
    assert find_library(name, tmp_path) is None
    touch(tmp_path / "usr/lib64/libcuda.so.1")
    assert find_library(name, tmp_path) == "/usr/lib64/libcuda.so.1"
    (tmp_path / "etc").mkdir()
    cache = b"ld.so-1.7.0\0libcuda.so.1\0/opt/gone/libcuda.so.1\0libcuda.so.1\0/opt/driver/libcuda.so.1\0"
    (tmp_path / "etc/ld.so.cache").write_bytes(cache)
    touch(tmp_path / "opt/driver/libcuda.so.1")
    assert find_library(name, tmp_path) == "/opt/driver/libcuda.so.1"
    touch(tmp_path / "own/libcuda.so.1")
    assert find_library(name, tmp_path, ["", "/nowhere", "/own"]) == "/own/libcuda.so.1"


def test_cublas_is_found_in_a_wheel_and_in_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["", "/site"])
    for folder in ("site/nvidia/cu13/lib", "usr/lib64"):
        root = tmp_path / folder.replace("/", "-")
        touch(root / folder / "libcublas.so.13")
        assert not detect_machine(root).has_cublas  # its other half is missing
        touch(root / folder / "libcublasLt.so.13")
        assert detect_machine(root).has_cublas


@pytest.mark.parametrize("has_cuda", [True, False])
def test_torch_is_looked_at_without_importing_it(tmp_path, monkeypatch, has_cuda):
    touch(tmp_path / "torch/__init__.py", "raise RuntimeError('imported')")
    if has_cuda:
        touch(tmp_path / "torch/lib/libtorch_cuda.so")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    machine = detect_machine(tmp_path)
    assert (machine.has_torch, machine.torch_has_cuda) == (True, has_cuda)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"a/b": "max 100000"}, None),
        ({"a/b": "150000 100000"}, 2),
        ({"a/b": "max 100000", "a": "300000 100000"}, 3),
        ({"a/b": "400000 100000", "a": "100000 100000", ".": "max 100000"}, 1),
        ({"a/b": "1000 100000"}, 1),
        ({"a/b": "nonsense"}, None),
    ],
)
def test_least_quota_on_the_way_to_the_root_counts(tmp_path, limits, expected):
    touch(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    for group, text in limits.items():
        touch(tmp_path / "sys/fs/cgroup" / group / "cpu.max", text)
    assert quota_cores(tmp_path) == expected


def test_container_sees_its_limit_at_the_root(tmp_path):
    assert quota_cores(tmp_path) is None
    touch(tmp_path / "proc/self/cgroup", "0::/\n")
    touch(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000")
    assert quota_cores(tmp_path) == 2


def test_this_machine_can_be_described():
    machine = detect_machine()
    assert machine.num_cores >= 1
    assert machine.has_torch
