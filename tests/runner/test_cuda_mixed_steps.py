"""Steps that hold prompts, padded, recorded and replayed on the cuda backend in host memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from msgspec.structs import replace as replace_params

from server.engine.messages import SamplingParams
from server.ops.cuda import attention
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DriverError
from server.ops.cuda.operations import CudaOperations
from server.ops.interface import Activations, BatchLimits, StepGraph, StepShape, StepSize
from server.runner.graphs import StepGraphs
from server.runner.model_runner import ModelRunner
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.runner.cuda_poison import assert_rows_are_independent
from tests.runner.cuda_steps import RecordingCudaOperations, Run, TinyWeights, compare, run_requests, tiny_weights
from tests.runner.poison import LIMITS as POISON_LIMITS
from tests.runner.tiny_engine import EOS_ID, batch_limits

VOCAB_SIZE = 96
SMALL = tiny_weights("qwen2", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE)
LIMITS = replace(batch_limits(max_batched_tokens=24, max_num_requests=4, num_blocks=33), max_mixed_tokens=24)
MIXED = StepSize(num_tokens=24, num_decodes=4, num_prefills=4, num_samples=4)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=True)
DRAWN = SamplingParams(
    max_tokens=4, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3, seed=7, logprobs=True
)


def build(limits: BatchLimits = LIMITS, model: TinyWeights = SMALL) -> RecordingCudaOperations:
    return RecordingCudaOperations(model, limits, HostDriver(), host_images())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def waves() -> list[list[tuple[list[int], SamplingParams]]]:
    """Prompts in one chunk and in several, beside decodes and alone, in slots of others; tables of up to 10 blocks."""
    first = [(prompt_of(length, length), sampling) for length, sampling in ((3, GREEDY), (1, DRAWN), (30, GREEDY))]
    return [first, [(prompt_of(5), replace_params(DRAWN, max_tokens=6)), (prompt_of(70, 1), GREEDY)]]


class CountingOperations(RecordingCudaOperations):
    """Notes the sizes of what is recorded and replayed."""

    def __init__(self, *args: object) -> None:
        self.recorded_sizes: list[StepSize] = []
        self.replayed_sizes: list[StepSize] = []
        super().__init__(*args)  # type: ignore[arg-type]

    def capture(self, shape: StepShape, run: Callable[[Activations[Buffer]], None]) -> StepGraph:
        self.recorded_sizes.append(shape.size)
        return super().capture(shape, run)

    def replay(self, graph: StepGraph, shape: StepShape) -> None:
        self.replayed_sizes.append(shape.size)
        super().replay(graph, shape)


@dataclass(frozen=True)
class Runs:
    """The same requests with exact steps, with padded steps issued one by one, and with padded steps replayed."""

    exact: Run
    issued: Run
    replayed: Run
    ops: CountingOperations  # of the last


@pytest.fixture(scope="module")
def runs() -> Runs:
    exact = build()
    exact.max_graph_requests = 0
    ops = CountingOperations(SMALL, LIMITS, HostDriver(), host_images())
    with pytest.MonkeyPatch.context() as patch:
        expected = run_requests(SMALL, exact, waves())
        patch.setattr(StepGraphs, "_may_record", lambda *_: False)
        issued = run_requests(SMALL, build(), waves())
        make = ModelRunner.__init__

        def make_prepared(runner: ModelRunner, *args: object) -> None:  # type: ignore[type-arg]
            make(runner, *args)  # type: ignore[arg-type]
            while runner.prepare():
                pass

        patch.setattr(ModelRunner, "__init__", make_prepared)
        return Runs(expected, issued, run_requests(SMALL, ops, waves()), ops)


def test_replayed_steps_are_those_that_are_issued_one_by_one(runs: Runs) -> None:
    """To the bit, from a recording of nobody's step."""
    assert runs.ops.recorded_sizes == [StepSize(n, n, 0, n) for n in (1, 2, 4)] + [MIXED]
    assert runs.ops.replayed_sizes.count(MIXED) > 4
    assert len(runs.ops.replayed_sizes) == len(runs.replayed.plans), "a step was not replayed"
    assert runs.replayed.results == runs.issued.results
    assert all(map(torch.equal, runs.replayed.logits, runs.issued.logits))
    assert (
        len({plan.chunks[0].num_tokens == 1 and plan.num_tokens > len(plan.chunks) for plan in runs.issued.plans}) == 2
    )


def test_replayed_steps_are_as_accurate_as_the_torch_backend(runs: Runs) -> None:
    compare(SMALL, LIMITS, runs.replayed).assert_good()


def test_padding_changes_no_token(runs: Runs) -> None:
    assert [result.token_ids for result in runs.issued.results] == [result.token_ids for result in runs.exact.results]
    # The GEMM of another number of rows may sum in another order.
    torch.testing.assert_close(torch.cat(runs.issued.logits), torch.cat(runs.exact.logits), rtol=0, atol=5e-3)


def test_poisoned_neighbours_and_padding_change_no_bit() -> None:
    ops = build(replace(POISON_LIMITS, max_mixed_tokens=96))
    assert_rows_are_independent(SMALL, ops)
    assert ops._shape.size == StepSize(num_tokens=64, num_decodes=8, num_prefills=8, num_samples=8)


def chunk(slot: int, start: int, length: int, num_blocks: int = 2) -> TokenChunk:
    block_ids = tuple(8 * slot + 1 + block for block in range(num_blocks))
    return TokenChunk(slot, slot, start, length, tuple(prompt_of(length, slot)), block_ids, samples=True)


RESETS = tuple(SlotReset(slot, slot, (1,), 1, GREEDY) for slot in range(4))


@pytest.mark.parametrize(("num_tokens", "num_chunks"), [(2, 1), (24, 1), (23, 3), (5, 4), (24, 4)])
def test_a_step_at_every_border_of_its_size(num_tokens: int, num_chunks: int) -> None:
    decodes = [chunk(slot, 7 + slot, 1) for slot in range(num_chunks - 1)]
    prompt = chunk(num_chunks - 1, 3, num_tokens - num_chunks + 1, num_blocks=4)
    plan = StepPlan(1, RESETS, (*decodes, prompt))
    padded, exact = build(), build()
    exact.max_graph_requests = 0
    noise = torch.randn(padded.kv_pool.shape, generator=torch.Generator().manual_seed(0)).half()
    for ops in (padded, exact):
        ops.write(ops.kv_pool, noise)
    results = [ModelRunner(SMALL.facts, ops, (EOS_ID,)).submit(plan).wait() for ops in (padded, exact)]
    assert padded._shape.size == MIXED
    assert results[0].token_ids == results[1].token_ids
    assert len(results[0].token_ids) == num_chunks
    torch.testing.assert_close(padded.recorded[0], exact.recorded[0], rtol=0, atol=5e-3)


def test_chunks_may_be_attended_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a second stream, recorded and not: the same bits, and every stream is joined again, also after an error."""
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    plans = [StepPlan(step, RESETS, (chunk(2, 0, 1), chunk(0, 0, 9), chunk(1, 0, 3))) for step in (1, 2, 3)]
    expected = build()
    runner = ModelRunner(SMALL.facts, expected, (EOS_ID,))
    results = [runner.submit(plan).wait() for plan in plans]
    monkeypatch.setattr(attention, "BRANCHES", True)
    ops = build()
    runner = ModelRunner(SMALL.facts, ops, (EOS_ID,))
    assert runner.submit(plans[0]).wait() == results[0]
    waits = ops.driver.calls["wait_on_stream_async"]
    assert waits == 2, "a fork and a join of the one layer"
    for failing in ("wait_on_stream_async", "launch_async", "end_capture"):
        ops.driver.fail_at(2 if failing == "launch_async" else 1, method=failing)
        with pytest.raises(DriverError, match="a call that a test lets fail"):
            runner.submit(plans[1])
    assert runner.submit(plans[1]).wait() == results[1]
    assert runner.submit(plans[2]).wait() == results[2]
    assert runner.num_graphs == 1
    assert all(map(torch.equal, ops.recorded, expected.recorded))


def test_a_replayed_mixed_step_is_few_calls_and_few_bytes() -> None:
    """One copy there of what the step uses, one call, one copy back."""
    driver = HostDriver()
    ops = RecordingCudaOperations(SMALL, LIMITS, driver, host_images())
    ops.fetch_tokens = lambda: CudaOperations.fetch_tokens(ops)  # type: ignore[method-assign]
    runner = ModelRunner(SMALL.facts, ops, (EOS_ID,))
    runner.submit(StepPlan(1, RESETS, (chunk(2, 0, 1), chunk(0, 0, 9)))).wait()
    for step in (2, 3):
        calls, num_bytes = driver.calls.copy(), driver.num_copied_bytes
        runner.submit(StepPlan(step, (), (chunk(2, 2, 1), chunk(0, 3, 7))))
        num_bytes = driver.num_copied_bytes - num_bytes
        issued = driver.calls - calls
        assert runner.graph_size == 24
    assert issued == {
        "wait": 1,
        "copy_to_device_async": 1,
        "launch_graph_async": 1,
        "copy_to_host_async": 1,
        "record": 2,
    }
    tables = 3 * 8 * 4  # slots 0 .. 2, 8 columns
    before_tables = ops.inputs.block_tables.address - ops.inputs.header.address
    assert num_bytes == before_tables + tables + ops._sampler.packed.num_bytes
