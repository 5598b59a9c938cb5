"""Trains the demo model's byte-level BPE on the corpus and encodes both splits.

    python -m scripts.demo.tokenizer --work-dir build/demo

Writes `tokenizer.json`, `train.npy` and `heldout.npy` (uint16 token ids, documents ended by
<|endoftext|>) and `heldout.json` (where each held-out document ends, and its bytes).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scripts.demo.dialogues import dialogues

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's own pattern: words with one leading space, single digits, runs of symbols, line ends.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def new_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_documents(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A BPE of VOCAB_SIZE entries, the special tokens last."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    end_id = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    return [[*encoding.ids, end_id] for encoding in tokenizer.encode_batch(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir
    train, heldout = (read_documents(work_dir / f"{name}.jsonl") for name in ("train", "heldout"))

    tokenizer = train_tokenizer(document["text"] for document in train)
    tokenizer.save(str(work_dir / "tokenizer.json"))

    rng = random.Random(0)
    texts = [document["text"] for document in train]
    for document in train:
        texts.extend(dialogues(document["source"], document["text"], rng))
    rng.shuffle(texts)  # neighbours in one training window come from different sources
    train_ids = np.concatenate([np.array(ids, np.uint16) for ids in encode(tokenizer, texts)])
    np.save(work_dir / "train.npy", train_ids)

    encoded = encode(tokenizer, [document["text"] for document in heldout])
    np.save(work_dir / "heldout.npy", np.concatenate([np.array(ids, np.uint16) for ids in encoded]))
    documents = [
        {"source": d["source"], "num_tokens": len(ids), "num_bytes": len(d["text"].encode())}
        for d, ids in zip(heldout, encoded, strict=True)
    ]
    (work_dir / "heldout.json").write_text(json.dumps(documents))
    num_bytes = sum(len(text.encode()) for text in texts)
    print(f"{len(train_ids):,} training tokens, {num_bytes / len(train_ids):.2f} bytes a token")


if __name__ == "__main__":
    main()
