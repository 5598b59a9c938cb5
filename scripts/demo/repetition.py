"""Sequence-level unlikelihood training: the model unlearns to repeat what it has just written.

After Welleck et al. 2020 (arXiv:1908.04319). The model continues training prefixes greedily; where a
token of its own continuation completes an n-gram that stands there already, its probability is pushed
down. Only tokens that begin a word or are punctuation are pushed, so no word is broken in the middle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.demo.model import Qwen2

REPEATED_NGRAM = 5
HASH_BASE = 6_364_136_223_846_793_005  # odd, so that 64-bit wrap-around keeps the terms apart


def rolling_hashes(token_ids: Tensor, width: int) -> Tensor:
    """One 64-bit hash for each window of `width` ids; [batch, length] to [batch, length-width+1]."""
    num_windows = token_ids.shape[1] - width + 1
    hashes = torch.zeros_like(token_ids[:, :num_windows])
    for offset in range(width):
        hashes = hashes * HASH_BASE + token_ids[:, offset : offset + num_windows] + 1
    return hashes


def repeats(token_ids: Tensor, width: int) -> Tensor:
    """True where the n-gram that ends at a position occurred before; shape of `token_ids`."""
    hashes = rolling_hashes(token_ids, width)
    same = hashes.unsqueeze(2) == hashes.unsqueeze(1)
    return F.pad(same.tril(-1).any(-1), (width - 1, 0))


@torch.no_grad()
def roll_out(model: Qwen2, prefix: Tensor, num_new: int) -> Tensor:
    """Greedy continuations: [batch, length] to [batch, length + num_new]."""
    batch, length = prefix.shape
    device = prefix.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else torch.float32
    caches = model.new_caches(batch, length + num_new, dtype)
    token_ids, start = prefix, 0
    for _ in range(num_new):
        logits = model(token_ids[:, start:], caches, start)[:, -1]
        start = token_ids.shape[1]
        token_ids = torch.cat((token_ids, logits.argmax(-1, keepdim=True)), dim=1)
    return token_ids


def unlikelihood_loss(model: Qwen2, token_ids: Tensor, num_new: int, may_push: Tensor) -> Tensor:
    """-log(1 - p) of the repeating tokens among the last `num_new`; may_push is [vocab].

    The mean over them, or over half as many as there are continuations when they have become few.
    """
    is_repeat = repeats(token_ids, REPEATED_NGRAM)[:, -num_new:] & may_push[token_ids[:, -num_new:]]
    logits = model(token_ids[:, :-1])[:, -num_new:][is_repeat].float()
    log_p = logits.log_softmax(-1).gather(1, token_ids[:, -num_new:][is_repeat][:, None])
    losses = -torch.log((1 - log_p.exp()).clamp(min=1e-5))
    return losses.sum() / max(len(losses), len(token_ids) // 2)
