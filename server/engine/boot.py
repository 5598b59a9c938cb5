"""Builds the engine of one model worker: weights mapped, pool sized, model wired, one real token generated.

The only place that knows all parts. Order matters: what does not need the weights comes before the wait for them.
"""

import logging
import os
import time
from typing import Any

from server.engine.core import EngineLoop, Runner
from server.engine.messages import SamplingParams, Submit
from server.engine.peers import Peers
from server.errors import EngineDead, StartupError
from server.kv.block_tables import BlockTables
from server.kv.sizing import DeviceMemory, count_blocks, pool_bytes_on_device, resolve_max_model_len
from server.launch.board import Board, LoaderState, Role
from server.launch.service import Service
from server.models.vocabulary import Vocabulary, read_vocabulary
from server.ops.interface import BatchLimits, Operations
from server.runner.model_runner import ModelRunner
from server.scheduler.scheduler import Scheduler, SchedulerLimits

logger = logging.getLogger(__name__)

_LOADER_POLL_S = 0.005


def import_backend(backend: str) -> None:
    """Import what the backend needs, in the arbiter, so that every model worker finds it done. Touches no device."""
    assert backend == "torch", f"unknown backend {backend}"
    import server.ops.torch.backend
    import server.ops.torch.device
    import server.ops.torch.sizes  # noqa: F401


def build_engine(service: Service) -> EngineLoop:
    """An engine that has generated a token. Raises StartupError for what no restart can mend, else EngineDead."""
    board = service.board
    board.begin_stage(Role.MODEL, "vocabulary")
    vocabulary = read_vocabulary(service.checkpoint.folder)
    board.begin_stage(Role.MODEL, "context")
    pool_bytes = _pool_bytes(service)
    board.begin_stage(Role.MODEL, "wait for weights")
    wait_for_weights(board)
    board.begin_stage(Role.MODEL, "pool")
    ops = _build_operations(service, vocabulary, pool_bytes)
    runner = ModelRunner(service.checkpoint.facts, ops, vocabulary.eos_token_ids)
    limits = _scheduler_limits(service, ops.limits)
    board.begin_stage(Role.MODEL, "first token")
    decode_s = generate_two_tokens(runner, ops.limits, limits)
    if service.resolved.device == "cpu":  # a GPU's steps are far below any watchdog
        board.longest_step_s = decode_s * limits.max_batched_tokens
    tables = BlockTables(ops.limits.num_blocks, ops.limits.block_size, service.settings.kv.prefix_cache)
    scheduler = Scheduler(tables, limits, vocabulary.eos_token_ids)
    _describe_on_board(board, ops.limits)
    peers = Peers(service.engine_listener, os.getpid())
    return EngineLoop(peers, scheduler, runner, board, service.settings.server.drain_limit_s)


def wait_for_weights(board: Board) -> None:
    """Return when the loader has finished. Its failure ends the service; the master's load deadline bounds the wait."""
    while board.loader_state != LoaderState.LOADED:
        if board.stop or board.loader_state == LoaderState.FAILED:
            raise EngineDead("the weights will not be loaded: the service is stopping")
        time.sleep(_LOADER_POLL_S)


def _pool_bytes(service: Service) -> int:
    """The KV pool's size. On a GPU from what it has before the weights are there."""
    from server.ops.torch.device import device_memory_bytes
    from server.ops.torch.sizes import activation_bound_bytes

    resolved, facts = service.resolved, service.checkpoint.facts
    if resolved.device == "cpu":
        assert resolved.kv_pool_bytes is not None, "resolve chooses the pool's size on a CPU"
        return resolved.kv_pool_bytes
    total_bytes, free_bytes = device_memory_bytes(resolved.device)
    activation_bytes = activation_bound_bytes(facts, _batch_limits(service, 1, resolved.max_model_len))
    memory = DeviceMemory(total_bytes, free_bytes, service.layout.total_bytes, activation_bytes)
    return pool_bytes_on_device(service.settings.kv, memory)


def _build_operations(service: Service, vocabulary: Vocabulary, pool_bytes: int) -> Operations[Any]:
    from server.ops.torch.backend import create_backend
    from server.ops.torch.device import load_weights

    facts, resolved, block_size = service.checkpoint.facts, service.resolved, service.settings.kv.block_size
    num_blocks = count_blocks(pool_bytes, facts.kv_bytes_per_token, block_size)
    asked_len = service.settings.engine.max_model_len
    max_model_len = resolve_max_model_len(asked_len, resolved.max_model_len, num_blocks, block_size)
    return create_backend(
        facts,
        load_weights(service.weights_fd, service.layout, resolved.device),
        _batch_limits(service, num_blocks, max_model_len),
        vocab_limit=min(vocabulary.num_token_ids, facts.vocab_size),
        num_threads=resolved.num_threads,
    )


def _batch_limits(service: Service, num_blocks: int, max_model_len: int) -> BatchLimits:
    engine = service.settings.engine
    return BatchLimits(
        max_batched_tokens=service.resolved.max_batched_tokens,
        max_num_requests=engine.max_num_requests,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=service.settings.kv.block_size,
    )


def _scheduler_limits(service: Service, limits: BatchLimits) -> SchedulerLimits:
    engine = service.settings.engine
    return SchedulerLimits(
        max_model_len=limits.max_model_len,
        max_num_requests=limits.max_num_requests,
        max_batched_tokens=limits.max_batched_tokens,
        max_waiting_requests=engine.max_waiting_requests,
        max_waiting_tokens=engine.max_waiting_tokens,
    )


def generate_two_tokens(runner: Runner, batch_limits: BatchLimits, limits: SchedulerLimits) -> float:
    """A prefill and a decode through all that a request goes through, with a scheduler of their own.

    Returns the seconds of the decode: alone, a token costs at least what it costs in any batch.
    """
    tables = BlockTables(batch_limits.num_blocks, batch_limits.block_size, prefix_cache=False)
    scheduler = Scheduler(tables, limits, eos_token_ids=())
    refusal = scheduler.add(Submit(0, [0, 0], 2, SamplingParams(max_tokens=2, ignore_eos=True)))
    if refusal is not None:
        raise StartupError(f"not even a request of two tokens fits: {refusal.error}")
    begin = time.monotonic()
    while (plan := scheduler.schedule()) is not None:
        begin = time.monotonic()
        for output in scheduler.update(runner.submit(plan).wait()):
            if output.finish_reason == "error":
                raise StartupError(f"the model computes no finite logits: {output.error}")
    return time.monotonic() - begin


def _describe_on_board(board: Board, limits: BatchLimits) -> None:
    board.num_kv_blocks = board.num_free_kv_blocks = limits.num_blocks - 1
    board.block_size = limits.block_size
    board.max_model_len = limits.max_model_len
