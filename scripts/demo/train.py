"""Trains the demo model on the next token, on one GPU.

    python -m scripts.demo.train --work-dir build/demo --out-dir build/demo --seconds 60

Reads the token files of scripts.demo.tokenizer. Writes `base.safetensors` and `base_curve.json`. The
schedule follows the clock, so the run ends when it should on any GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from scripts.demo.model import Architecture, Qwen2
from scripts.demo.windows import Corpus, next_token_loss

NUM_WARMUP_STEPS = 200
NUM_RECORDS = 8


def new_optimizer(model: Qwen2, lr: float, weight_decay: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def step(model: Qwen2, optimizer: torch.optim.Optimizer, loss: torch.Tensor, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(model: Qwen2, corpus: Corpus, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Cosine decay to zero over `args.seconds` after the first, compiling step; yields the curve."""
    optimizer = new_optimizer(model, args.peak_lr, args.weight_decay)
    step(model, optimizer, next_token_loss(model, corpus.windows(args.batch, args.length + 1)), 0.0)
    begin, num_steps, next_record = time.monotonic(), 0, 0.0
    while next_record <= 1:
        progress = min((time.monotonic() - begin) / args.seconds, 1.0)
        warmup = min(1, (num_steps + 1) / NUM_WARMUP_STEPS)
        lr = args.peak_lr * warmup * 0.5 * (1 + math.cos(math.pi * progress))
        loss = next_token_loss(model, corpus.windows(args.batch, args.length + 1))
        step(model, optimizer, loss, lr)
        num_steps += 1
        if progress >= next_record:
            bits = corpus.heldout_bits_per_byte(model, args.batch, args.length)
            yield {
                "step": num_steps,
                "tokens": num_steps * args.batch * args.length,
                "seconds": round(time.monotonic() - begin, 1),
                "train_nats_per_token": round(float(loss.detach()), 4),
                "heldout_bits_per_byte": round(bits, 4),
            }
            next_record += 1 / NUM_RECORDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="do not compile (for a trial on a CPU)")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Qwen2(Architecture()).to(args.device)
    if not args.eager:
        for layer in model.layers:  # one small graph, compiled once, serves all layers
            layer.compile(dynamic=False)
    curve = []
    for record in train(model, Corpus(args.work_dir, args.device), args):
        print(json.dumps(record), flush=True)
        curve.append(record)
    save_file(model.hf_state_dict(), args.out_dir / "base.safetensors", {"format": "pt"})
    (args.out_dir / "base_curve.json").write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
