"""Token windows of the demo corpus on a device, and the language loss over them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.demo.model import Qwen2


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
        self._breaks = torch.tensor(breaks, device=device)
        self._train_starts = self._paragraph_starts(self.train)
        self._heldout_starts = self._paragraph_starts(self.heldout)

    def _paragraph_starts(self, token_ids: Tensor) -> Tensor:
        is_break = torch.isin(token_ids[:-4096], self._breaks)
        return is_break.nonzero().squeeze(1) + 1

    def windows(self, batch: int, length: int) -> Tensor:
        """Random windows, [batch, length]."""
        device = self.train.device
        starts = torch.randint(len(self.train) - length, (batch, 1), device=device)
        return self.train[starts + torch.arange(length, device=device)]

    def paragraphs(self, batch: int, length: int) -> Tensor:
        """Windows that begin where a paragraph begins, [batch, length]."""
        device = self.train.device
        picks = torch.randint(len(self._train_starts), (batch, 1), device=device)
        return self.train[self._train_starts[picks] + torch.arange(length, device=device)]

    def heldout_paragraphs(self, batch: int, length: int) -> Tensor:
        """The same, of held-out text, evenly spread."""
        device = self.train.device
        picks = torch.linspace(0, len(self._heldout_starts) - 1, batch, device=device).long()
        return self.heldout[self._heldout_starts[picks][:, None] + torch.arange(length, device=device)]

    def heldout_bits_per_byte(self, model: Qwen2, batch: int, length: int) -> float:
        """Over consecutive windows; the exact figure is scripts.demo.evaluate's."""
        num_windows = (len(self.heldout) - 1) // length // batch * batch
        starts = torch.arange(num_windows, device=self.train.device)[:, None] * length
        windows = self.heldout[starts + torch.arange(length + 1, device=self.train.device)]
        # NOTE: with gradients and in full batches, or the compiled layers are compiled again.
        losses = [next_token_loss(model, chunk).detach() for chunk in windows.split(batch)]
        nats = float(torch.stack(losses).mean())
        return nats / math.log(2) / self.heldout_bytes_per_token
