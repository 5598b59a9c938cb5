"""Builds the engine of one model worker: weights mapped, pool sized, model wired, real tokens generated.

The only place that knows all parts. Order matters: what does not need the weights comes before the wait for them.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from server.engine.core import EngineLoop
from server.engine.limits import scheduler_limits
from server.engine.messages import SamplingParams, Submit
from server.engine.peers import Peers
from server.errors import StartupError
from server.kv.block_tables import BlockTables
from server.launch.board import MAX_EOS_TOKEN_IDS, Board, Role
from server.launch.service import Service
from server.models.vocabulary import Vocabulary, read_vocabulary
from server.ops.interface import BatchLimits, Operations
from server.runner.model_runner import ModelRunner
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import StepResult
from server.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARM_PROMPT_TOKENS = 128
# Every step of the sampler: what is loaded at first use is loaded before a request needs it.
_WARM_SAMPLING = SamplingParams(
    max_tokens=3, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, ignore_eos=True
)
_GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


def import_backend(backend: str) -> None:
    """Import what the backend needs, in the arbiter, so that every model worker finds it done. Touches no device."""
    if backend == "cuda":
        import server.engine.on_cuda

        server.engine.on_cuda.load_libraries()
    else:
        import server.engine.on_torch


def build_engine(service: Service) -> EngineLoop:
    """An engine that has generated tokens. Raises StartupError for what no restart can mend, else EngineDead."""
    board = service.board
    board.begin_stage(Role.MODEL, "vocabulary")
    vocabulary = known_vocabulary(board, service)
    ops, wait_for_weights = _build_operations(service, vocabulary)
    runner = ModelRunner(service.checkpoint.facts, ops, vocabulary.eos_token_ids)
    limits = scheduler_limits(service, ops.limits)
    prompt_tokens = _WARM_PROMPT_TOKENS if service.resolved.device == "cuda" else 2
    if not service.load_record.is_complete:
        board.begin_stage(Role.MODEL, "warm up")
        generate(runner, ops.limits, limits, prompt_tokens, _WARM_SAMPLING, is_real=False)
        board.begin_stage(Role.MODEL, "wait for weights")
    wait_for_weights()
    board.begin_stage(Role.MODEL, "first token")
    decode_s = generate(runner, ops.limits, limits, prompt_tokens, _GREEDY)
    if service.resolved.device == "cpu":  # a GPU's steps are far below any watchdog
        board.longest_step_s = decode_s * ops.limits.max_batched_tokens
    board.begin_stage(Role.MODEL, "engine")
    tables = BlockTables(ops.limits.num_blocks, ops.limits.block_size, service.settings.kv.prefix_cache)
    scheduler = Scheduler(tables, limits, vocabulary.eos_token_ids)
    _describe_on_board(board, ops.limits)
    peers = Peers(service.engine_listener, os.getpid())
    return EngineLoop(peers, scheduler, runner, board, service.settings.server.drain_limit_s)


def _build_operations(service: Service, vocabulary: Vocabulary) -> tuple[Operations[Any], Callable[[], None]]:
    if service.resolved.backend == "cuda":
        from server.engine import on_cuda

        return on_cuda.build_operations(service, vocabulary)
    from server.engine import on_torch

    return on_torch.build_operations(service, vocabulary), lambda: None


def known_vocabulary(board: Board, service: Service) -> Vocabulary:
    """Read from the checkpoint by the first model worker, from the board by its successors (0.05 s for Qwen2)."""
    if board.num_token_ids:
        return Vocabulary(board.num_token_ids, tuple(board.eos_token_ids[: board.num_eos_token_ids]))
    vocabulary = read_vocabulary(service.checkpoint.folder)
    eos_token_ids = vocabulary.eos_token_ids
    if len(eos_token_ids) <= MAX_EOS_TOKEN_IDS:
        board.eos_token_ids[: len(eos_token_ids)] = eos_token_ids
        board.num_eos_token_ids = len(eos_token_ids)
        board.num_token_ids = vocabulary.num_token_ids  # last: it says that the others are there
    return vocabulary


def generate(
    runner: ModelRunner[Any],
    batch_limits: BatchLimits,
    limits: SchedulerLimits,
    num_prompt_tokens: int,
    sampling: SamplingParams,
    *,
    is_real: bool = True,
) -> float:
    """Some tokens through all that a request goes through, with a scheduler of their own.

    Not `is_real`: the weights are not all there, so the tokens are nonsense, and logits need not be finite.
    Returns the seconds of the last decode: alone, a token costs at least what it costs in any batch.
    """
    tables = BlockTables(batch_limits.num_blocks, batch_limits.block_size, prefix_cache=False)
    scheduler = Scheduler(tables, limits, eos_token_ids=())
    num_prompt_tokens = max(1, min(num_prompt_tokens, limits.max_model_len - sampling.max_tokens))
    refusal = scheduler.add(Submit(0, [0] * num_prompt_tokens, num_prompt_tokens, sampling))
    if refusal is not None:
        raise StartupError(f"not even a request of {num_prompt_tokens} tokens fits: {refusal.error}")
    begin = time.monotonic()
    while (plan := scheduler.schedule()) is not None:
        begin = time.monotonic()
        result = runner.submit(plan).wait()
        for output in scheduler.update(result if is_real else _as_finite(result)):
            if output.finish_reason == "error":
                raise StartupError(f"the model computes no finite logits: {output.error}")
    return time.monotonic() - begin


def _as_finite(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, is_finite=[True] * len(result.is_finite))


def _describe_on_board(board: Board, limits: BatchLimits) -> None:
    board.num_kv_blocks = board.num_free_kv_blocks = limits.num_blocks - 1
    board.block_size = limits.block_size
    board.max_model_len = limits.max_model_len
