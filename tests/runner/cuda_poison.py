"""NaN in everything that some requests of one mixed batch do not own, for the cuda backend on any driver."""

from collections.abc import Callable
from dataclasses import fields

import torch

from server.runner.model_runner import ModelRunner
from server.scheduler.plan import StepResult
from tests.runner.cuda_steps import TORCH_DTYPES, RecordingCudaOperations, TinyWeights
from tests.runner.poison import GOOD_SLOTS, ROWS, mixed_plan, rows_of_good_requests
from tests.runner.tiny_engine import EOS_ID


def poison_blocks(ops: RecordingCudaOperations) -> None:
    """All that the good requests do not own."""
    pool = ops.read(ops.kv_pool)
    pool[:, :, ~rows_of_good_requests()] = float("nan")
    ops.write(ops.kv_pool, pool)


def poison_buffers(ops: RecordingCudaOperations) -> None:
    """Every activation."""
    _fill_activations(ops, 0xFF)


def no_poison(ops: RecordingCudaOperations) -> None:
    """Nothing from earlier steps either."""
    _fill_activations(ops, 0)


def submit_mixed(
    model: TinyWeights, ops: RecordingCudaOperations, poison: Callable[[RecordingCudaOperations], None]
) -> StepResult:
    """The mixed batch on a pool that holds the same random KV everywhere, then the poison."""
    noise = torch.randn(ops.kv_pool.shape, generator=torch.Generator().manual_seed(0))
    ops.write(ops.kv_pool, noise.to(TORCH_DTYPES[ops.kv_pool.dtype]))
    poison(ops)
    return ModelRunner(model.facts, ops, (EOS_ID,)).submit(mixed_plan()).wait()


def assert_rows_are_independent(model: TinyWeights, ops: RecordingCudaOperations) -> None:
    """Of a batch of fixed shape, poison changes no bit of the rows that it does not belong to."""
    clean, poisoned, buffers_poisoned = (
        submit_mixed(model, ops, poison) for poison in (no_poison, poison_blocks, poison_buffers)
    )
    good_rows = [row for row, slot in enumerate(ROWS) if slot in GOOD_SLOTS]
    clean_logits, logits, logits_of_poisoned_buffers = ops.recorded[-3:]
    assert torch.isfinite(clean_logits).all()
    assert torch.equal(logits[good_rows], clean_logits[good_rows])
    assert torch.equal(logits_of_poisoned_buffers, clean_logits)
    assert repr(buffers_poisoned) == repr(clean)  # NaN, which stands for a logprob not asked for, equals nothing
    for row, slot in enumerate(ROWS):
        assert poisoned.is_finite[row] == (slot in GOOD_SLOTS)
        assert 0 <= poisoned.token_ids[row] < model.facts.vocab_size
        if slot in GOOD_SLOTS:
            assert poisoned.token_ids[row] == clean.token_ids[row]
            assert repr(poisoned.logprobs[row]) == repr(clean.logprobs[row])


def _fill_activations(ops: RecordingCudaOperations, value: int) -> None:
    for field in fields(ops._largest):
        buffer = getattr(ops._largest, field.name)
        ops.driver.fill_async(buffer.address, value, buffer.num_bytes, ops.stream)
