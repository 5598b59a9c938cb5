"""load_tensors shows the weight memory as torch tensors, without copy on a CPU."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from server.ops.torch.weights import load_tensors
from server.weights.folder import HubAccess
from server.weights.index import open_checkpoint
from server.weights.layout import weight_layout
from server.weights.loader import run_loader
from server.weights.memory import create_weight_memory, map_writable
from server.weights.shard_index import read_json
from tests.tiny_models import tiny_tensors, write_tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_equal_the_stored_ones(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2, dtype=dtype)
    checkpoint = open_checkpoint(str(folder), "main", HubAccess(Path("/nonexistent"), is_offline=True))
    layout = weight_layout(checkpoint.facts)
    fd = create_weight_memory(layout.total_bytes)
    run_loader(checkpoint, layout, fd, 2, lambda _: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = load_tensors(fd, layout, torch.device("cpu"))
    assert not caught
    stored = tiny_tensors(read_json(checkpoint.folder / "config.json"))
    assert list(tensors) == [spec.name for spec in layout.tensors]
    for spec in layout.tensors:
        parts = [stored[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments]
        assert torch.equal(tensors[spec.name], torch.cat(parts))
        assert tensors[spec.name].dtype == stored["model.norm.weight"].dtype
        assert not tensors[spec.name].requires_grad


def test_cpu_tensors_share_the_memory_and_outlive_the_descriptor(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    checkpoint = open_checkpoint(str(folder), "main", HubAccess(Path("/nonexistent"), is_offline=True))
    layout = weight_layout(checkpoint.facts)
    fd = create_weight_memory(layout.total_bytes)
    tensors = load_tensors(fd, layout, torch.device("cpu"))
    writable = memoryview(map_writable(fd)).cast("f")
    os.close(fd)
    writable[layout["embed.weight"].offset // 4] = 7.5
    assert tensors["embed.weight"][0, 0] == 7.5
