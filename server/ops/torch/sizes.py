"""How much device memory the torch backend takes besides weights and KV pool: arithmetic, done before it allocates.

A bound from above, so that the rest can become the KV pool. Knows the temporaries of operations, attention and sampler.
"""

from server.models.facts import DTYPE_BYTES, ModelFacts
from server.ops.interface import BatchLimits, input_sizes
from server.ops.torch.attention import MAX_GATHERED_TOKENS, MAX_QUERY_ROWS
from server.ops.torch.sampler import MAX_TILE_ENTRIES

_FP32_BYTES = 4
_DRAW_BYTES = 128  # per entry of a sampler tile: sorted values and indices, and Philox words in int64


def activation_bound_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """Bytes that a step of at most `limits` needs on the device: persistent buffers, and the largest temporaries."""
    temporaries = max(_layer_bytes(facts, limits), _attention_bytes(facts, limits), _sampler_bytes(facts, limits))
    return _buffer_bytes(facts, limits) + _plan_bytes(facts, limits) + temporaries


def _buffer_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """Activations, gathered K and V, slot table and inputs."""
    item = DTYPE_BYTES[facts.dtype]
    widths = 2 * facts.hidden_size + facts.qkv_rows + facts.num_heads * facts.head_dim + 3 * facts.intermediate_size
    per_token = widths * item + facts.hidden_size * _FP32_BYTES
    per_sample = facts.hidden_size * item + facts.vocab_size * (_FP32_BYTES + 1)
    inputs = sum(input_sizes(limits).values()) * 4
    gathered = max(MAX_GATHERED_TOKENS, limits.max_model_len) * 2 * facts.num_kv_heads * facts.head_dim * item
    return limits.max_batched_tokens * per_token + (limits.max_num_requests + 1) * per_sample + inputs + gathered


def _plan_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """Rotations, rows to gather (int32, and int64 while they are made) and masks, which live as long as the step."""
    rotations = limits.max_batched_tokens * facts.head_dim * _FP32_BYTES * 4
    num_tiles = limits.max_batched_tokens // MAX_QUERY_ROWS + limits.max_num_requests
    rows = num_tiles * limits.max_model_len * 12
    masks = limits.max_batched_tokens * limits.max_model_len
    tables = limits.max_num_requests * limits.max_blocks_per_request * 4
    return rotations + rows + masks + tables


def _layer_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    rotate = 6 * (facts.num_heads + facts.num_kv_heads) * facts.head_dim
    gate = 2 * facts.intermediate_size
    return limits.max_batched_tokens * max(rotate, gate, 3 * facts.hidden_size) * _FP32_BYTES


def _attention_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """A tile's queries and results, and its mask: repeated, as numbers, and padded."""
    item = DTYPE_BYTES[facts.dtype]
    num_queries = max(MAX_QUERY_ROWS, limits.max_num_requests)
    queries = num_queries * facts.num_heads * facts.head_dim * (4 * item + _FP32_BYTES)
    mask = MAX_QUERY_ROWS * facts.group_size * limits.max_model_len * (1 + 2 * item)
    return queries + mask


def _sampler_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    num_entries = limits.max_num_requests * facts.vocab_size
    processed = num_entries * (6 * _FP32_BYTES + 4)
    drawn = min(num_entries, max(MAX_TILE_ENTRIES, facts.vocab_size)) * _DRAW_BYTES
    return processed + drawn
