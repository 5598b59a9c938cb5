"""`make-model` writes checkpoints of known shapes that transformers and the server load, the same for the same seed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.cli import make_model as command
from server.cli.byte_tokenizer import write_byte_tokenizer
from server.cli.main import SHAPE_NAMES
from server.cli.make_model import SHAPES, make_model
from server.errors import StartupError
from server.models.facts import facts_from_config
from server.weights.folder import HubAccess
from server.weights.index import open_checkpoint
from server.weights.layout import weight_layout
from tests.tiny_models import write_tiny_model

TINY = [shape for shape in SHAPES if shape.startswith("tiny-")]


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_model_of_each_family_loads_and_gives_sensible_logits(tmp_path: Path, shape: str, dtype: str) -> None:
    make_model(shape, tmp_path / "model", seed=1, dtype=dtype)
    checkpoint = open_checkpoint(str(tmp_path / "model"), "main", HubAccess(tmp_path, is_offline=True))
    assert checkpoint.facts.dtype == dtype
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    logits = model(torch.tensor([[1, 2, 3, 4]])).logits.float()
    assert 0.1 < logits.std() < 3


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_model("tiny-qwen3", tmp_path / name, seed=seed, dtype="bfloat16")
    first, second, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != other


def test_weights_are_normal_with_a_deviation_of_a_fiftieth_and_norms_are_one(tmp_path: Path) -> None:
    make_model("tiny-llama3", tmp_path / "model", seed=0, dtype="float32")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    weights = torch.cat([tensor.flatten() for name, tensor in tensors.items() if not name.endswith("norm.weight")])
    assert weights.mean().abs() < 1e-4
    assert (weights.std() - 0.02).abs() < 1e-4
    assert ((weights.abs() < 0.02).float().mean() - 0.6827).abs() < 1e-3
    assert all((tensor == 1).all() for name, tensor in tensors.items() if name.endswith("norm.weight"))
    first, second = (tensors[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


def test_published_shapes_have_their_published_sizes() -> None:
    num_bytes = {
        shape: weight_layout(facts_from_config(config | {"dtype": "bfloat16"})).total_bytes
        for shape, config in SHAPES.items()
    }
    billions = {shape: round(size / 2e9, 2) for shape, size in num_bytes.items() if shape not in TINY}
    expected = {"qwen2-0.5b": 0.49, "qwen2-1.5b": 1.54, "qwen2-7b": 7.62, "qwen3-8b": 8.19, "llama3-8b": 8.03}
    assert billions == expected
    assert num_bytes["qwen2-7b"] == 15_231_233_024


def test_large_models_are_split_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_SHARD_BYTES", 1_500_000)
    make_model("tiny-qwen2", tmp_path / "model", seed=0, dtype="bfloat16")
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-00004.safetensors" for i in range(4)]
    open_checkpoint(str(tmp_path / "model"), "main", HubAccess(tmp_path, is_offline=True))


def test_the_byte_tokenizer_reads_every_text_and_ends_with_its_marker(tmp_path: Path) -> None:
    make_model("tiny-qwen2", tmp_path / "model", seed=0, dtype="bfloat16")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    text = "Ünïcode: 客单价 👩‍👩‍👧 \x00\n\t ok"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a<|im_end|>").ids == [97, 258]
    assert tokenizer.get_vocab_size() == 259
    reference = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert reference.encode(text) == list(text.encode())
    rendered = reference.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["eos_token_id"] == [258, 256]


def test_a_byte_tokenizer_needs_room_for_its_markers(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="vocab_size 258 is too small"):
        write_byte_tokenizer(tmp_path, 258)


def test_a_given_tokenizer_is_copied_with_its_end_markers(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", with_tokenizer=True)
    make_model("tiny-qwen2", tmp_path / "model", seed=0, dtype="bfloat16", tokenizer=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    end_ids = sorted(tokenizer.token_to_id(marker) for marker in ("<|im_end|>", "<|endoftext|>"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == end_ids


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    vocab = {"model": {"vocab": {"a": 600}}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(StartupError, match=r"tokenizer.json: the largest id is 600; the model has 512 ids"):
        make_model("tiny-qwen2", tmp_path / "model", seed=0, dtype="bfloat16", tokenizer=source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer.json is missing"):
        make_model("tiny-qwen2", tmp_path / "model", seed=0, dtype="bfloat16", tokenizer=source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_unknown_shapes_dtypes_and_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"shape 'gpt2' is unknown; known: qwen2-0.5b"):
        make_model("gpt2", tmp_path / "model", seed=0, dtype="bfloat16")
    with pytest.raises(StartupError, match="dtype 'int4' is not supported"):
        make_model("qwen2-7b", tmp_path / "model", seed=0, dtype="int4")
    with pytest.raises(StartupError, match="seed -1 is negative"):
        make_model("qwen2-7b", tmp_path / "model", seed=-1, dtype="bfloat16")
    with pytest.raises(StartupError, match="exists already"):
        make_model("tiny-qwen2", tmp_path, seed=0, dtype="bfloat16")


def test_help_names_every_shape():
    assert SHAPE_NAMES.split(", ") == list(SHAPES)
