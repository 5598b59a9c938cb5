"""The loader fills the memory with the right bytes, whoever calls it how often, or says which file failed where."""

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from server.errors import StartupError
from server.weights import loader
from server.weights.copy_plan import Copy, copy_plan, split
from server.weights.folder import HubAccess
from server.weights.index import Checkpoint, open_checkpoint
from server.weights.layout import WeightLayout, weight_layout
from server.weights.loader import MemorySink, default_num_threads, read_chunks, run_loader
from server.weights.memory import WeightViews, create_weight_memory
from server.weights.shard_index import read_json
from tests.tiny_models import FAMILIES, Family, tiny_tensors, write_tiny_model

HUB = HubAccess(cache=Path("/nonexistent"), is_offline=True)


def opened(folder: Path) -> tuple[Checkpoint, WeightLayout]:
    checkpoint = open_checkpoint(str(folder), "main", HUB)
    return checkpoint, weight_layout(checkpoint.facts)


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "num_shards", "num_threads"), [("float32", 1, 1), ("bfloat16", 3, 4), ("float16", 2, 0)]
)
def test_the_memory_holds_every_tensor_in_its_place(
    tmp_path: Path, family: Family, dtype: str, num_shards: int, num_threads: int
) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards))
    fd = create_weight_memory(layout.total_bytes)
    run_loader(checkpoint, layout, fd, num_threads, ignore)
    assert os.pread(fd, layout.total_bytes + 1, 0) == expected_bytes(checkpoint, layout)
    os.close(fd)


def test_chunks_of_any_size_and_short_reads_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_shards=2))
    whole_read = os.preadv

    def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return whole_read(fd, [buffers[0][:777]], offset)

    monkeypatch.setattr(os, "preadv", short_read)
    for chunk_bytes in (1000, 4096, 1 << 20):
        monkeypatch.setattr(loader, "CHUNK_BYTES", chunk_bytes)
        fd = create_weight_memory(layout.total_bytes)
        run_loader(checkpoint, layout, fd, 3, ignore)
        assert os.pread(fd, layout.total_bytes, 0) == expected_bytes(checkpoint, layout)
        os.close(fd)


def test_progress_rises_to_the_bytes_of_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_shards=2))
    monkeypatch.setattr(loader, "CHUNK_BYTES", 5000)
    seen: list[int] = []
    run_loader(checkpoint, layout, create_weight_memory(layout.total_bytes), 4, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == sum(spec.num_bytes for spec in layout.tensors)


def test_loading_again_after_a_failure_in_the_middle_completes_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path))
    monkeypatch.setattr(loader, "CHUNK_BYTES", 4096)
    fd = create_weight_memory(layout.total_bytes)

    def die_in_the_middle(num_bytes: int) -> None:
        if num_bytes > layout.total_bytes // 2:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        run_loader(checkpoint, layout, fd, 2, die_in_the_middle)
    assert os.pread(fd, layout.total_bytes, 0) != expected_bytes(checkpoint, layout)
    run_loader(checkpoint, layout, fd, 2, ignore)
    assert os.pread(fd, layout.total_bytes, 0) == expected_bytes(checkpoint, layout)


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
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_shards=2))
    change(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(StartupError, match=r"model-00002-of-00002.safetensors: was changed since it was verified"):
        run_loader(checkpoint, layout, create_weight_memory(layout.total_bytes), 2, ignore)


def test_a_file_rewritten_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path))
    calls: list[int] = []

    def rewrite_once(num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 1:
            rewrite(tmp_path / "model.safetensors")

    with pytest.raises(StartupError, match=r"model.safetensors: was changed since it was verified"):
        run_loader(checkpoint, layout, create_weight_memory(layout.total_bytes), 1, rewrite_once)


def test_a_file_truncated_while_it_is_loaded_is_refused_with_the_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path))
    monkeypatch.setattr(loader, "CHUNK_BYTES", 4096)

    def truncate_once(num_bytes: int) -> None:
        if num_bytes == 4096:
            os.truncate(tmp_path / "model.safetensors", 50_000)

    with pytest.raises(StartupError, match=r"model.safetensors: ends at byte \d+ now"):
        run_loader(checkpoint, layout, create_weight_memory(layout.total_bytes), 1, truncate_once)


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
    checkpoint, layout = opened(write_tiny_model(tmp_path))
    reads: list[int] = []

    def fail(_fd: int, _buffers: object, offset: int) -> int:
        reads.append(offset)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StartupError, match=named):
        run_loader(checkpoint, layout, create_weight_memory(layout.total_bytes), 4, ignore)
    assert 1 <= len(reads) <= 4


class StagingSink:
    """Reads into a ring of two buffers and brings each chunk to its place one chunk later, as a device copy would."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self._ring = [bytearray(4096), bytearray(4096)]
        self._pending: list[Copy] = []
        self._turn = 0

    def buffer(self, chunk: Copy) -> memoryview:
        return memoryview(self._ring[self._turn])[: chunk.num_bytes]

    def submit(self, chunk: Copy) -> None:
        self.finish()
        self._pending.append(chunk)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        for chunk in self._pending:
            source = self._ring[1 - self._turn]
            self._memory[chunk.dest_offset : chunk.dest_end] = source[: chunk.num_bytes]
        self._pending.clear()


def test_the_same_reader_fills_a_staged_destination(tmp_path: Path) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_shards=2))
    memory = bytearray(layout.total_bytes)
    chunks = split(copy_plan(layout, checkpoint), 4096)
    read_chunks(checkpoint.identities, chunks, lambda: StagingSink(memory), 3, ignore)
    assert bytes(memory) == expected_bytes(checkpoint, layout)


def test_copies_come_in_file_order_and_join_what_is_adjacent(tmp_path: Path) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_shards=3))
    copies = copy_plan(layout, checkpoint)
    assert [(c.file, c.file_offset) for c in copies] == sorted((c.file, c.file_offset) for c in copies)
    assert sum(c.num_bytes for c in copies) == sum(spec.num_bytes for spec in layout.tensors)
    assert not any(
        (a.file, a.file_end, a.dest_end) == (b.file, b.file_offset, b.dest_offset)
        for a, b in itertools.pairwise(copies)
    )


def test_a_tensor_that_is_interleaved_with_one_group_only_is_one_copy(tmp_path: Path) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, num_heads=4, num_kv_heads=1))
    sources = [segment.source.split(".")[-2] for segment in layout["layers.0.qkv.weight"].segments]
    assert sources == ["q_proj", "k_proj", "v_proj"]
    assert len(copy_plan(layout, checkpoint)) <= len(checkpoint.tensors)


def test_threads_follow_the_cores_that_may_be_used() -> None:
    assert default_num_threads() == min(8, len(os.sched_getaffinity(0)))


def test_a_memory_sink_gives_out_the_place_itself() -> None:
    memory = bytearray(64)
    sink = MemorySink(memoryview(memory))
    chunk = Copy(Path("x"), 0, 8, 16)
    sink.buffer(chunk)[:] = b"12345678"
    sink.submit(chunk)
    sink.finish()
    assert memory[16:24] == b"12345678"


def test_views_give_bytes_shape_and_dtype_by_name(tmp_path: Path) -> None:
    checkpoint, layout = opened(write_tiny_model(tmp_path, "qwen3", dtype="bfloat16"))
    fd = create_weight_memory(layout.total_bytes)
    run_loader(checkpoint, layout, fd, 2, ignore)
    views = WeightViews(fd, layout)
    os.close(fd)
    assert list(views) == [spec.name for spec in layout.tensors]
    norm = views["layers.1.q_norm.weight"]
    assert (norm.shape, norm.dtype, norm.data.readonly) == ((32,), "bfloat16", True)
    stored = tiny_tensors(read_json(checkpoint.folder / "config.json"))["model.layers.1.self_attn.q_norm.weight"]
    assert norm.data.tobytes() == stored.view(torch.uint8).numpy().tobytes()
