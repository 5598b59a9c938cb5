"""A step on a GPU: no wait for the device, rows independent to the bit, memory as announced, draws as on a CPU."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from server.engine.messages import SamplingParams
from server.ops.torch.sampler import SlotTable, choose
from server.ops.torch.sizes import activation_bound_bytes
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.ops.test_sampler import EVERYTHING, every_kind
from tests.runner.poison import GOOD_SLOTS, ROWS, build, mixed_plan, poison_blocks, poison_buffers, submit
from tests.runner.tiny_engine import TinyEngine, TinyModel, batch_limits


@pytest.mark.parametrize("poison", [poison_blocks, poison_buffers])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_poisoned_neighbours_change_no_bit(
    request: pytest.FixtureRequest, dtype: str, poison: Callable[[TinyEngine], None]
) -> None:
    model = request.getfixturevalue("qwen2_bf16" if dtype == "bfloat16" else "qwen2_fp32")
    clean_logits, clean = submit(build(model))
    engine = build(model)
    poison(engine)
    logits, result = submit(engine)
    good_rows = [row for row, slot in enumerate(ROWS) if slot in GOOD_SLOTS]
    assert torch.isfinite(clean_logits).all()
    assert torch.equal(logits[good_rows], clean_logits[good_rows])
    assert [result.token_ids[row] for row in good_rows] == [clean.token_ids[row] for row in good_rows]


# Setting the mode warns that it does not detect every wait.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_submit_never_waits_for_the_device(qwen2_bf16: TinyModel) -> None:
    engine = build(qwen2_bf16)
    submit(engine)
    decode = tuple(
        TokenChunk(slot, 100 + slot, start + length, 1, (), block_ids, samples=True)
        for slot, (start, length, block_ids) in ROWS.items()
    )
    engine.runner.submit(StepPlan(2, (), decode)).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [engine.runner.submit(mixed_plan()), engine.runner.submit(StepPlan(3, (), decode))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(all(step.wait().is_finite) for step in pending)
    assert all(step.is_done() for step in pending)


def test_the_largest_step_stays_within_the_announced_memory(qwen2_bf16: TinyModel) -> None:
    limits = batch_limits(max_batched_tokens=2048, max_num_requests=256, num_blocks=256 * 32 + 1)
    sampling = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        min_tokens=5,
        logprobs=True,
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = TinyEngine(qwen2_bf16, limits)
    peaks = []
    for step in range(3):
        chunks = tuple(
            TokenChunk(slot, slot, 240, 1, (1,), tuple(range(1 + 32 * slot, 33 + 32 * slot)), samples=True)
            for slot in range(248)
        ) + tuple(
            TokenChunk(slot, slot, 0, 225, (1,) * 225, tuple(range(1 + 32 * slot, 33 + 32 * slot)), samples=True)
            for slot in range(248, 256)
        )
        resets = tuple(SlotReset(slot, slot, (1, 2, 3), 3, sampling) for slot in range(256))
        engine.runner.submit(StepPlan(step, resets, chunks)).wait()
        engine.ops.recorded.clear()
        peaks.append(torch.cuda.max_memory_allocated())
    pool_bytes = engine.ops.kv_pool.numel() * engine.ops.kv_pool.element_size()
    assert peaks[0] - before - pool_bytes <= activation_bound_bytes(qwen2_bf16.facts, limits)
    assert peaks[2] == peaks[1], "memory grows from step to step"


def test_draws_are_those_of_the_cpu(device: str) -> None:
    random = Random(11)
    rows = every_kind(256, random)
    logits = torch.randn(256, 300, generator=torch.Generator().manual_seed(0)) * 3
    positions = torch.tensor([random.choice([3, 39, 40, 1000]) for _ in rows])
    random_rows = torch.tensor([index for index, row in enumerate(rows) if row.is_random])
    chosen = []
    for place in ("cpu", device):
        table = SlotTable(len(rows), 300, torch.device(place))
        for slot, row in enumerate(rows):
            table.reset(slot, row)
        params = table.params(torch.arange(len(rows), device=place))
        result = choose(
            logits.to(place), table.token_flags, params, positions.to(place), random_rows.to(place), EVERYTHING
        )
        chosen.append(result.token_ids.cpu())
    assert (chosen[0] != chosen[1]).sum() <= 1  # 0.1 %, a near-tie
