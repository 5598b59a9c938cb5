"""Paged attention for ragged batches: what to gather is planned once per step, then each layer gathers and attends.

Knows block tables and rows of the pool. A gathered position that is not the query's to see is a repetition of the
request's own first token, and masked: 0 x NaN is NaN, so what others left in the pool must not be read at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from server.ops.interface import BatchLimits, StepInputs, StepShape

MAX_GATHERED_TOKENS = 1 << 16  # decode requests are attended in groups whose padded contexts together stay below
MAX_QUERY_ROWS = 256  # a prefill chunk is attended in tiles of this many tokens


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Queries that are attended in one call: either one token of each of several requests, or several of one.

    pool_rows [requests * context]: rows of the pool, request by request. mask, broadcast to [requests, 1, queries,
    context], is None if every query sees every gathered row.
    """

    first_token: int
    num_requests: int
    num_queries: int
    pool_rows: Tensor
    mask: Tensor | None


def plan_tiles(shape: StepShape, inputs: StepInputs[Tensor], limits: BatchLimits) -> list[AttentionTile]:
    """The tiles of a step, the same for all layers. Launches follow from `shape`, values from `inputs`."""
    if not shape.num_chunks:  # a step of padding
        return []
    used = inputs.block_tables[: shape.table_rows * shape.table_columns].view(-1, shape.table_columns)
    tables = used.index_select(0, inputs.slots[: shape.num_chunks])
    tiles = [
        _decode_tile(first, end, shape, inputs.context_lens, tables, limits.block_size)
        for first, end in _decode_groups(shape)
    ]
    first_token = shape.num_decodes
    for chunk in range(shape.num_decodes, shape.num_chunks):
        tiles += _prefill_tiles(chunk, first_token, shape, inputs.positions, tables, limits.block_size)
        first_token += shape.lengths[chunk]
    return tiles


def allocate_workspace(limits: BatchLimits, num_kv_heads: int, head_dim: int, like: Tensor) -> Tensor:
    """Where K and V of a tile are gathered: [2, rows, kv_heads, head_dim]. A new one per call costs page faults."""
    return like.new_empty(2, max(MAX_GATHERED_TOKENS, limits.max_model_len), num_kv_heads, head_dim)


def paged_attention(
    queries: Tensor, kv: Tensor, tiles: list[AttentionTile], scale: float, workspace: Tensor, out: Tensor
) -> None:
    """queries, out [tokens, kv_heads, group, head_dim]; kv [2, pool rows, kv_heads, head_dim] of one layer."""
    _, num_kv_heads, group_size, head_dim = queries.shape
    for tile in tiles:
        gathered = (tile.num_requests, -1, num_kv_heads, head_dim)
        k, v = (
            torch.index_select(pool, 0, tile.pool_rows, out=space[: tile.pool_rows.shape[0]])
            .view(gathered)
            .transpose(1, 2)
            for pool, space in zip(kv, workspace, strict=True)
        )
        tokens = slice(tile.first_token, tile.first_token + tile.num_requests * tile.num_queries)
        # The query heads of a group share K and V, so they are further queries of one head: nothing is repeated.
        grouped = (tile.num_requests, tile.num_queries, num_kv_heads, group_size, head_dim)
        q = queries[tokens].view(grouped).transpose(1, 2).flatten(2, 3)
        mask = None if tile.mask is None else tile.mask.unsqueeze(3).expand(-1, -1, -1, group_size, -1).flatten(2, 3)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        attended = attended.view(tile.num_requests, num_kv_heads, tile.num_queries, group_size, head_dim)
        out[tokens].view(grouped).copy_(attended.transpose(1, 2))


def _decode_groups(shape: StepShape) -> Iterator[tuple[int, int]]:
    """Runs of decode chunks whose padded contexts together are at most MAX_GATHERED_TOKENS, or single chunks."""
    first = 0
    longest = 0
    for chunk in range(shape.num_decodes):
        context = shape.starts[chunk] + 1
        if chunk > first and max(longest, context) * (chunk + 1 - first) > MAX_GATHERED_TOKENS:
            yield first, chunk
            first, longest = chunk, 0
        longest = max(longest, context)
    if first < shape.num_decodes:
        yield first, shape.num_decodes


def _decode_tile(
    first: int, end: int, shape: StepShape, context_lens: Tensor, tables: Tensor, block_size: int
) -> AttentionTile:
    contexts = [start + 1 for start in shape.starts[first:end]]
    longest = max(contexts)
    rows = _context_rows(tables[first:end], longest, block_size)
    mask = None
    if min(contexts) < longest:
        is_context = torch.arange(longest, device=rows.device) < context_lens[first:end].unsqueeze(1)
        rows = torch.where(is_context, rows, rows[:, :1])
        mask = is_context.view(end - first, 1, 1, longest)
    return AttentionTile(first, end - first, 1, rows.flatten(), mask)


def _prefill_tiles(
    chunk: int, first_token: int, shape: StepShape, positions: Tensor, tables: Tensor, block_size: int
) -> Iterator[AttentionTile]:
    start, length = shape.starts[chunk], shape.lengths[chunk]
    rows = _context_rows(tables[chunk : chunk + 1], start + length, block_size).flatten()
    for offset in range(0, length, MAX_QUERY_ROWS):
        num_queries = min(MAX_QUERY_ROWS, length - offset)
        context = start + offset + num_queries
        token = first_token + offset
        is_visible = torch.arange(context, device=rows.device) <= positions[token : token + num_queries].unsqueeze(1)
        mask = is_visible.view(1, 1, num_queries, context) if num_queries > 1 else None
        yield AttentionTile(token, 1, num_queries, rows[:context], mask)


def _context_rows(tables: Tensor, context: int, block_size: int) -> Tensor:
    """Pool rows of positions 0 .. context - 1 of each request: int32 [requests, context]."""
    num_blocks = -(-context // block_size)
    offsets = torch.arange(block_size, dtype=torch.int32, device=tables.device)
    rows = tables[:, :num_blocks].unsqueeze(2) * block_size + offsets
    return rows.flatten(1)[:, :context]
