"""Operations of the torch backend in fp32, and how a result that a kernel rounded is held to them."""

import torch
from torch import Tensor

from server.models.facts import ModelFacts
from server.ops.interface import ON_HOST, BatchLimits, StepShape, StepSize
from server.ops.sampling import SamplingUse
from server.ops.torch.backend import create_backend
from server.ops.torch.operations import TorchOperations

UNIT_ROUNDOFFS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST_ERRORS = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}  # where numbers are subnormal
EPS = 1e-5
LIMITS = BatchLimits(max_batched_tokens=8, max_num_requests=8, max_model_len=1 << 17, num_blocks=5, block_size=8)
NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


def reference(
    *,
    hidden_size: int = 8,
    intermediate_size: int = 8,
    num_kv_heads: int = 1,
    group_size: int = 1,
    head_dim: int = 64,
    qk_norm: bool = False,
    device: str = "cpu",
) -> TorchOperations:
    """The torch backend of a model of these sizes."""
    facts = ModelFacts(
        architecture="Qwen3ForCausalLM",
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=1 << 17,
        rms_eps=EPS,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=False,
        out_bias=False,
        qk_norm=qk_norm,
        tied_head=True,
        dtype="float32",
    )
    table = torch.zeros(facts.vocab_size, hidden_size, device=device)
    ops = create_backend(facts, {"embed.weight": table}, LIMITS, vocab_limit=facts.vocab_size)
    assert isinstance(ops, TorchOperations)
    return ops


def begin_step(ops: TorchOperations, positions: list[int], kv_rows: list[int]) -> None:
    """A step of one decode per position."""
    host = ops.next_staging()
    for index, (position, kv_row) in enumerate(zip(positions, kv_rows, strict=True)):
        host.token_ids[index], host.token_slots[index] = 0, ON_HOST
        host.positions[index], host.kv_rows[index] = position, kv_row
        host.slots[index] = index
        host.context_lens[index], host.query_starts[index + 1] = position + 1, index + 1
    num_tokens = len(positions)
    size = StepSize(num_tokens, num_tokens, 0, 0)
    columns = LIMITS.max_blocks_per_request
    ops.begin_step(
        StepShape(positions, [1] * num_tokens, num_tokens, 0, 0, False, NO_SAMPLING, num_tokens, columns, size)
    )


def assert_rounded_once(found: Tensor, exact: Tensor, absolute: float = 0.0) -> None:
    """Each element within half a unit in the last place of fp32's result, and a little for fp32 itself.

    `absolute`: what fp32 may lose where large terms cancel.
    """
    smallest = SMALLEST_ERRORS[found.dtype] + absolute
    torch.testing.assert_close(found.float(), exact, rtol=UNIT_ROUNDOFFS[found.dtype] * 1.01, atol=smallest)
