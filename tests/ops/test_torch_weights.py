"""weight_tensors shows the weight memory as torch tensors, without copy on a CPU."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from server.ops.torch.weights import weight_tensors
from server.weights.memory import HostStore, create_weight_memory, map_writable
from server.weights.shard_index import read_json
from tests.loaded_weights import load_on_host, open_folder
from tests.tiny_models import tiny_tensors, write_tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_equal_the_stored_ones(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2, dtype=dtype)
    checkpoint, layout = open_folder(folder)
    memory = load_on_host(checkpoint, layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = weight_tensors(memory, layout, torch.device("cpu"))
    assert not caught
    stored = tiny_tensors(read_json(checkpoint.folder / "config.json"))
    assert list(tensors) == [spec.name for spec in layout.tensors]
    for spec in layout.tensors:
        parts = [stored[s.source][s.source_row : s.source_row + s.num_rows] for s in spec.segments]
        assert torch.equal(tensors[spec.name], torch.cat(parts))
        assert tensors[spec.name].dtype == stored["model.norm.weight"].dtype
        assert not tensors[spec.name].requires_grad


def test_cpu_tensors_share_the_memory_and_outlive_descriptor_and_mapping(tmp_path: Path) -> None:
    _, layout = open_folder(write_tiny_model(tmp_path))
    fd = create_weight_memory(layout.total_bytes)
    memory = HostStore().map_read_only(fd, layout.total_bytes)
    tensors = weight_tensors(memory, layout, torch.device("cpu"))
    writable = memoryview(map_writable(fd)).cast("f")
    os.close(fd)
    memory.close()
    writable[layout["embed.weight"].offset // 4] = 7.5
    assert tensors["embed.weight"][0, 0] == 7.5
