"""Whole steps of the cuda backend on a GPU: held to the torch backend, independent, as large as announced."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from msgspec.structs import replace as replace_params

from server.engine.messages import SamplingParams
from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda import attention
from server.ops.cuda.driver import KernelImage
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.cuda.sizes import GRAPH_BYTES, activation_bound_bytes, kv_pool_spec
from server.ops.interface import BatchLimits, StepGraph, StepShape, StepSize
from server.runner.graphs import StepGraphs
from server.runner.model_runner import ModelRunner
from server.weights.layout import weight_layout
from tests.gpu.accuracy import measure
from tests.runner.cuda_poison import assert_rows_are_independent
from tests.runner.cuda_steps import RecordingCudaOperations, TinyWeights, compare, run_requests, tiny_weights
from tests.runner.poison import LIMITS as POISON_LIMITS
from tests.runner.tiny_engine import EOS_ID, batch_limits
from tests.tiny_models import FAMILIES, Family, write_tiny_model

VOCAB_SIZE = 320
LIMITS = batch_limits(max_batched_tokens=64, max_num_requests=8, num_blocks=257)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=True)
DRAWN = SamplingParams(
    max_tokens=20,
    ignore_eos=True,
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    min_tokens=10,
    stop_token_ids=(5, 6),
    seed=7,
    logprobs=True,
)
ALLOCATION_BYTES = 2 << 20  # the driver gives memory in pieces of this size
CODE_BYTES = 8 << 20  # of the modules that each build loads


class Gpu(NamedTuple):
    driver: NvidiaDriver
    images: tuple[KernelImage, ...]

    def build(self, model: TinyWeights, limits: BatchLimits = LIMITS) -> RecordingCudaOperations:
        return RecordingCudaOperations(model, limits, self.driver, self.images)


@pytest.fixture(scope="module")
def gpu(device: str) -> Gpu:
    driver = NvidiaDriver.open()
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"{built_folder()} is missing: run scripts/build-kernels")
    return Gpu(driver, manifest.images(driver.facts.arch))


@pytest.fixture(autouse=True)
def attached(gpu: Gpu) -> None:
    gpu.driver.attach_thread()  # other tests' torch may have made another context current


@pytest.fixture(scope="module")
def small() -> TinyWeights:
    return model_of("qwen2", "bfloat16", 64, 4)


def model_of(family: Family, dtype: str, head_dim: int, group_size: int, **options: int) -> TinyWeights:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 4, "vocab_size": VOCAB_SIZE} | options
    return tiny_weights(family, dtype=dtype, num_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim, **sizes)


def prompt_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def waves() -> Sequence[Sequence[tuple[list[int], SamplingParams]]]:
    """Every kind of request together, then some that find their prefix."""
    first = [
        (prompt_of(length, length), sampling)
        for length, sampling in zip([1, 2, 7, 8, 9, 40, 75, 130], [GREEDY, DRAWN] * 4, strict=True)
    ]
    return [first, [([*prompt_of(130, 130), 1], GREEDY), ([*prompt_of(75, 75), 2, 3], DRAWN)]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", range(1, 9))
def test_ragged_batches_of_every_group_size(gpu: Gpu, dtype: str, head_dim: int, group_size: int) -> None:
    model = model_of(FAMILIES[group_size % len(FAMILIES)], dtype, head_dim, group_size)
    ops = gpu.build(model)
    run = run_requests(model, ops, waves(), num_in_flight=2)
    assert any(plan.chunks[0].num_tokens == 1 and plan.chunks[-1].num_tokens > 1 for plan in run.plans)
    assert any(chunk.input_on_device for plan in run.plans for chunk in plan.chunks)
    compare(model, LIMITS, run, "cuda").assert_good()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_of_every_family(gpu: Gpu, dtype: str, family: Family) -> None:
    model = model_of(family, dtype, 128, 4)
    run = run_requests(model, gpu.build(model), waves(), num_in_flight=2)
    compare(model, LIMITS, run, "cuda").assert_good()


def test_biases_of_every_projection(gpu: Gpu) -> None:
    model = tiny_weights(
        "llama3", dtype="bfloat16", num_heads=4, num_kv_heads=2, head_dim=64, num_layers=4, attention_bias=True
    )
    run = run_requests(model, gpu.build(model), waves(), num_in_flight=2)
    compare(model, LIMITS, run, "cuda").assert_good()


def test_slots_and_blocks_that_change_hands(gpu: Gpu, small: TinyWeights) -> None:
    limits = batch_limits(max_batched_tokens=64, max_num_requests=6, num_blocks=1 + 40)
    kinds = [
        GREEDY,
        DRAWN,
        replace_params(GREEDY, repetition_penalty=1.5),
        replace_params(DRAWN, top_k=0, min_p=0.0),
        replace_params(GREEDY, min_tokens=5, ignore_eos=False),
        replace_params(DRAWN, top_p=1.0, repetition_penalty=0.8),
        replace_params(GREEDY, temperature=1.5, logprobs=False),
    ]
    requests = [
        (prompt_of(3 * number + 1, number % 5), replace_params(kinds[number % len(kinds)], seed=number))
        for number in range(24)
    ]
    run = run_requests(small, gpu.build(small, limits), [requests], num_in_flight=2)
    assert sum(len(plan.resets) for plan in run.plans) > len(requests), "nobody was preempted"
    compare(small, limits, run, "cuda").assert_good()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_poisoned_neighbours_change_no_bit(gpu: Gpu, dtype: str) -> None:
    model = model_of("qwen3", dtype, 64, 4)
    assert_rows_are_independent(model, gpu.build(model, POISON_LIMITS))


def test_a_replayed_step_is_the_step_itself(gpu: Gpu, small: TinyWeights) -> None:
    requests = [[(prompt_of(5, 0), GREEDY)], [(prompt_of(60, 1), replace_params(DRAWN, max_tokens=40))]]
    recorded, eager = gpu.build(small), gpu.build(small)
    eager.max_graph_requests = 0
    replayed, expected = run_requests(small, recorded, requests), run_requests(small, eager, requests)
    assert replayed.results == expected.results
    assert all(map(torch.equal, replayed.logits, expected.logits))


def test_replayed_mixed_steps_are_those_that_are_issued_one_by_one(
    gpu: Gpu, small: TinyWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit at the same padding; and as accurate as steps without."""
    limits = replace(LIMITS, max_mixed_tokens=64)
    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "_may_record", lambda *_: False)
        issued = run_requests(small, gpu.build(small, limits), waves(), num_in_flight=2)
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    sizes: list[StepSize] = []
    ops = gpu.build(small, limits)
    replay = ops.replay

    def counted(graph: StepGraph, shape: StepShape) -> None:
        sizes.append(shape.size)
        replay(graph, shape)

    monkeypatch.setattr(ops, "replay", counted)
    replayed = run_requests(small, ops, waves(), num_in_flight=2)
    assert any(size.num_prefills for size in sizes), "no mixed step was replayed"
    assert replayed.results == issued.results
    assert all(map(torch.equal, replayed.logits, issued.logits))
    compare(small, limits, replayed, "cuda").assert_good()


def test_chunks_may_be_attended_beside_decodes(gpu: Gpu, small: TinyWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, issued one by one and replayed."""
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    limits = replace(LIMITS, max_mixed_tokens=64)
    runs = []
    for branches in (False, True):
        monkeypatch.setattr(attention, "BRANCHES", branches)
        runs.append(run_requests(small, gpu.build(small, limits), waves(), num_in_flight=2))
    assert runs[0].results == runs[1].results
    assert all(map(torch.equal, runs[0].logits, runs[1].logits))


def test_poisoned_neighbours_and_padding_change_no_bit(gpu: Gpu) -> None:
    model = model_of("qwen3", "bfloat16", 64, 4)
    ops = gpu.build(model, replace(POISON_LIMITS, max_mixed_tokens=96))
    assert_rows_are_independent(model, ops)
    assert ops._shape.size.num_tokens == 64


def test_memory_is_what_was_announced(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    """With a graph of every size, of a model as deep as a real one."""
    model = model_of("qwen2", "bfloat16", 128, 7, num_layers=28)
    limits = BatchLimits(2048, 256, 4096, 257, 16, max_mixed_tokens=512)
    run_requests(model, gpu.build(model), waves()[:1])  # what libraries allocate once is theirs
    before, _ = gpu.driver.memory_info()
    ops = gpu.build(model, limits)
    built, _ = gpu.driver.memory_info()
    runner = ModelRunner(model.facts, ops, (EOS_ID,))
    while runner.prepare():
        pass
    ops.driver.synchronize(ops.stream)
    after, _ = gpu.driver.memory_info()
    num_graphs = runner.num_graphs
    assert num_graphs == runner.num_graphs_wanted > 10
    kib_each = (built - after) / num_graphs / 1024
    with capsys.disabled():
        print(f"\n{num_graphs} graphs of {model.facts.num_layers} layers: {kib_each:.0f} KiB each")  # noqa: T201
    weights_bytes, pool_bytes = weight_layout(model.facts).total_bytes, kv_pool_spec(model.facts, limits).num_bytes
    announced = weights_bytes + pool_bytes + activation_bound_bytes(model.facts, limits)
    assert before - built <= announced + 3 * ALLOCATION_BYTES + CODE_BYTES
    assert built - after <= num_graphs * GRAPH_BYTES


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_accurate_as_transformers(tmp_path: Path, gpu: Gpu, family: Family) -> None:
    folder = write_tiny_model(
        tmp_path, family, dtype="bfloat16", num_layers=4, hidden_size=256, intermediate_size=256, head_dim=64
    )
    assert measure(folder, num_prompts=8, num_tokens=100, device="cuda", backend="cuda")
