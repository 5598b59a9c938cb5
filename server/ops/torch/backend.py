"""The one door to the torch backend: everything outside this package gets its operations here."""

from collections.abc import Mapping

import torch
from torch import Tensor

from server.models.facts import ModelFacts
from server.models.rope import inverse_frequencies
from server.ops.interface import BatchLimits, Operations
from server.ops.torch.operations import TorchOperations


def create_backend(
    facts: ModelFacts,
    weights: Mapping[str, Tensor],
    limits: BatchLimits,
    *,
    vocab_limit: int,
    num_threads: int = 0,
) -> Operations[Tensor]:
    """Operations on the device where `weights` (named as in weights/layout) lie; KV pool and buffers are made here.

    vocab_limit: ids from there on have no text and are never sampled. num_threads 0 leaves torch's CPU threads alone;
    otherwise it holds for the calling thread, which must be the one that runs the steps.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    return TorchOperations(facts, weights, limits, inverse_frequencies(facts), vocab_limit)
