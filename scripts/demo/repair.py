"""Fine-tunes the trained demo model against loops, on one GPU.

    python -m scripts.demo.repair --work-dir build/demo --out-dir build/demo --seconds 80

Reads `base.safetensors` of the out folder. Writes `final.safetensors` and `repair_curve.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.demo.model import Architecture, Qwen2
from scripts.demo.repetition import repeats, roll_out, unlikelihood_loss
from scripts.demo.train import new_optimizer, step
from scripts.demo.windows import Corpus, next_token_loss

PREFIX_LENGTHS = (3, 4, 5, 6, 8, 12)
NUM_NEW_TOKENS = 80
NUM_ANSWER_TOKENS = 60
PUNCTUATION = tuple(',.;:!?-"')


def word_starts(work_dir: Path, vocab_size: int) -> torch.Tensor:
    """True for tokens that begin a word or are punctuation; [vocab]."""
    vocab = json.loads((work_dir / "tokenizer.json").read_text())["model"]["vocab"]
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[i for token, i in vocab.items() if token.startswith(("Ġ", *PUNCTUATION))]] = True
    return mask


def load_model(weights: Path) -> Qwen2:
    model = Qwen2(Architecture())
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    model.load_state_dict(state)
    return model


def repair(model: Qwen2, corpus: Corpus, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Unlikelihood on rollouts plus language loss on text, linear decay to zero over the time.

    One large set of rollouts serves several steps: a rollout costs as long for 4096 as for 512.
    """
    device = corpus.train.device
    may_push = word_starts(args.work_dir, model.arch.vocab_size).to(device)
    optimizer = new_optimizer(model, args.peak_lr, weight_decay=0.0)
    rng = random.Random(0)
    begin, num_steps, num_rounds, progress = time.monotonic(), 0, 0, 0.0
    while progress < 1:
        prefix_length = rng.choice(PREFIX_LENGTHS)
        text = corpus.paragraphs(args.rollouts, prefix_length + NUM_NEW_TOKENS)
        with torch.autocast(device.type, torch.bfloat16):
            rollouts = roll_out(model, text[:, :prefix_length], NUM_NEW_TOKENS)
        for token_ids, chunk in zip(rollouts.split(args.chunk), text.split(args.chunk), strict=True):
            progress = min((time.monotonic() - begin) / args.seconds, 1.0)
            with torch.autocast(device.type, torch.bfloat16):
                unlikelihood = unlikelihood_loss(model, token_ids, NUM_NEW_TOKENS, may_push)
            language = next_token_loss(model, corpus.windows(args.batch, args.length + 1))
            num_steps += 1
            lr = args.peak_lr * min(1.0, num_steps / 20) * (1 - progress)
            step(model, optimizer, unlikelihood + language + next_token_loss(model, chunk), lr)
        num_rounds += 1
        if num_rounds % 5 == 1 or progress >= 1:
            prefix = corpus.heldout_paragraphs(args.chunk, 6)
            greedy = roll_out(model, prefix, NUM_ANSWER_TOKENS)[:, -NUM_ANSWER_TOKENS:]
            yield {
                "step": num_steps,
                "seconds": round(time.monotonic() - begin, 1),
                "unlikelihood_loss": round(float(unlikelihood.detach()), 4),
                "train_nats_per_token": round(float(language.detach()), 4),
                "share_of_greedy_answers_repeating": round(float(repeats(greedy, 8).any(1).float().mean()), 4),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--peak-lr", type=float, default=5e-4)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    model = load_model(args.out_dir / "base.safetensors").to(args.device)
    curve = []
    for record in repair(model, Corpus(args.work_dir, args.device), args):
        print(json.dumps(record), flush=True)
        curve.append(record)
    save_file(model.hf_state_dict(), args.out_dir / "final.safetensors", {"format": "pt"})
    (args.out_dir / "repair_curve.json").write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
