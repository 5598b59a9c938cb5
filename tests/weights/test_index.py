"""open_checkpoint takes what is whole and refuses the rest, naming file, tensor, expected and found."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest
import torch

from server.errors import StartupError
from server.weights.folder import HubAccess
from server.weights.index import Checkpoint, open_checkpoint
from server.weights.shard_index import read_json
from tests.tiny_models import FAMILIES, Family, tiny_config, tiny_tensors, write_shards, write_tiny_model

INDEX = "model.safetensors.index.json"
HUB = HubAccess(cache=Path("/nonexistent"), is_offline=True)


def check(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), "main", HUB)


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite_weights(folder: Path, change: dict[str, torch.Tensor | None], num_shards: int = 1) -> None:
    """Write the weights of `folder` again with some tensors replaced, added or (None) left out."""
    config = json.loads((folder / "config.json").read_text())
    merged = tiny_tensors(config) | change
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_shards(folder, {name: tensor for name, tensor in merged.items() if tensor is not None}, num_shards)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "num_shards"), [("float32", 1), ("bfloat16", 3), ("float16", 2)])
def test_every_family_is_accepted_in_every_dtype(tmp_path: Path, family: Family, dtype: str, num_shards: int) -> None:
    checkpoint = check(write_tiny_model(tmp_path, family, dtype=dtype, num_shards=num_shards))
    assert checkpoint.facts.dtype == dtype
    assert checkpoint.tensors.keys() == tiny_tensors(read_json(checkpoint.folder / "config.json")).keys()
    assert len(checkpoint.identities) == num_shards


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_biases_of_the_attention_are_expected_when_the_config_says_so(tmp_path: Path, family: Family) -> None:
    config = tiny_config(family) | {"attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_shards(tmp_path, tiny_tensors(config))
    assert "model.layers.1.self_attn.o_proj.bias" in check(tmp_path).tensors
    edit_json(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(StartupError, match=r"_proj\.bias' is found, but config.json \(.*do not belong together"):
        check(tmp_path)


def test_verification_writes_nothing_and_works_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", num_shards=3)
    for path in [*folder.iterdir(), folder]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    before = {path.name: path.stat().st_mtime_ns for path in [*folder.iterdir(), folder]}
    check(folder)
    assert {path.name: path.stat().st_mtime_ns for path in [*folder.iterdir(), folder]} == before
    folder.chmod(0o755)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StartupError, match=r"1 of 3 files that it names are missing: model-00002-of-00003.safetensors"):
        check(folder)


@pytest.mark.parametrize("extra", ["extra.safetensors", "model.safetensors"])
def test_a_missing_shard_is_named_though_another_file_makes_up_the_number(tmp_path: Path, extra: str) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").rename(folder / extra)
    with pytest.raises(StartupError, match=r"missing: model-00002-of-00003.safetensors"):
        check(folder)


def test_an_index_that_names_more_shards_than_exist_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    weight_map = {f"t{i}": f"model-{i:05}-of-00030.safetensors" for i in range(1, 31)}
    edit_json(folder / INDEX, weight_map=weight_map)
    with pytest.raises(StartupError, match=r"30 of 30 files .* and 25 more"):
        check(folder)


def test_an_index_that_maps_a_tensor_to_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    weight_map["model.norm.weight"] = "model-00001-of-00003.safetensors"
    edit_json(folder / INDEX, weight_map=weight_map)
    with pytest.raises(StartupError, match=r"is stale: 1 tensors should lie in model-00001.*: model.norm.weight"):
        check(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"weight_map": {"a": "b.safetensors"}} x', "is not valid: JSON is malformed: trailing"),
        ('{"weight_map": {"a": "b.safe', "is not valid"),
        ('{"weight_map": ["a"]}', r"is not valid: Expected `object`.*weight_map"),
        ("{}", "is not valid: Object missing required field `weight_map`"),
        ('{"weight_map": {}}', "0 of 0 files"),
        ('{"weight_map": {"a": "../other/b.safetensors"}}', "'a' lies in '../other/b.safetensors'"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', r"'a' lies in 'pytorch_model.bin'"),
        ('{"weight_map": {"a": 1}}', "is not valid"),
        ("", "is not valid"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, content: str, named: str) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / INDEX).write_text(content)
    with pytest.raises(StartupError, match=f"{INDEX}: .*{named}"):
        check(folder)


def test_extra_bytes_behind_the_end_of_a_good_index_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    with (folder / INDEX).open("a") as stream:
        stream.write("}\n")
    with pytest.raises(StartupError, match=f"{INDEX}: is not valid: JSON is malformed"):
        check(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    config = json.loads((folder / "config.json").read_text())
    tensors = tiny_tensors(config)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    second = {n: tensors[n] for n, file in names.items() if "00002" in file} | {
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]
    }
    write_shards(folder, second)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(StartupError, match=r"'model.embed_tokens.weight' is stored twice, in .*00001.* and in .*00002"):
        check(folder)


def test_two_sets_of_weights_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    write_tiny_model(folder, num_shards=1)
    with pytest.raises(StartupError, match=r"holds both model.safetensors and model.safetensors.index.json"):
        check(folder)


def test_an_embedding_of_another_vocabulary_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, config_changes={"vocab_size": 400})
    expected = r"model.safetensors: tensor 'model.embed_tokens.weight': shape \[400, 64\] expected.*\[320, 64\] found"
    with pytest.raises(StartupError, match=expected):
        check(folder)


def test_missing_tensors_are_named_with_the_shape_of_the_first(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    rewrite_weights(folder, {"model.layers.1.self_attn.k_proj.bias": None, "model.norm.weight": None})
    expected = r"2 of 27 tensors .*: model.layers.1.self_attn.k_proj.bias, model.norm.weight \(.*\[32\]\)"
    with pytest.raises(StartupError, match=expected):
        check(folder)


def test_more_layers_than_the_config_has_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(
        tmp_path, num_layers=3, config_changes={"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    )
    with pytest.raises(StartupError, match=r"'model\.layers\.2\..*' is found, but config.json \(Qwen2.*, 2 layers\)"):
        check(folder)


def test_unknown_tensors_and_files_are_warned_about_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path)
    stray = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_weights(folder, {stray: torch.zeros(8), "extra": torch.zeros(2, dtype=torch.int64)})
    (folder / "adapter.safetensors").write_bytes(b"anything")
    with caplog.at_level(logging.WARNING):
        checkpoint = check(folder)
    assert stray not in checkpoint.tensors
    assert "2 unknown tensors: extra, " + stray in caplog.text
    assert "not part of the checkpoint: adapter.safetensors" in caplog.text


def test_a_tied_model_needs_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "lm_head.weight" not in check(write_tiny_model(tmp_path, "qwen2.5-tied")).tensors
    assert not caplog.records


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_stored_beside_a_tied_embedding_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_equal: bool
) -> None:
    folder = write_tiny_model(tmp_path, "qwen2.5-tied")
    embedding = tiny_tensors(tiny_config("qwen2.5-tied"))["model.embed_tokens.weight"]
    rewrite_weights(folder, {"lm_head.weight": embedding.clone() if is_equal else embedding * 2})
    checkpoint = check(folder)
    assert checkpoint.facts.tied_head
    assert "lm_head.weight" not in checkpoint.tensors
    assert "'lm_head.weight' in model.safetensors is ignored" in caplog.text


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2.5-tied", config_changes={"tie_word_embeddings": False})
    with pytest.raises(StartupError, match=r"missing: lm_head.weight .*\[320, 64\].* not tied"):
        check(folder)


def test_a_mixture_of_dtypes_is_refused_with_advice(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, dtype="bfloat16")
    rewrite_weights(folder, {"model.norm.weight": torch.ones(64)})
    with pytest.raises(StartupError, match=r"'model.norm.weight': dtype BF16 .* F32 .*convert .* --dtype bfloat16"):
        check(folder)


def test_dtypes_that_are_not_served_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    rewrite_weights(folder, {"model.norm.weight": torch.ones(64, dtype=torch.float64)})
    with pytest.raises(StartupError, match=r"'model.norm.weight': dtype F32 or BF16 or F16 expected, F64 found"):
        check(folder)


def test_the_stored_dtype_is_served_whatever_the_config_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny_model(tmp_path, dtype="float32", config_changes={"dtype": "bfloat16"})
    assert check(folder).facts.dtype == "float32"
    assert "the weights are float32, config.json says bfloat16" in caplog.text


def test_pickles_are_refused_by_name_and_never_opened(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    (folder / "model.safetensors").unlink()
    torch.save(Evil(), folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"holds pytorch_model.bin but no model.safetensors.*a pickle can run code"):
        check(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"model.safetensors: is not a safetensors file but a zip archive"):
        check(folder)
    assert not marker.exists()


def test_code_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, config_changes={"auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    with pytest.raises(StartupError, match=r"config.json: auto_map is .*never run"):
        check(folder)


def test_shards_without_their_index_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=2)
    (folder / INDEX).unlink()
    with pytest.raises(StartupError, match=r"holds model-00001-of-00002.safetensors, .* but neither"):
        check(folder)


def test_a_folder_without_weights_or_config_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config.json: does not exist"):
        check(tmp_path)
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="holds no weights"):
        check(folder)


@pytest.mark.parametrize("content", ["", "{", '{"a": 1} x', "[1]", "\xff", '{"hidden_size": NaN}'])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(StartupError, match=r"config.json: is not valid"):
        check(folder)


def test_an_lfs_pointer_in_place_of_a_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    with pytest.raises(StartupError, match=r"model-00002-of-00003.safetensors: .* a Git LFS pointer"):
        check(folder)
