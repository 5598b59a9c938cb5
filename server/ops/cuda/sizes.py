"""What the cuda backend allocates on its device: the shape of every buffer, and their sum, which is exact.

Arithmetic on a model's facts and a step's limits; does not know a device.
"""

from dataclasses import fields

from server.models.facts import ModelFacts
from server.ops.cuda.arena import BufferSpec
from server.ops.cuda.attention import attention_bytes
from server.ops.cuda.buffer import BufferDType
from server.ops.cuda.sampler import sampler_bytes
from server.ops.cuda.staging import staging_spec
from server.ops.interface import Activations, BatchLimits

GEMM_WORKSPACE = BufferSpec((64 << 20,), "uint8")
GRAPH_BYTES = 1 << 20  # device memory of one recorded step


def kv_pool_spec(facts: ModelFacts, limits: BatchLimits) -> BufferSpec:
    """[layers, k and v, rows, kv_heads, head_dim]; a token's row is its block id * block_size + offset."""
    num_rows = limits.num_blocks * limits.block_size
    return BufferSpec((facts.num_layers, 2, num_rows, facts.num_kv_heads, facts.head_dim), facts.dtype)


def activation_specs(facts: ModelFacts, limits: BatchLimits) -> Activations[BufferSpec]:
    """Every intermediate of the largest step."""
    num_tokens, num_samples = limits.max_batched_tokens, limits.max_num_requests

    def rows(count: int, width: int, dtype: BufferDType = facts.dtype) -> BufferSpec:
        return BufferSpec((count, width), dtype)

    return Activations(
        residual=rows(num_tokens, facts.hidden_size, "float32"),
        normed=rows(num_tokens, facts.hidden_size),
        delta=rows(num_tokens, facts.hidden_size),
        qkv=rows(num_tokens, facts.qkv_rows),
        attended=rows(num_tokens, facts.num_heads * facts.head_dim),
        gate_up=rows(num_tokens, 2 * facts.intermediate_size),
        gated=rows(num_tokens, facts.intermediate_size),
        sampled=rows(num_samples, facts.hidden_size),
        logits=rows(num_samples, facts.vocab_size, "float32"),
    )


def frequencies_spec(facts: ModelFacts) -> BufferSpec:
    """Radians per position of each pair of a head's elements."""
    return BufferSpec((facts.head_dim // 2,), "float32")


def max_graph_requests(limits: BatchLimits) -> int:
    """The most decodes of a step that is recorded."""
    return min(limits.max_num_requests, limits.max_batched_tokens)


def activation_bound_bytes(facts: ModelFacts, limits: BatchLimits, num_graphs: int = 0) -> int:
    """Device memory besides weights and KV pool: what operations allocate, and recorded steps."""
    return arena_bytes(facts, limits) + num_graphs * GRAPH_BYTES


def arena_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """All buffers of the operations but the KV pool."""
    activations = activation_specs(facts, limits)
    own: list[BufferSpec] = [getattr(activations, field.name) for field in fields(activations)]
    own += [frequencies_spec(facts), GEMM_WORKSPACE, staging_spec(limits)]
    parts = attention_bytes(facts, limits) + sampler_bytes(facts, limits)
    return sum(spec.num_bytes for spec in own) + parts
