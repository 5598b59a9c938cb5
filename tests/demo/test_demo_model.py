"""What the committed demo model must keep: its size, its layout, and answers that can be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from scripts.demo import measures

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/demo"
DATA = ROOT / "tests/data"
NUM_NEW_TOKENS = 60


def read_json(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((MODEL / name).read_text())
    return content


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, str, list[int]]]:
    """(prompt, prompt and answer, answer ids) of greedy decoding in float32."""
    model = Qwen2ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    answers = []
    for prompt in (DATA / "demo_prompts.txt").read_text().splitlines():
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        token_ids = output[0].tolist()
        new_ids = token_ids[inputs.input_ids.shape[1] :]
        answers.append((prompt, tokenizer.decode(token_ids, skip_special_tokens=True), new_ids))
    return answers


def test_the_folder_stays_under_thirty_million_bytes() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 30_000_000


def test_the_configuration_is_a_qwen2_with_heads_of_64() -> None:
    config = read_json("config.json")
    assert config["model_type"] == "qwen2"
    assert config["head_dim"] == 64
    assert config["tie_word_embeddings"] is True


def test_the_weights_are_stored_in_float32() -> None:
    with (MODEL / "model.safetensors").open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"F32"}
    assert "lm_head.weight" not in header


def test_the_tokenizer_brings_a_chat_template_and_an_end_of_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id in read_json("generation_config.json")["eos_token_id"]


def test_text_survives_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = 'The sea, "naïve" and 1234 -- \n\nжи 海 🙂.'
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_nineteen_words_of_twenty_are_in_the_word_list(
    answers: list[tuple[str, str, list[int]]],
) -> None:
    word_list = measures.load_word_list(DATA / "american-english.gz")
    words = [
        word
        for prompt, text, ids in answers
        for word in measures.answer_words(prompt, text, is_cut=len(ids) == NUM_NEW_TOKENS)
    ]
    unlisted = [word for word in words if not measures.is_listed(word, word_list)]
    assert len(words) > 15 * len(answers)
    assert len(unlisted) <= 0.05 * len(words), unlisted


def test_no_answer_repeats_eight_tokens(answers: list[tuple[str, str, list[int]]]) -> None:
    assert [text for _, text, ids in answers if measures.has_repeat(ids, 8)] == []
