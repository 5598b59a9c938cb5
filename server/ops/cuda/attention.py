"""Paged attention's launches: one query per request for decodes, tiles of queries for the chunks of several tokens.

Knows sizes and grids, which follow from a StepSize alone, so that a step can be recorded and replayed. How many chunks
there are, block tables and lengths are read by the kernels.
"""

import math
from dataclasses import dataclass

from server.models.facts import ModelFacts
from server.ops.cuda.arena import Arena, BufferSpec
from server.ops.cuda.branch import Branch
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DeviceFacts
from server.ops.cuda.kernels import Grid, Kernel, Kernels
from server.ops.interface import BatchLimits, StepInputs, StepSize

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
# Whether the last split to arrive combines all, which saves a launch a layer, or a kernel of its own does, which has
# more programs. Not measured yet.
LAST_SPLIT_COMBINES = False
# Whether chunks are attended on a second stream, beside the decodes of a mixed step, since neither fills the device. It
# costs four calls a layer where steps are issued one by one. Not measured yet.
BRANCHES = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """Launches of a step, the same for all layers."""

    has_decodes: bool
    has_prefills: bool
    num_splits: int
    decode_grid: Grid
    combine_grid: Grid
    prefill_grid: Grid


class CudaAttention:
    """One model's attention on one device. `plan` before the first layer of a step, `attend` for each layer.

    `arrivals` must be 0 before the first step. last_split_combines: LAST_SPLIT_COMBINES if None.
    branch: where chunks of several tokens are attended, if not behind the decodes.
    """

    def __init__(
        self,
        kernels: Kernels,
        facts: ModelFacts,
        limits: BatchLimits,
        device: DeviceFacts,
        arena: Arena,
        *,
        last_split_combines: bool | None = None,
        branch: Branch | None = None,
    ) -> None:
        assert limits.block_size.bit_count() == 1, f"blocks of {limits.block_size} tokens"
        self._num_kv_heads, self._group_size = facts.num_kv_heads, facts.group_size
        self._num_multiprocessors = device.num_multiprocessors
        self._sizes = (
            facts.head_dim**-0.5 * math.log2(math.e),
            facts.num_kv_heads,
            facts.group_size,
            limits.block_size.bit_length() - 1,
        )
        self._last_split_combines = LAST_SPLIT_COMBINES if last_split_combines is None else last_split_combines
        self._partial, self._partial_lse, self.arrivals = (arena.take(spec) for spec in _workspace_specs(facts, limits))
        block_n = PREFILL_BLOCK_N if device.arch in LARGE_SHARED_MEMORY else PREFILL_BLOCK_N_SMALL
        decode = {"HEAD_DIM": facts.head_dim, "BLOCK_N": DECODE_BLOCK_N, "MAX_SPLITS": MAX_SPLITS}
        self._decode = kernels.get("attend_decode", facts.dtype, **decode, IS_SPLIT=False, COMBINES=False)
        self._decode_split = kernels.get(
            "attend_decode", facts.dtype, **decode, IS_SPLIT=True, COMBINES=self._last_split_combines
        )
        self._combine: Kernel = kernels.get(
            "combine_splits", facts.dtype, HEAD_DIM=facts.head_dim, MAX_SPLITS=MAX_SPLITS
        )
        self._branch = branch
        self._prefill: Kernel = (branch.kernels if branch else kernels).get(
            "attend_prefill", facts.dtype, HEAD_DIM=facts.head_dim, BLOCK_M=PREFILL_BLOCK_M, BLOCK_N=block_n
        )
        self._plan: _Plan

    def plan(self, size: StepSize) -> None:
        """Choose the launches of the step that begins."""
        num_splits = _num_splits(size.num_decodes, self._num_kv_heads, self._num_multiprocessors)
        # A tile holds tokens of one chunk: each chunk may need one more than its share of full tiles. In a padded step
        # any token may be a prefill's.
        num_tiles = size.num_tokens // (PREFILL_BLOCK_M // self._group_size) + size.num_prefills
        self._plan = _Plan(
            has_decodes=size.num_decodes > 0,
            has_prefills=size.num_prefills > 0,
            num_splits=num_splits,
            decode_grid=(self._num_kv_heads, size.num_decodes, num_splits),
            combine_grid=(self._num_kv_heads * self._group_size, size.num_decodes, 1),
            prefill_grid=(self._num_kv_heads, num_tiles, 1),
        )

    def attend(self, qkv: Buffer, keys: Buffer, values: Buffer, inputs: StepInputs[Buffer], out: Buffer) -> None:
        """Causal attention of each chunk's queries over its request's blocks.

        qkv [tokens, qkv_rows]: per KV head its query heads, k, v; keys, values [rows, kv_heads, head_dim] of one layer,
        which hold this step's k and v already; out [tokens, heads * head_dim].
        """
        plan, branch = self._plan, self._branch
        pool = (qkv, keys, values, inputs.header, inputs.slots, inputs.block_tables)
        if plan.has_prefills:
            if branch:
                branch.fork()
            chunks = (inputs.query_starts, inputs.context_lens, out)
            self._prefill(plan.prefill_grid, *pool, *chunks, *self._sizes)
        if plan.has_decodes:
            split = (inputs.context_lens, out, self._partial, self._partial_lse, self.arrivals)
            kernel = self._decode if plan.num_splits == 1 else self._decode_split
            kernel(plan.decode_grid, *pool, *split, *self._sizes)
            if plan.num_splits > 1 and not self._last_split_combines:
                parts = (self._partial, self._partial_lse, inputs.header)
                self._combine(plan.combine_grid, *parts, out, plan.num_splits)
        if plan.has_prefills and branch:
            branch.join()


def attention_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """What attention takes from the arena, on any device."""
    return sum(spec.num_bytes for spec in _workspace_specs(facts, limits))


def _workspace_specs(facts: ModelFacts, limits: BatchLimits) -> tuple[BufferSpec, BufferSpec, BufferSpec]:
    """What splits leave for each query head: fp32 means, the logarithms of their weights; how many have arrived."""
    num_heads = limits.max_num_requests * facts.num_kv_heads
    num_entries = min(num_heads * MAX_SPLITS, 2 * MAX_SPLIT_PROGRAMS) * facts.group_size
    return (
        BufferSpec((num_entries, facts.head_dim), "float32"),
        BufferSpec((num_entries,), "float32"),
        BufferSpec((num_heads,), "int32"),
    )


def _num_splits(num_decodes: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Pieces of each context. Above 1, all programs together are fewer than 2 * MAX_SPLIT_PROGRAMS."""
    wanted = min(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, MAX_SPLIT_PROGRAMS)
    return max(1, min(-(-wanted // max(1, num_decodes * num_kv_heads)), MAX_SPLITS))
