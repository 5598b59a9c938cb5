"""The checksum is what its definition says, however a tensor is cut; converters write it, the loader compares it."""

import itertools
import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.cli.make_model import make_model
from server.errors import StartupError
from server.weights import checksum
from server.weights.checksum import partial_sum
from server.weights.checksum_file import CHECKSUM_FILE, format_sum, read_checksums
from server.weights.convert import convert_checkpoint
from server.weights.fill import complete_load
from server.weights.memory import HostStore
from server.weights.plan import LoadPlan
from server.weights.spans import source_names, source_spans
from tests.loaded_weights import load_on_host, new_record, open_folder
from tests.tiny_models import FAMILIES, Family, write_tiny_model


def by_definition(data: bytes) -> int:
    """The definition in plain integers."""
    data += bytes(-len(data) % 4)
    total = 0
    for index in range(len(data) // 4):
        word = int.from_bytes(data[4 * index : 4 * index + 4], "little")
        mixed = index * 3935559000370003845 % 2**64
        mixed ^= mixed >> 32
        total += word * (mixed * 6364136223846793005 % 2**64 | 1)
    return total % 2**64


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
@settings(deadline=None)
def test_pieces_of_any_size_add_up_to_the_definition(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [(data[begin:end], begin) for begin, end in itertools.pairwise(borders)]
    assert sum(partial_sum(piece, begin) for piece, begin in pieces) % 2**64 == by_definition(data)


def test_blocks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Random(1).randbytes(10_000)
    monkeypatch.setattr(checksum, "_BLOCK_WORDS", 128)
    assert partial_sum(data, 0) == by_definition(data)


def test_a_sum_far_into_a_tensor_needs_no_smaller_numbers() -> None:
    first_byte = 40_000_000_000
    alone = partial_sum(b"\1\0\0\0", first_byte)
    assert alone != partial_sum(b"\1\0\0\0", first_byte + 4)
    assert alone % 2 == 1, "weights are odd"


@given(data=st.binary(min_size=4, max_size=64), change=st.integers(1, 255), place=st.integers(0, 63))
def test_a_changed_byte_is_found_for_certain(data: bytes, change: int, place: int) -> None:
    place %= len(data)
    changed = bytearray(data)
    changed[place] ^= change
    assert partial_sum(data, 0) != partial_sum(changed, 0)


def test_words_that_changed_places_are_found() -> None:
    data = bytearray(Random(2).randbytes(4096))
    expected = partial_sum(data, 0)
    for first, second in ((0, 4), (8, 2048), (100, 4092)):
        swapped = bytearray(data)
        swapped[first : first + 4], swapped[second : second + 4] = data[second : second + 4], data[first : first + 4]
        assert partial_sum(swapped, 0) != expected


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    """Every needed tensor as it lies in its file."""
    checkpoint, _ = open_folder(folder)
    return {
        name: tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
        for name, tensor in checkpoint.tensors.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sums_of_a_loaded_memory_are_those_of_the_files(tmp_path: Path, family: Family) -> None:
    # head_dim 2 and one row of 33 halves: pieces begin anywhere.
    folder = write_tiny_model(tmp_path, family, dtype="bfloat16", hidden_size=33, num_heads=2, head_dim=2)
    checkpoint, layout = open_folder(folder)
    sums = load_on_host(checkpoint, layout).sums(source_spans(layout), len(source_names(layout)))
    assert dict(zip(source_names(layout), sums, strict=True)) == {
        name: by_definition(data) for name, data in tensor_bytes(folder).items()
    }


def recomputed(folder: Path) -> dict[str, str]:
    return {name: format_sum(partial_sum(data, 0)) for name, data in tensor_bytes(folder).items()}


def test_made_and_converted_checkpoints_bring_their_sums(tmp_path: Path) -> None:
    made, converted = tmp_path / "made", tmp_path / "converted"
    make_model("tiny-qwen3", made, seed=1, dtype="bfloat16")
    convert_checkpoint(made, converted, "float32")
    for folder in (made, converted):
        stored = json.loads((folder / CHECKSUM_FILE).read_text())
        assert (stored["version"], stored["algorithm"]) == (1, "weighted-words-64")
        assert stored["tensors"] == recomputed(folder)
        checkpoint, layout = open_folder(folder)
        load_on_host(checkpoint, layout)  # compares
    assert recomputed(made) != recomputed(converted)


@pytest.fixture
def summed(tmp_path: Path) -> Path:
    """A checkpoint with right sums."""
    folder = write_tiny_model(tmp_path, num_shards=2)
    content = {"version": 1, "algorithm": "weighted-words-64", "tensors": recomputed(folder)}
    (folder / CHECKSUM_FILE).write_text(json.dumps(content))
    return folder


def test_a_damaged_file_is_refused_by_tensor_with_both_sums(summed: Path) -> None:
    checkpoint, layout = open_folder(summed)
    tensor = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset + 100)
        file.write(b"\x55\xaa")
    checkpoint, layout = open_folder(summed)
    plan = LoadPlan.make(checkpoint, layout)
    record = new_record(plan)
    stored, found = json.loads((summed / CHECKSUM_FILE).read_text())["tensors"], recomputed(summed)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(StartupError, match=rf"{tensor.file}: tensor '{name}'") as failure:
        complete_load(plan, HostStore().private_memory(layout.total_bytes), record, lambda _: None)
    assert stored[name] in str(failure.value)
    assert found[name] in str(failure.value)
    assert not record.is_complete


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not valid"),
        ('{"version": 1}', "is not valid"),
        ('{"version": 2, "algorithm": "weighted-words-64", "tensors": {}}', "version 2"),
        ('{"version": 1, "algorithm": "crc", "tensors": {}}', "'crc' found"),
        ('{"version": 1, "algorithm": "weighted-words-64", "tensors": {}}', "no sum for tensor 'a'"),
        ('{"version": 1, "algorithm": "weighted-words-64", "tensors": {"a": "12"}}', "16 hexadecimal digits"),
        ('{"version": 1, "algorithm": "weighted-words-64", "tensors": {"a": "zzzzzzzzzzzzzzzz"}}', "16 hexadecimal"),
    ],
)
def test_a_broken_list_of_sums_is_refused_by_name(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / CHECKSUM_FILE).write_text(content)
    with pytest.raises(StartupError, match=complaint) as failure:
        read_checksums(tmp_path, ["a"])
    assert CHECKSUM_FILE in str(failure.value)


def test_without_a_list_nothing_is_expected(tmp_path: Path) -> None:
    assert read_checksums(tmp_path, ["a"]) is None


def test_a_list_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    """A hub cache whose download was cut off: served without a word, it would not be verified."""
    (tmp_path / CHECKSUM_FILE).symlink_to(tmp_path / "blobs" / "missing")
    with pytest.raises(StartupError, match=CHECKSUM_FILE):
        read_checksums(tmp_path, ["a"])
