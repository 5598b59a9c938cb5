"""Whole steps of the cuda backend in host memory: no farther from fp32 than the torch backend, whatever is batched."""

import math
from random import Random

import pytest
import torch
from msgspec.structs import replace as replace_params

from server.engine.messages import SamplingParams
from server.ops.cuda.arena import Arena, BufferSpec
from server.ops.cuda.buffer import ITEM_BYTES, Buffer
from server.ops.cuda.driver import DriverError
from server.ops.cuda.operations import CudaOperations
from server.ops.interface import BatchLimits
from server.runner.model_runner import ModelRunner
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.runner.cuda_poison import assert_rows_are_independent, no_poison, submit_mixed
from tests.runner.cuda_steps import RecordingCudaOperations, TinyWeights, compare, run_requests, tiny_weights
from tests.runner.poison import LIMITS as POISON_LIMITS
from tests.runner.tiny_engine import EOS_ID, batch_limits

VOCAB_SIZE = 96
LIMITS = batch_limits(max_batched_tokens=24, max_num_requests=4, num_blocks=33)
# Between them: bias of q, k, v and of the output, norms of q and k, a tied head, scaled rotations; groups of 1 .. 8.
MODELS = {
    "qwen2": tiny_weights("qwen2", num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=VOCAB_SIZE),
    "qwen2.5-tied": tiny_weights("qwen2.5-tied", num_heads=3, num_kv_heads=3, head_dim=64, vocab_size=VOCAB_SIZE),
    "qwen3": tiny_weights("qwen3", num_heads=6, num_kv_heads=2, head_dim=128, vocab_size=VOCAB_SIZE),
    "llama3": tiny_weights("llama3", num_heads=8, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE),
    "llama3, biases": tiny_weights(
        "llama3", num_heads=7, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE, attention_bias=True
    ),
}
OTHERS = [name for name in MODELS if name != "qwen3"]
SMALL = tiny_weights("qwen2", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=True)
DRAWN = SamplingParams(
    max_tokens=4,
    ignore_eos=True,
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    min_tokens=3,
    stop_token_ids=(5, 6),
    seed=7,
    logprobs=True,
)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def build(model: TinyWeights, limits: BatchLimits = LIMITS) -> RecordingCudaOperations:
    return RecordingCudaOperations(model, limits, HostDriver(), host_images())


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_ragged_batches_of_chunks_and_decodes(name: str) -> None:
    model = MODELS[name]
    ops = build(model)
    first = [(prompt_of(1), GREEDY), (prompt_of(9, 1), DRAWN), (prompt_of(27, 2), GREEDY)]
    then = [([*prompt_of(27, 2), 1], GREEDY)]
    run = run_requests(model, ops, [first, then], num_in_flight=2)
    assert any(plan.chunks[0].num_tokens == 1 and plan.chunks[-1].num_tokens > 1 for plan in run.plans)
    assert any(chunk.input_on_device for plan in run.plans for chunk in plan.chunks)
    assert any(chunk.start == 24 and chunk.num_tokens == 4 for plan in run.plans for chunk in plan.chunks)
    assert ops.driver.calls["launch_graph_async"] > 0
    compare(model, LIMITS, run).assert_good()


@pytest.mark.slow
def test_slots_and_blocks_that_change_hands() -> None:
    """Preemption, prefix hits, and every kind of sampling in slots that served another kind before."""
    limits = batch_limits(max_batched_tokens=24, max_num_requests=4, num_blocks=1 + 8)
    requests = [
        (prompt_of(3 * number + 1, number % 4), sampling)
        for number, sampling in enumerate(
            [
                replace_params(GREEDY, max_tokens=12),
                replace_params(DRAWN, max_tokens=14),
                replace_params(GREEDY, max_tokens=12, repetition_penalty=1.5),
                replace_params(DRAWN, max_tokens=9, top_k=0, min_p=0.0),
                replace_params(GREEDY, max_tokens=6, min_tokens=5, ignore_eos=False),
                replace_params(DRAWN, max_tokens=9, top_p=1.0, repetition_penalty=0.8),
                replace_params(GREEDY, max_tokens=8, temperature=1.5, seed=3, logprobs=False),
            ]
        )
    ]
    run = run_requests(SMALL, build(SMALL, limits), [requests], num_in_flight=2)
    assert max(chunk.start for plan in run.plans for chunk in plan.chunks) > 20
    assert sum(len(plan.resets) for plan in run.plans) > len(requests), "nobody was preempted"
    compare(SMALL, limits, run).assert_good()


def test_a_replayed_step_is_the_step_itself() -> None:
    """One sampling at recording, others at replay; contexts that cross blocks."""
    waves = [[(prompt_of(5), GREEDY)], [(prompt_of(6, 1), replace_params(DRAWN, max_tokens=6))]]
    recorded = build(SMALL)
    replayed = run_requests(SMALL, recorded, waves)
    eager = build(SMALL)
    eager.max_graph_requests = 0
    expected = run_requests(SMALL, eager, waves)
    assert (recorded.driver.calls["begin_capture"], recorded.driver.calls["launch_graph_async"]) == (1, 6)
    assert eager.driver.calls["begin_capture"] == 0
    assert replayed.results == expected.results
    assert all(map(torch.equal, replayed.logits, expected.logits))


def test_a_step_is_never_waited_for_while_it_is_issued() -> None:
    """One copy there, one back, one call for a recorded step; what is waited for is two steps old."""
    driver = HostDriver()
    ops = RecordingCudaOperations(SMALL, LIMITS, driver, host_images())
    ops.fetch_tokens = lambda: CudaOperations.fetch_tokens(ops)  # type: ignore[method-assign]
    runner = ModelRunner(SMALL.facts, ops, (EOS_ID,))
    runner.submit(StepPlan(1, (SlotReset(0, 0, (4,), 1, GREEDY),), (TokenChunk(0, 0, 0, 1, (4,), (1,), samples=True),)))
    for start in (1, 2):
        before = driver.calls.copy()
        runner.submit(StepPlan(2, (), (TokenChunk(0, 0, start, 1, (), (1,), samples=True),)))
        calls = driver.calls - before
    assert calls == {
        "wait": 1,
        "copy_to_device_async": 1,
        "launch_graph_async": 1,
        "copy_to_host_async": 1,
        "record": 2,
    }


@pytest.mark.slow
def test_padding_rows_change_no_bit_of_a_request() -> None:
    limits = batch_limits(max_batched_tokens=24, max_num_requests=5, num_blocks=33)
    waves = [[(prompt_of(5 + number, number), replace_params(DRAWN, seed=number)) for number in range(3)]]
    alone, padded = build(SMALL, limits), build(SMALL, limits)
    alone.max_graph_requests = 0
    expected, run = run_requests(SMALL, alone, waves), run_requests(SMALL, padded, waves)
    assert padded._shape.size.num_samples == 4
    assert [rows.shape[0] for rows in padded.recorded][-2:] == [3, 3]
    assert [result.token_ids for result in run.results] == [result.token_ids for result in expected.results]
    # The GEMM of another number of rows may sum in another order.
    torch.testing.assert_close(torch.cat(run.logits), torch.cat(expected.logits), rtol=0, atol=5e-3)


# Rows are independent


def test_poisoned_neighbours_change_no_bit() -> None:
    ops = build(SMALL, POISON_LIMITS)
    assert_rows_are_independent(SMALL, ops)


def test_no_kernel_reads_or_writes_beyond_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer has memory of its own here, around which nothing is allocated."""

    def take(arena: Arena, spec: BufferSpec) -> Buffer:
        num_bytes = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        return Buffer(driver.allocate(num_bytes), spec.shape, spec.dtype, arena)

    monkeypatch.setattr(Arena, "take", take)
    driver = HostDriver()
    ops = RecordingCudaOperations(SMALL, POISON_LIMITS, driver, host_images())
    assert all(submit_mixed(SMALL, ops, no_poison).is_finite)


# Errors


def test_an_error_of_any_call_comes_out_of_its_step() -> None:
    reset = SlotReset(0, 0, tuple(prompt_of(3)), 3, DRAWN)
    chunks = (
        TokenChunk(1, 1, 0, 1, (4,), (1,), samples=True),
        TokenChunk(0, 0, 0, 3, tuple(prompt_of(3)), (2,), samples=True),
    )
    plan = StepPlan(1, (SlotReset(1, 1, (4,), 1, GREEDY), reset), chunks)
    ops = build(SMALL)
    runner = ModelRunner(SMALL.facts, ops, (EOS_ID,))
    expected = runner.submit(plan).wait()
    driver = ops.driver
    before = driver.num_calls
    assert runner.submit(plan).wait() == expected
    num_calls = driver.num_calls - before
    assert num_calls > 25
    for failing in range(1, num_calls + 1):
        driver.fail_at(failing)
        with pytest.raises(DriverError, match="a call that a test lets fail"):
            runner.submit(plan).wait()
    # Nothing is left of those steps that would disturb another.
    assert runner.submit(plan).wait() == expected
    assert driver.calls["free"] == 0


def test_an_error_of_a_recording_comes_out_and_leaves_no_capture() -> None:
    ops = build(SMALL)
    runner = ModelRunner(SMALL.facts, ops, (EOS_ID,))
    assert runner.prepare(), "runs the step once"
    for method in ("begin_capture", "launch_async", "gemm_async", "end_capture"):
        ops.driver.fail_at(1, method=method)
        with pytest.raises(DriverError, match="a call that a test lets fail"):
            runner.prepare()
        assert runner.num_graphs == 0
    assert runner.prepare()
    assert runner.num_graphs == 1
