"""The torch backend of one model worker, from its device to its operations. Imported by the arbiter, torch included."""

from typing import Any

import server.ops.torch.backend
import server.ops.torch.device
import server.ops.torch.sizes
from server.engine.limits import batch_limits, largest_batch_limits
from server.engine.weights import wait_for_weights
from server.kv.sizing import MemoryBudget, pool_bytes_on_device
from server.launch.board import Role
from server.launch.loader import open_store
from server.launch.service import Service
from server.models.vocabulary import Vocabulary
from server.ops.interface import Operations


def build_operations(service: Service, vocabulary: Vocabulary) -> Operations[Any]:
    """Operations on the loaded weights. Raises StartupError for what no restart can mend, else EngineDead."""
    board, resolved, facts = service.board, service.resolved, service.checkpoint.facts
    board.begin_stage(Role.MODEL, "context")
    store = open_store(resolved.device)
    board.begin_stage(Role.MODEL, "wait for weights")
    memory = wait_for_weights(service, store)
    board.begin_stage(Role.MODEL, "pool")
    board.kv_pool_bytes = board.kv_pool_bytes or _pool_bytes(service)
    return server.ops.torch.backend.create_backend(
        facts,
        server.ops.torch.device.load_weights(memory, service.layout, resolved.device),
        batch_limits(service, board.kv_pool_bytes),
        vocab_limit=min(vocabulary.num_token_ids, facts.vocab_size),
        num_threads=resolved.num_threads,
    )


def _pool_bytes(service: Service) -> int:
    """The KV pool's size. On a GPU from what it has with the weights on it."""
    resolved, facts = service.resolved, service.checkpoint.facts
    if resolved.device == "cpu":
        assert resolved.kv_pool_bytes is not None, "resolve chooses the pool's size on a CPU"
        return resolved.kv_pool_bytes
    total_bytes, free_bytes = server.ops.torch.device.device_memory_bytes(resolved.device)
    activation_bytes = server.ops.torch.sizes.activation_bound_bytes(facts, largest_batch_limits(service))
    weights_bytes = service.layout.total_bytes
    memory = MemoryBudget(total_bytes, free_bytes + weights_bytes, weights_bytes, activation_bytes)
    return pool_bytes_on_device(service.settings.kv, memory)
