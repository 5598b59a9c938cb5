"""read_shard believes nothing: every header is checked, and what is not safetensors is called by its name."""

import json
import os
import pickle
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from server.errors import StartupError
from server.weights.shard import read_shard

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3945426872\n"


def write_file(file: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_offsets_point_at_the_bytes_of_each_tensor(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.arange(4, dtype=torch.bfloat16), "n": torch.tensor(7)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    shard = read_shard(tmp_path / "x.safetensors")
    data = shard.file.read_bytes()
    for name, tensor in tensors.items():
        found = shard.tensors[name]
        assert found.shape == tuple(tensor.shape)
        stored = data[found.offset : found.offset + found.num_bytes]
        assert stored == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert (shard.tensors["a"].dtype, shard.tensors["b"].dtype, shard.tensors["n"].dtype) == ("BF16", "F32", "I64")


@pytest.mark.parametrize("header_bytes", [0x280, 0x380, 0x4B50])
def test_a_header_length_that_looks_like_a_pickle_or_zip_is_no_fault(tmp_path: Path, header_bytes: int) -> None:
    text = json.dumps({"x": entry("F32", [1], 0, 4)}).encode().ljust(header_bytes)
    assert "x" in read_shard(write_file(tmp_path / "x.safetensors", text, b"1234")).tensors


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (LFS_POINTER, "a Git LFS pointer"),
        (pickle.dumps({"w": list(range(100))}, protocol=2), "a pickle, which can run code"),
        (pickle.dumps({"w": list(range(100))}, protocol=5), "a pickle"),
        (b"PK\x03\x04" + bytes(200), "a zip archive as torch.save"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"\n  <html><body>404</body></html>", "HTML"),
        (b'{"error":"Repository not found"}', "JSON text"),
        (b"GGUF\x03\0\0\0" + bytes(100), "GGUF"),
        (bytes(1000), "unfinished download"),
        (b"", "only 0 bytes long"),
        (b"\x10\0\0", "only 3 bytes long"),
        (b"\xff\xfe random words " * 4, "its first bytes are ff fe"),
    ],
)
def test_impostors_are_called_by_their_name(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=f"model-00002-of-00003.safetensors.*{named}"):
        read_shard(file)


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("BF16", [2, 2], 8, 16)}


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        (GOOD, bytes(15), "is truncated: .* bytes expected from its header, .* found"),
        (GOOD, bytes(17), "bytes behind its last tensor"),
        (GOOD | {"b": entry("BF16", [2, 2], 9, 17)}, bytes(17), "tensor 'b' leaves a hole"),
        (GOOD | {"b": entry("BF16", [2, 2], 4, 12)}, bytes(16), "tensor 'b' overlaps"),
        (GOOD | {"b": entry("BF16", [2, 3], 8, 16)}, bytes(16), r"'b': shape \[2, 3\] of BF16 needs 12 bytes.*8 to 16"),
        (GOOD | {"b": entry("BF16", [2, 2], 16, 8)}, bytes(16), "tensor 'b'.*16 to 8"),
        (GOOD | {"b": entry("BF16", [-2, -2], 8, 16)}, bytes(16), "tensor 'b' is malformed"),
        (GOOD | {"b": entry("BF16", [2.5], 8, 16)}, bytes(16), "tensor 'b' is malformed"),
        (GOOD | {"b": {"dtype": "BF16", "shape": [4]}}, bytes(16), "tensor 'b' is malformed.*data_offsets"),
        (GOOD | {"b": 5}, bytes(16), "tensor 'b' is malformed"),
        (GOOD | {"b": entry("BF16", [2**61, 2**61], 8, 16)}, bytes(16), "tensor 'b': shape"),
        (GOOD | {"__metadata__": {"format": 1}}, bytes(16), "not valid JSON"),
        (b'{"a": ', b"", "not valid JSON"),
        (b"{}x", b"", "not valid JSON.*trailing"),
        (b'{"\xff": 1}', b"", "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    ],
)
def test_a_broken_header_is_refused_with_expected_and_found(
    tmp_path: Path, header: object, data: bytes, named: str
) -> None:
    with pytest.raises(StartupError, match=f"x.safetensors: .*{named}"):
        read_shard(write_file(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_its_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="truncated inside its header: at least 99999008 bytes expected"):
        read_shard(write_file(tmp_path / "x.safetensors", GOOD, length=99_999_000))
    with pytest.raises(StartupError, match="not a safetensors file"):
        read_shard(write_file(tmp_path / "x.safetensors", GOOD, length=2**63))


def test_a_missing_file_a_dangling_link_and_a_loop_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(StartupError, match=r"x.safetensors: does not exist"):
        read_shard(file)
    file.symlink_to("../../blobs/4d7a")
    with pytest.raises(StartupError, match=r"x.safetensors: is a dangling link; its target ../../blobs/4d7a"):
        read_shard(file)
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(StartupError, match=r"x.safetensors: cannot be opened"):
        read_shard(file)


def test_a_pipe_or_folder_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StartupError, match=f"{name}.safetensors: is not a regular file"):
            read_shard(tmp_path / f"{name}.safetensors")


@pytest.fixture
def foreign_folder() -> Iterator[Path]:
    """A folder that another user may search, whatever pytest's own folders allow."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_a_file_without_read_permission_is_named(foreign_folder: Path) -> None:
    file = write_file(foreign_folder / "x.safetensors", GOOD, bytes(16))
    file.chmod(0)
    user_id = os.geteuid()
    if user_id == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(StartupError, match=r"x.safetensors: permission denied for user id"):
            read_shard(file)
    finally:
        os.seteuid(user_id)
    assert stat.S_IMODE(file.stat().st_mode) == 0


@given(content=st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_startup_error(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(content)
        with pytest.raises(StartupError):
            read_shard(file)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(header=st.dictionaries(st.text(max_size=5), json_values, min_size=1, max_size=3), num_bytes=st.integers(0, 20))
def test_no_header_raises_anything_but_a_startup_error(header: dict[str, object], num_bytes: int) -> None:
    with TemporaryDirectory() as folder, pytest.raises(StartupError):
        read_shard(write_file(Path(folder) / "x.safetensors", header, bytes(num_bytes + 1)))
