"""The loader fills the memory with the right bytes, whoever calls it how often, or says which file failed where."""

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from server.errors import StartupError
from server.weights.copy_plan import Copy, copy_plan
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.loader import load_missing
from server.weights.memory import HostMemory, HostSink, HostStore, WeightViews, default_num_threads
from server.weights.plan import CHUNK_BYTES, LoadPlan
from server.weights.shard_index import read_json
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.tiny_models import FAMILIES, Family, tiny_tensors, write_tiny_model


def expected_bytes(checkpoint: Checkpoint, layout: WeightLayout) -> bytes:
    """What the memory must hold, put together from whole tensors."""
    tensors = tiny_tensors(read_json(checkpoint.folder / "config.json"))
    memory = bytearray(layout.total_bytes)
    for spec in layout.tensors:
        parts = [tensors[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments]
        data = torch.cat(parts).reshape(-1).view(torch.uint8).numpy().tobytes()
        memory[spec.offset : spec.offset + len(data)] = data
    return bytes(memory)


def ignore(_: int) -> None:
    """Progress that nobody looks at."""


class Loading:
    """One checkpoint on its way into host memory."""

    def __init__(self, folder: Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.checkpoint, self.layout = open_folder(folder)
        self.plan = LoadPlan.make(self.checkpoint, self.layout, chunk_bytes)
        self.record = new_record(self.plan)
        self.memory: HostMemory = HostStore().private_memory(self.layout.total_bytes)

    def load(self, on_progress: Callable[[int], None] = ignore, num_threads: int = 2) -> None:
        load_missing(self.plan, self.memory, self.record, on_progress, num_threads)

    @property
    def is_right(self) -> bool:
        return self.memory.view == expected_bytes(self.checkpoint, self.layout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "num_shards", "num_threads"), [("float32", 1, 1), ("bfloat16", 3, 4), ("float16", 2, 0)]
)
def test_the_memory_holds_every_tensor_in_its_place(
    tmp_path: Path, family: Family, dtype: str, num_shards: int, num_threads: int
) -> None:
    loading = Loading(write_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards))
    loading.load(num_threads=num_threads)
    assert loading.is_right
    assert loading.record.missing() == []


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20])
def test_chunks_of_any_size_and_short_reads_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    loading = Loading(write_tiny_model(tmp_path, num_shards=2), chunk_bytes)
    whole_read = os.preadv

    def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole_read(fd, [buffers[0][:777]], offset)

    monkeypatch.setattr(os, "preadv", short_read)
    loading.load(num_threads=3)
    assert loading.is_right


def test_progress_rises_to_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    loading = Loading(write_tiny_model(tmp_path, num_shards=2), 5000)
    seen: list[int] = []
    loading.load(seen.append, num_threads=4)
    assert seen == sorted(seen)
    assert seen[-1] == loading.plan.num_bytes == sum(spec.num_bytes for spec in loading.layout.tensors)


def test_the_next_one_loads_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(write_tiny_model(tmp_path), 4096)

    def die_in_the_middle(num_bytes: int) -> None:
        if num_bytes > loading.layout.total_bytes // 2:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        loading.load(die_in_the_middle)
    missing = [loading.plan.chunks[number] for number in loading.record.missing()]
    assert 0 < len(missing) < len(loading.plan.chunks)
    reads: list[int] = []
    whole_read = os.preadv

    def note_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return whole_read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", note_read)
    seen: list[int] = []
    loading.load(seen.append)
    assert sorted(reads) == sorted(chunk.file_offset for chunk in missing)
    assert seen[0] > loading.layout.total_bytes // 2
    assert seen[-1] == loading.plan.num_bytes
    assert loading.is_right


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def replace(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def rewrite(file: Path) -> None:
    content = file.read_bytes()
    modified_ns = file.stat().st_mtime_ns
    file.write_bytes(content)
    os.utime(file, ns=(modified_ns + 1, modified_ns + 1))  # a clock tick is coarser than this test


@pytest.mark.parametrize("change", [truncate, replace, rewrite])
def test_a_file_changed_after_its_verification_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    loading = Loading(write_tiny_model(tmp_path, num_shards=2))
    change(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(StartupError, match=r"model-00002-of-00002.safetensors: was changed since it was verified"):
        loading.load()


def test_a_file_that_has_vanished_is_named(tmp_path: Path) -> None:
    loading = Loading(write_tiny_model(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model.safetensors: does not exist"):
        loading.load()


def test_a_file_rewritten_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    loading = Loading(write_tiny_model(tmp_path), 4096)
    calls: list[int] = []

    def rewrite_once(num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 1:
            rewrite(tmp_path / "model.safetensors")

    with pytest.raises(StartupError, match=r"model.safetensors: was changed since it was verified"):
        loading.load(rewrite_once, num_threads=1)


def test_a_file_truncated_while_it_is_loaded_is_refused_with_the_offset(tmp_path: Path) -> None:
    loading = Loading(write_tiny_model(tmp_path), 4096)

    def truncate_once(num_bytes: int) -> None:
        if num_bytes == 4096:
            os.truncate(tmp_path / "model.safetensors", 50_000)

    with pytest.raises(StartupError, match=r"model.safetensors: ends at byte \d+ now"):
        loading.load(truncate_once, num_threads=1)


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (errno.EIO, r"model.safetensors: cannot be read at byte \d+: Input/output error"),
        (errno.EFAULT, r"no memory is left for the weights"),
    ],
)
def test_a_failing_read_stops_all_threads_and_names_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, named: str
) -> None:
    loading = Loading(write_tiny_model(tmp_path), 4096)
    reads: list[int] = []

    def fail(_fd: int, _buffers: object, offset: int) -> int:
        reads.append(offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StartupError, match=named):
        loading.load(num_threads=4)
    assert 1 <= len(reads) <= 4
    assert len(loading.record.missing()) == len(loading.plan.chunks)


def test_copies_come_in_file_order_and_join_what_is_adjacent(tmp_path: Path) -> None:
    checkpoint, layout = open_folder(write_tiny_model(tmp_path, num_shards=3))
    copies = copy_plan(layout, checkpoint)
    assert [(c.file, c.file_offset) for c in copies] == sorted((c.file, c.file_offset) for c in copies)
    assert sum(c.num_bytes for c in copies) == sum(spec.num_bytes for spec in layout.tensors)
    assert not any(
        (a.file, a.file_end, a.dest_end) == (b.file, b.file_offset, b.dest_offset)
        for a, b in itertools.pairwise(copies)
    )


def test_a_tensor_that_is_interleaved_with_one_group_only_is_one_copy(tmp_path: Path) -> None:
    checkpoint, layout = open_folder(write_tiny_model(tmp_path, num_heads=4, num_kv_heads=1))
    sources = [segment.source.split(".")[-2] for segment in layout["layers.0.qkv.weight"].segments]
    assert sources == ["q_proj", "k_proj", "v_proj"]
    assert len(copy_plan(layout, checkpoint)) <= len(checkpoint.tensors)


def test_threads_follow_the_cores_that_may_be_used() -> None:
    assert default_num_threads() == min(8, len(os.sched_getaffinity(0)))


def test_a_host_sink_gives_out_the_place_itself() -> None:
    memory = bytearray(64)
    arrived: list[tuple[int, Copy]] = []
    sink = HostSink(memoryview(memory), lambda number, chunk: arrived.append((number, chunk)))
    chunk = Copy(Path("x"), 0, 8, 16)
    sink.buffer(chunk)[:] = b"12345678"
    assert not arrived
    sink.submit(5, chunk)
    sink.finish()
    sink.close()
    assert memory[16:24] == b"12345678"
    assert arrived == [(5, chunk)]


def test_views_give_bytes_shape_and_dtype_by_name(tmp_path: Path) -> None:
    checkpoint, layout = open_folder(write_tiny_model(tmp_path, "qwen3", dtype="bfloat16"))
    memory = load_on_host(checkpoint, layout)
    views = WeightViews(memory, layout)
    assert list(views) == [spec.name for spec in layout.tensors]
    norm = views["layers.1.q_norm.weight"]
    assert (norm.shape, norm.dtype) == ((32,), "bfloat16")
    stored = tiny_tensors(read_json(checkpoint.folder / "config.json"))["model.layers.1.self_attn.q_norm.weight"]
    assert norm.data.tobytes() == stored.view(torch.uint8).numpy().tobytes()
