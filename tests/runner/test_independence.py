"""Rows are independent, exactly: in a batch of fixed shape, neighbours full of NaN change no bit of a row."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from server.scheduler.plan import StepPlan, TokenChunk
from tests.runner.poison import GOOD_SLOTS, ROWS, build, mixed_plan, poison_blocks, poison_buffers, submit
from tests.runner.tiny_engine import TinyEngine, TinyModel


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
        assert result.is_finite[row]
        assert result.token_ids[row] == clean.token_ids[row]
        assert repr(result.logprobs[row]) == repr(clean.logprobs[row])


def test_request_with_poisoned_kv_is_flagged_with_an_id_that_exists(model: TinyModel) -> None:
    engine = build(model)
    poison_blocks(engine)
    _, result = submit(engine)
    for row, slot in enumerate(ROWS):
        assert result.is_finite[row] == (slot in GOOD_SLOTS)
        assert 0 <= result.token_ids[row] < model.facts.vocab_size
    # The id of a flagged row may be the next step's input before the host knows: it must not do harm.
    start, _, block_ids = ROWS[0]
    chunk = TokenChunk(0, 100, start + 1, 1, (), block_ids, samples=True)
    assert not engine.runner.submit(StepPlan(2, (), (chunk,))).wait().is_finite[0]


class GradientWatch(TorchDispatchMode):
    """Counts operations, and those whose results know a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.offenders: list[str] = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
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
