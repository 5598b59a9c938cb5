"""`convert` writes what safetensors and transformers read, or nothing at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from server.cli.convert import convert
from server.errors import StartupError
from server.weights import convert as conversion
from server.weights.checksum_file import CHECKSUM_FILE
from server.weights.folder import HubAccess
from server.weights.index import open_checkpoint
from server.weights.shard_index import read_json
from tests.tiny_models import TORCH_DTYPES, tiny_config, tiny_tensors, write_shards, write_tiny_model

DTYPES = ["float32", "bfloat16", "float16"]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_values_are_those_of_torch_in_every_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    monkeypatch.setattr(conversion, "PIECE_ELEMENTS", 1000)
    folder = write_tiny_model(tmp_path / "in", dtype=source, num_shards=2, with_tokenizer=True)
    convert(folder, tmp_path / "out", target)
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].to(TORCH_DTYPES[target])) for name in before)
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names | {CHECKSUM_FILE}
    checkpoint = open_checkpoint(str(tmp_path / "out"), "main", HubAccess(tmp_path, is_offline=True))
    assert checkpoint.facts.dtype == read_json(checkpoint.folder / "config.json")["dtype"] == target


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    convert(write_tiny_model(tmp_path / "in", num_shards=3), tmp_path / "out", "bfloat16")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_mixture_of_dtypes_becomes_one_and_integers_stay(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("qwen2", dtype="bfloat16"))
    tensors |= {"model.norm.weight": torch.full((64,), 1.25), "position_ids": torch.arange(5)}
    folder = write_tiny_model(tmp_path / "in", dtype="bfloat16")
    write_shards(folder, tensors)
    convert(folder, tmp_path / "out", "bfloat16")
    after = stored(tmp_path / "out")
    assert after["model.norm.weight"].dtype == torch.bfloat16
    assert torch.equal(after["position_ids"], torch.arange(5))
    open_checkpoint(str(tmp_path / "out"), "main", HubAccess(tmp_path, is_offline=True))


def test_a_value_too_large_is_refused_with_its_tensor_and_nothing_is_left(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in", dtype="bfloat16")
    tensors = tiny_tensors(tiny_config("qwen2", dtype="bfloat16"))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 70000.0
    write_shards(folder, tensors)
    with pytest.raises(
        StartupError, match=r"'model.layers.1.mlp.down_proj.weight': the value 70144 does not fit float16"
    ):
        convert(folder, tmp_path / "out", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in")
    with pytest.raises(StartupError, match="in: exists already"):
        convert(folder, folder, "bfloat16")


@pytest.mark.parametrize("dtype", ["fp8", "", "int8"])
def test_other_dtypes_are_refused_with_the_list(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(StartupError, match=f"dtype '{dtype}' is not supported; supported: float32, bfloat16, float16"):
        convert(tmp_path, tmp_path / "out", dtype)


def test_tensors_that_cannot_be_converted_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in")
    write_shards(folder, tiny_tensors(tiny_config()) | {"scale": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(StartupError, match="tensor 'scale': F32, BF16, F16, integers can be converted, F64 found"):
        convert(folder, tmp_path / "out", "bfloat16")


def test_a_broken_source_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in", num_shards=2)
    (folder / "model-00001-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(StartupError, match="Git LFS pointer"):
        convert(folder, tmp_path / "out", "bfloat16")
    assert not (tmp_path / "out").exists()


def test_an_unwritable_target_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot be written: Not a directory"):
        convert(folder, tmp_path / "file" / "out", "bfloat16")


def test_the_spelling_of_transformers_4_is_kept_and_code_and_pickles_stay_behind(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "pytorch_model.bin", "LICENSE", "README.md"):
        (folder / name).write_text("x")
    convert(folder, tmp_path / "out", "float16")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"torch_dtype": "float16"}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    kept = {"config.json", "generation_config.json", "LICENSE", "README.md"}
    assert names == kept | {"model.safetensors", CHECKSUM_FILE}
