"""The bound on activations covers what the backend allocates, and grows with every limit."""

from dataclasses import replace

import torch

from server.ops.interface import BatchLimits
from server.ops.torch.operations import TorchOperations
from server.ops.torch.sizes import activation_bound_bytes
from tests.ops.test_torch_operations import FACTS

LIMITS = BatchLimits(max_batched_tokens=512, max_num_requests=64, max_model_len=512, num_blocks=9, block_size=16)


def persistent_bytes(ops: TorchOperations) -> int:
    """Tensors that a backend holds, by their storages, without weights and KV pool."""
    pending: list[object] = [value for name, value in vars(ops).items() if name not in ("weights", "kv_pool")]
    storages: dict[int, int] = {}
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            pending += value
        elif type(value).__module__.startswith("server.ops"):
            slots = getattr(value, "__slots__", None) or vars(value)
            pending += [getattr(value, name) for name in slots]
    return sum(storages.values())


def test_bound_covers_the_buffers_of_a_backend() -> None:
    weights = {"embed.weight": torch.zeros(FACTS.vocab_size, FACTS.hidden_size)}
    ops = TorchOperations(FACTS, weights, LIMITS, (0.0,) * (FACTS.head_dim // 2), FACTS.vocab_size)
    num_bytes = persistent_bytes(ops)
    assert num_bytes > LIMITS.max_batched_tokens * FACTS.hidden_size * 4
    assert activation_bound_bytes(FACTS, LIMITS) > num_bytes


def test_bound_grows_with_every_limit() -> None:
    bound = activation_bound_bytes(FACTS, LIMITS)
    for name in ("max_batched_tokens", "max_num_requests", "max_model_len"):
        assert activation_bound_bytes(FACTS, replace(LIMITS, **{name: 4096})) > bound
