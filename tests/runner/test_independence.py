"""Rows are independent, exactly: in a batch of fixed shape, neighbours full of NaN change no bit of a row."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from server.engine.messages import SamplingParams
from server.scheduler.plan import SlotReset, StepPlan, StepResult, TokenChunk
from tests.runner.tiny_engine import TinyEngine, TinyModel, batch_limits

LIMITS = batch_limits(max_batched_tokens=96, num_blocks=33)
# slot -> (start, tokens of the step's chunk, blocks): four decodes, two prefill chunks with a context, one without.
ROWS = {
    0: (11, 1, (1, 2)),
    1: (30, 1, (3, 4, 5, 6)),
    2: (7, 1, (7,)),
    3: (12, 1, (8, 9)),
    4: (9, 20, (10, 11, 12, 13)),
    5: (16, 11, (14, 15, 16, 17)),
    6: (0, 13, (18, 19)),
}
GOOD_SLOTS = (1, 3, 5, 6)
BAD_SLOTS = (0, 2, 4)
SAMPLINGS = (
    SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=3, logprobs=True),
    SamplingParams(max_tokens=9, logprobs=True),
    SamplingParams(max_tokens=9, temperature=1.3, top_k=5, min_p=0.01, repetition_penalty=1.4, min_tokens=3, seed=4),
)


def build(model: TinyModel) -> TinyEngine:
    """A backend whose pool holds the same random KV everywhere."""
    engine = TinyEngine(model, LIMITS)
    engine.ops.kv_pool.normal_(generator=torch.Generator().manual_seed(0))
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


def poison_blocks(engine: TinyEngine) -> None:
    """All that the good requests do not own, the scratch block included, and the stale ends of their own blocks."""
    block_size = LIMITS.block_size
    is_owned = torch.zeros(LIMITS.num_blocks * block_size, dtype=torch.bool)
    for slot in GOOD_SLOTS:
        start, _, block_ids = ROWS[slot]
        for position in range(start):
            is_owned[block_ids[position // block_size] * block_size + position % block_size] = True
    engine.ops.kv_pool[:, :, ~is_owned] = float("nan")


def poison_buffers(engine: TinyEngine) -> None:
    for name in ("residual", "normed", "delta", "qkv", "attended", "gate_up", "gated", "sampled", "logits"):
        getattr(engine.ops._largest, name).fill_(float("nan"))


@pytest.mark.parametrize("poison", [poison_blocks, poison_buffers])
def test_poisoned_neighbours_change_no_bit(model: TinyModel, poison: Callable[[TinyEngine], None]) -> None:
    clean_logits, clean = submit(build(model))
    engine = build(model)
    poison(engine)
    logits, result = submit(engine)
    good_rows = [row for row, slot in enumerate(ROWS) if slot in GOOD_SLOTS]
    assert torch.equal(logits[good_rows], clean_logits[good_rows])
    assert torch.isfinite(clean_logits).all()
    for row in good_rows:
        assert result.tokens[row].is_finite
        assert result.tokens[row].token_id == clean.tokens[row].token_id
        assert repr(result.tokens[row].logprob) == repr(clean.tokens[row].logprob)


def test_request_with_poisoned_kv_is_flagged_with_an_id_that_exists(model: TinyModel) -> None:
    engine = build(model)
    poison_blocks(engine)
    _, result = submit(engine)
    for row, slot in enumerate(ROWS):
        assert result.tokens[row].is_finite == (slot in GOOD_SLOTS)
        assert 0 <= result.tokens[row].token_id < model.facts.vocab_size
    # The id of a flagged row may be the next step's input before the host knows: it must not do harm.
    start, _, block_ids = ROWS[0]
    chunk = TokenChunk(0, 100, start + 1, 1, (), block_ids, samples=True)
    assert not engine.runner.submit(StepPlan(2, (), (chunk,))).wait().tokens[0].is_finite


class GradientWatch(TorchDispatchMode):
    """Counts operations, and those whose results know a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.offenders: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and (tensor.requires_grad or tensor.grad_fn is not None):
                self.offenders.append(str(func))
        if not torch.is_inference_mode_enabled():
            self.offenders.append(f"{func} outside inference mode")
        return result


def test_no_tensor_of_a_step_has_a_grad_fn(model: TinyModel) -> None:
    engine = build(model)
    with torch.enable_grad(), GradientWatch() as watch:
        engine.runner.submit(mixed_plan())
    assert watch.num_operations > 100
    assert watch.offenders == []
    assert all(not weight.requires_grad for weight in engine.ops.weights.values())
