"""Paged attention's launches: one query per request for decodes, tiles of queries for the chunks of several tokens.

Knows sizes and grids; what they follow from is known to the host before a step, never a context length, so that a step
of decodes can be recorded and replayed. Block tables and lengths are read by the kernels.
"""

import math
from dataclasses import dataclass

from server.models.facts import ModelFacts
from server.ops.cuda.arena import Arena, BufferSpec
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DeviceFacts
from server.ops.cuda.kernels import Grid, Kernel, Kernels
from server.ops.interface import BatchLimits, StepInputs, StepShape

# Constants of the kernels, by which their images are found.
DECODE_BLOCK_N = 64
MAX_SPLITS = 64
PREFILL_BLOCK_M = 128
PREFILL_BLOCK_N, PREFILL_BLOCK_N_SMALL = 64, 32
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103")  # 227 KiB a block; others have 99 or 163

# Decode programs per multiprocessor that a small batch is split into: more than are resident at a time (3), so that
# the last ones to start are short. Those whose share of a short context is nothing cost time, too.
PROGRAMS_PER_MULTIPROCESSOR = 6
MAX_SPLIT_PROGRAMS = 1024  # bounds the workspace, whatever the device


@dataclass(frozen=True, slots=True)
class _Plan:
    """Launches of a step, the same for all layers."""

    num_splits: int
    decode_grid: Grid
    combine_grid: Grid
    prefill_grid: Grid
    first_chunk: int
    num_chunks: int


class CudaAttention:
    """One model's attention on one device. `plan` before the first layer of a step, `attend` for each layer."""

    def __init__(
        self, kernels: Kernels, facts: ModelFacts, limits: BatchLimits, device: DeviceFacts, arena: Arena
    ) -> None:
        assert limits.block_size.bit_count() == 1, f"blocks of {limits.block_size} tokens"
        self._num_kv_heads, self._group_size = facts.num_kv_heads, facts.group_size
        self._num_multiprocessors = device.num_multiprocessors
        self._sizes = (
            facts.head_dim**-0.5 * math.log2(math.e),
            facts.num_kv_heads,
            facts.group_size,
            limits.block_size.bit_length() - 1,
            limits.max_blocks_per_request,
        )
        self._partial, self._partial_lse = (arena.take(spec) for spec in _workspace_specs(facts, limits))
        block_n = PREFILL_BLOCK_N if device.arch in LARGE_SHARED_MEMORY else PREFILL_BLOCK_N_SMALL
        self._decode, self._decode_split = (
            kernels.get(
                "attend_decode", facts.dtype, HEAD_DIM=facts.head_dim, BLOCK_N=DECODE_BLOCK_N, IS_SPLIT=is_split
            )
            for is_split in (False, True)
        )
        self._combine: Kernel = kernels.get(
            "combine_splits", facts.dtype, HEAD_DIM=facts.head_dim, MAX_SPLITS=MAX_SPLITS
        )
        self._prefill: Kernel = kernels.get(
            "attend_prefill", facts.dtype, HEAD_DIM=facts.head_dim, BLOCK_M=PREFILL_BLOCK_M, BLOCK_N=block_n
        )
        self._plan: _Plan

    def plan(self, shape: StepShape) -> None:
        """Choose the launches of the step that begins. Steps with equal counts of chunks and tokens have the same."""
        num_decodes, num_chunks = shape.num_decodes, shape.num_chunks - shape.num_decodes
        num_splits = _num_splits(num_decodes, self._num_kv_heads, self._num_multiprocessors)
        tokens_per_tile = PREFILL_BLOCK_M // self._group_size
        # A tile holds tokens of one chunk: each chunk may need one more than its share of full tiles.
        num_tiles = (shape.num_tokens - num_decodes) // tokens_per_tile + num_chunks
        self._plan = _Plan(
            num_splits=num_splits,
            decode_grid=(self._num_kv_heads, num_decodes, num_splits),
            combine_grid=(self._num_kv_heads * self._group_size, num_decodes, 1),
            prefill_grid=(self._num_kv_heads, num_tiles, 1),
            first_chunk=num_decodes,
            num_chunks=num_chunks,
        )

    def attend(self, qkv: Buffer, keys: Buffer, values: Buffer, inputs: StepInputs[Buffer], out: Buffer) -> None:
        """Causal attention of each chunk's queries over its request's blocks.

        qkv [tokens, qkv_rows]: per KV head its query heads, k, v; keys, values [rows, kv_heads, head_dim] of one layer,
        which hold this step's k and v already; out [tokens, heads * head_dim].
        """
        plan = self._plan
        pool = (qkv, keys, values, inputs.block_tables)
        if plan.first_chunk:
            split = (inputs.context_lens, out, self._partial, self._partial_lse)
            if plan.num_splits == 1:
                self._decode(plan.decode_grid, *pool, *split, *self._sizes)
            else:
                self._decode_split(plan.decode_grid, *pool, *split, *self._sizes)
                self._combine(plan.combine_grid, self._partial, self._partial_lse, out, plan.num_splits)
        if plan.num_chunks:
            chunks = (inputs.query_starts, inputs.context_lens, out)
            self._prefill(plan.prefill_grid, *pool, *chunks, *self._sizes, plan.first_chunk, plan.num_chunks)


def attention_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """What attention takes from the arena, on any device."""
    return sum(spec.num_bytes for spec in _workspace_specs(facts, limits))


def _workspace_specs(facts: ModelFacts, limits: BatchLimits) -> tuple[BufferSpec, BufferSpec]:
    """What splits leave for each query head: fp32 means, and the logarithms of their weights."""
    most = min(limits.max_num_requests * facts.num_kv_heads * MAX_SPLITS, 2 * MAX_SPLIT_PROGRAMS)
    num_entries = most * facts.group_size
    return BufferSpec((num_entries, facts.head_dim), "float32"), BufferSpec((num_entries,), "float32")


def _num_splits(num_decodes: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Pieces of each context. Above 1, all programs together are fewer than 2 * MAX_SPLIT_PROGRAMS."""
    wanted = min(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, MAX_SPLIT_PROGRAMS)
    return max(1, min(-(-wanted // max(1, num_decodes * num_kv_heads)), MAX_SPLITS))
