"""Trains the demo model on one GPU: next tokens first, then against its own repetitions.

    python -m scripts.demo.train --work-dir build/demo --seconds 300 --repair-seconds 90

Reads the token files of scripts.demo.tokenizer. Writes `base.safetensors`, `final.safetensors` and
`curve.json`. The schedule follows the clock, so the run ends when it should on any GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from scripts.demo.model import Architecture, Qwen2
from scripts.demo.repetition import COPIED_SPAN, rolling_hashes, rollout, unlikelihood_loss

PREFIX_LENGTHS = (3, 4, 5, 6, 8, 12, 16, 32)
NUM_ROLLOUT_TOKENS = 96


def next_token_loss(model: Qwen2, token_ids: Tensor) -> Tensor:
    """Mean cross entropy in nats; token_ids is [batch, length + 1]."""
    with torch.autocast(token_ids.device.type, torch.bfloat16):
        logits = model(token_ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())


class Corpus:
    """Token ids on the device, and windows of them."""

    def __init__(self, work_dir: Path, device: str) -> None:
        self.train, self.heldout = (
            torch.from_numpy(np.load(work_dir / f"{name}.npy").astype(np.int64)).to(device)
            for name in ("train", "heldout")
        )
        documents = json.loads((work_dir / "heldout.json").read_text())
        self.heldout_bytes_per_token = sum(d["num_bytes"] for d in documents) / len(self.heldout)
        vocab = json.loads((work_dir / "tokenizer.json").read_text())["model"]["vocab"]
        breaks = [token_id for token, token_id in vocab.items() if token.endswith("ĊĊ")]
        is_break = torch.isin(self.train, torch.tensor(breaks, device=device))
        self.paragraph_starts = is_break[:-4096].nonzero().squeeze(1) + 1

    def windows(self, batch: int, length: int) -> Tensor:
        """Random windows, [batch, length]."""
        device = self.train.device
        starts = torch.randint(len(self.train) - length, (batch, 1), device=device)
        return self.train[starts + torch.arange(length, device=device)]

    def paragraphs(self, batch: int, length: int) -> Tensor:
        """Windows that begin where a paragraph begins, [batch, length]."""
        device = self.train.device
        picks = torch.randint(len(self.paragraph_starts), (batch, 1), device=device)
        return self.train[self.paragraph_starts[picks] + torch.arange(length, device=device)]

    @torch.no_grad()
    def heldout_bits_per_byte(self, model: Qwen2, length: int) -> float:
        """Over consecutive windows; the exact figure is scripts.demo.evaluate's."""
        num_windows = (len(self.heldout) - 1) // length
        starts = torch.arange(num_windows, device=self.train.device)[:, None] * length
        windows = self.heldout[starts + torch.arange(length + 1, device=self.train.device)]
        losses = [next_token_loss(model, chunk) * len(chunk) for chunk in windows.split(32)]
        nats = float(torch.stack(losses).sum() / num_windows)
        return nats / math.log(2) / self.heldout_bytes_per_token


def new_optimizer(model: Qwen2, lr: float) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def step(model: Qwen2, optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


Record = dict[str, float | str]


class Trainer:
    """Runs one phase after the other and keeps the loss curve."""

    def __init__(self, model: Qwen2, corpus: Corpus, args: argparse.Namespace) -> None:
        self.model, self.corpus, self.args = model, corpus, args
        self.curve: list[Record] = []
        self.loss: Callable[[Qwen2, Tensor], Tensor] = next_token_loss
        if not args.eager:
            self.loss = torch.compile(next_token_loss, dynamic=False)

    def language_loss(self) -> Tensor:
        return self.loss(self.model, self.corpus.windows(self.args.batch, self.args.length + 1))

    def record(self, phase: str, num_steps: int, seconds: float, **losses: float) -> None:
        bits = self.corpus.heldout_bits_per_byte(self.model, self.args.length)
        tokens = num_steps * self.args.batch * self.args.length
        entry: Record = {"phase": phase, "step": num_steps, "tokens": tokens, **losses}
        entry |= {"seconds": round(seconds, 1), "heldout_bits_per_byte": round(bits, 4)}
        self.curve.append(entry)
        print(json.dumps(entry), flush=True)

    def learn_language(self, seconds: float, peak_lr: float) -> None:
        """Cosine decay to zero over `seconds`, after 300 steps of warm-up."""
        optimizer = new_optimizer(self.model, peak_lr)
        step(self.model, optimizer, self.language_loss(), lr=0.0)  # compiles
        begin, num_steps, next_record = time.monotonic(), 0, 0.0
        while (progress := (time.monotonic() - begin) / seconds) < 1:
            lr = peak_lr * min(1, (num_steps + 1) / 300) * 0.5 * (1 + math.cos(math.pi * progress))
            loss = self.language_loss()
            step(self.model, optimizer, loss, lr)
            num_steps += 1
            if progress >= next_record:
                nats = round(float(loss.detach()), 4)
                self.record("language", num_steps, time.monotonic() - begin, train_nats=nats)
                next_record += 1 / 12
        nats = round(float(loss.detach()), 4)
        self.record("language", num_steps, time.monotonic() - begin, train_nats=nats)

    def unlearn_repetition(self, seconds: float, peak_lr: float) -> None:
        """Linear decay to zero over `seconds`; language loss and unlikelihood in each step."""
        optimizer = new_optimizer(self.model, peak_lr)
        known = rolling_hashes(self.corpus.train, COPIED_SPAN).sort().values
        rng = random.Random(0)
        begin, num_steps, next_record = time.monotonic(), 0, 0.0
        while (progress := (time.monotonic() - begin) / seconds) < 1:
            prefix_length = rng.choice(PREFIX_LENGTHS)
            length = prefix_length + NUM_ROLLOUT_TOKENS
            paragraphs = self.corpus.paragraphs(self.args.rollouts, length)
            tokens = rollout(self.model, paragraphs[:, :prefix_length], NUM_ROLLOUT_TOKENS)
            with torch.autocast(tokens.device.type, torch.bfloat16):
                unlikelihood = unlikelihood_loss(self.model, tokens, prefix_length, known)
            short = next_token_loss(self.model, paragraphs)
            loss = self.language_loss() + short + unlikelihood
            step(self.model, optimizer, loss, peak_lr * (1 - progress))
            num_steps += 1
            if progress >= next_record:
                nats = round(float(unlikelihood.detach()), 4)
                self.record("repetition", num_steps, time.monotonic() - begin, unlikelihood=nats)
                next_record += 1 / 6
        nats = round(float(unlikelihood.detach()), 4)
        self.record("repetition", num_steps, time.monotonic() - begin, unlikelihood=nats)

    def save(self, name: str) -> None:
        folder: Path = self.args.out_dir
        save_file(self.model.hf_state_dict(), folder / f"{name}.safetensors", {"format": "pt"})
        (folder / "curve.json").write_text(json.dumps(self.curve, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--repair-seconds", type=float, default=90)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--repair-lr", type=float, default=3e-4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--eager", action="store_true", help="do not compile (for a trial on a CPU)")
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Qwen2(Architecture()).to(args.device)
    trainer = Trainer(model, Corpus(args.work_dir, args.device), args)
    trainer.learn_language(args.seconds, args.peak_lr)
    trainer.save("base")
    trainer.unlearn_repetition(args.repair_seconds, args.repair_lr)
    trainer.save("final")


if __name__ == "__main__":
    main()
