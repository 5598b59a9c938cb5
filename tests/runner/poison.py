"""One mixed batch of fixed shape, and NaN in everything that some of its requests do not own."""

import torch

from server.engine.messages import SamplingParams
from server.scheduler.plan import SlotReset, StepPlan, StepResult, TokenChunk
from tests.runner.tiny_engine import TinyEngine, TinyModel, batch_limits

LIMITS = batch_limits(max_batched_tokens=96, num_blocks=33)
# slot -> (start, tokens of the step's chunk, blocks): four decodes, two prefill chunks with a context, one without.
ROWS = {
    0: (11, 1, (1, 2)),
    1: (30, 1, (3, 4, 5, 6)),
    2: (6, 1, (7,)),
    3: (12, 1, (8, 9)),
    4: (9, 20, (10, 11, 12, 13)),
    5: (16, 11, (14, 15, 16, 17)),
    6: (0, 13, (18, 19)),
}
GOOD_SLOTS = (1, 3, 5, 6)
SAMPLINGS = (
    SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=3, logprobs=True),
    SamplingParams(max_tokens=9, logprobs=True),
    SamplingParams(max_tokens=9, temperature=1.3, top_k=5, min_p=0.01, repetition_penalty=1.4, min_tokens=3, seed=4),
)


def build(model: TinyModel) -> TinyEngine:
    """A backend whose pool holds the same random KV everywhere."""
    engine = TinyEngine(model, LIMITS)
    pool = engine.ops.kv_pool
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    return engine


def mixed_plan() -> StepPlan:
    resets = tuple(
        SlotReset(slot, 100 + slot, (1, 2, 3), 3, SAMPLINGS[slot % len(SAMPLINGS)])
        for slot in range(LIMITS.max_num_requests)
    )
    chunks = tuple(
        TokenChunk(slot, 100 + slot, start, length, tuple(range(slot, slot + length)), block_ids, samples=True)
        for slot, (start, length, block_ids) in ROWS.items()
    )
    return StepPlan(1, resets, chunks)


def submit(engine: TinyEngine) -> tuple[torch.Tensor, StepResult]:
    result = engine.runner.submit(mixed_plan()).wait()
    return engine.ops.recorded[-1], result


def rows_of_good_requests() -> torch.Tensor:
    """Which rows of the pool they own: neither the scratch block nor the stale ends of their own blocks."""
    block_size = LIMITS.block_size
    is_owned = torch.zeros(LIMITS.num_blocks * block_size, dtype=torch.bool)
    for slot in GOOD_SLOTS:
        start, _, block_ids = ROWS[slot]
        for position in range(start):
            is_owned[block_ids[position // block_size] * block_size + position % block_size] = True
    return is_owned


def poison_blocks(engine: TinyEngine) -> None:
    """All that the good requests do not own."""
    engine.ops.kv_pool[:, :, ~rows_of_good_requests()] = float("nan")


def poison_buffers(engine: TinyEngine) -> None:
    for name in ("residual", "normed", "delta", "qkv", "attended", "gate_up", "gated", "sampled", "logits"):
        getattr(engine.ops._largest, name).fill_(float("nan"))
