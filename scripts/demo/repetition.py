"""Fine-tuning against loops: unlikelihood of what the model itself repeats or copies.

Sequence-level unlikelihood training (Welleck et al. 2020, arXiv:1908.04319): the model continues a
training prefix greedily; wherever its own continuation repeats an n-gram, or has become a long
verbatim span of the training text, the probability of that token is pushed down.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.demo.model import Qwen2

REPEATED_NGRAM = 5
COPIED_SPAN = 22
HASH_BASE = 6_364_136_223_846_793_005  # odd, so that 64-bit wrap-around keeps the terms apart


def rolling_hashes(token_ids: Tensor, width: int) -> Tensor:
    """One 64-bit hash for each window of `width` ids; [..., length] to [..., length-width+1]."""
    num_windows = token_ids.shape[-1] - width + 1
    hashes = torch.zeros_like(token_ids[..., :num_windows])
    for offset in range(width):
        hashes = hashes * HASH_BASE + token_ids[..., offset : offset + num_windows] + 1
    return hashes


@torch.no_grad()
def rollout(model: Qwen2, prefix: Tensor, num_new: int) -> Tensor:
    """Greedy continuations: [batch, length] to [batch, length + num_new]."""
    batch, length = prefix.shape
    caches = model.new_caches(batch, length + num_new, torch.bfloat16)
    tokens, start = prefix, 0
    for _ in range(num_new):
        # Cached casts would keep the weights of a captured graph.
        with torch.autocast(prefix.device.type, torch.bfloat16, cache_enabled=False):
            logits = model(tokens[:, start:], caches, start)[:, -1]
        start = tokens.shape[1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


def repeats(tokens: Tensor, width: int = REPEATED_NGRAM) -> Tensor:
    """True where the n-gram that ends at a position occurred before; shape of `tokens`."""
    hashes = rolling_hashes(tokens, width)
    same = hashes.unsqueeze(2) == hashes.unsqueeze(1)
    return F.pad(same.tril(-1).any(-1), (width - 1, 0))


def copies(tokens: Tensor, known: Tensor, width: int = COPIED_SPAN) -> Tensor:
    """True where the last `width` ids are a span of the training text; `known` is sorted."""
    hashes = rolling_hashes(tokens, width)
    index = torch.searchsorted(known, hashes).clamp(max=len(known) - 1)
    return F.pad(known[index] == hashes, (width - 1, 0))


def unlikelihood_loss(model: Qwen2, tokens: Tensor, prefix_length: int, known: Tensor) -> Tensor:
    """Mean of -log(1 - p) over the repeated or copied tokens of the continuations."""
    penalised = repeats(tokens) | copies(tokens, known)
    penalised[:, :prefix_length] = False
    logits = model(tokens[:, :-1]).float()
    log_p = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    losses = -torch.log((1 - log_p.exp()).clamp(min=1e-5)) * penalised[:, 1:]
    return losses.sum() / penalised.sum().clamp(min=1)
