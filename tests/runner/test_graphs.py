"""Recorded steps: which sizes there are, when they are recorded, and that padding changes no token."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from server.engine.messages import SamplingParams
from server.ops.interface import Activations, BatchLimits, StepGraph, StepShape, StepSize
from server.ops.sampling import SamplingUse
from server.runner.graphs import (
    MAX_GRAPH_PREFILLS,
    MAX_GRAPH_TOKENS,
    MAX_GRAPHS,
    MIN_INTERVAL_S,
    StepGraphs,
    decode_sizes,
    graph_sizes,
)
from tests.runner.tiny_engine import RecordingOperations, TinyEngine, TinyModel, batch_limits

NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


def limits_of(max_batched_tokens: int, max_num_requests: int, max_mixed_tokens: int) -> BatchLimits:
    return BatchLimits(max_batched_tokens, max_num_requests, 1024, 100, 16, max_mixed_tokens)


class CountingBackend:
    """As much of a backend as the policy sees."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.max_graph_requests = limits.max_num_requests
        self.events: list[str] = []

    def run(self, _act: Activations[object]) -> None:
        self.events.append("run")

    def capture(self, shape: StepShape, _run: object) -> StepGraph:
        self.events.append(f"capture {shape.size.num_tokens}")
        return StepGraph(shape.size.num_tokens)

    def replay(self, graph: StepGraph, _shape: StepShape) -> None:
        self.events.append(f"replay {graph}")


def make_graphs(backend: CountingBackend, now: list[float]) -> StepGraphs[object]:
    return StepGraphs(backend, backend.run, lambda: now[0])  # type: ignore[arg-type]


def shape_of(size: StepSize, num_decodes: int) -> StepShape:
    return StepShape((), (), num_decodes, 0, 0, False, NO_SAMPLING, 0, 0, size)


def decode_size(count: int) -> StepSize:
    return StepSize(count, count, 0, count)


@pytest.mark.parametrize("max_requests", [0, 1, 2, 3, 7, 8, 9, 64, 100, 256, 1024])
def test_decode_sizes_rise_to_the_largest_batch_by_at_most_a_quarter(max_requests: int) -> None:
    sizes = decode_sizes(max_requests)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[-1] if sizes else 0) == max_requests
    for below, size in itertools.pairwise(sizes):
        assert size - below <= max(8, size // 4)
    assert len(sizes) <= 30


@pytest.mark.parametrize("max_requests", [0, 1, 7, 8, 9, 100, 256, 1024])
@pytest.mark.parametrize("max_mixed", [0, 24, 64, 100, 256, 512, 2048])
def test_every_step_up_to_the_largest_is_padded_to_a_size_that_holds_it(max_requests: int, max_mixed: int) -> None:
    limits = limits_of(2048, max(1, max_requests), max_mixed)
    sizes = graph_sizes(max_requests, limits)
    assert len(sizes) == len(set(sizes)) <= MAX_GRAPHS
    backend = CountingBackend(limits)
    backend.max_graph_requests = max_requests
    graphs = make_graphs(backend, [0.0])
    for num_decodes, num_prefills, num_prompt_tokens in itertools.product(
        {1, max_requests // 2, max_requests - 1}, (0, 1, 2, MAX_GRAPH_PREFILLS, MAX_GRAPH_PREFILLS + 1), (2, 40, 70)
    ):
        num_chunks = max(0, num_decodes) + num_prefills
        num_tokens = num_chunks + (num_prompt_tokens if num_prefills else 0)
        exact = StepSize(num_tokens, max(0, num_decodes), num_prefills, num_chunks)
        if not 0 < num_chunks <= max_requests:
            continue
        size = graphs.padded_size(exact)
        if num_prefills:
            may_be_recorded = num_tokens <= min(max_mixed, MAX_GRAPH_TOKENS) and num_prefills <= MAX_GRAPH_PREFILLS
            assert (size is not None) == may_be_recorded or len(sizes) == MAX_GRAPHS, exact
        if size is not None:
            assert size in sizes
            assert size.num_tokens >= num_tokens
            assert min(size.num_decodes, size.num_samples) >= num_chunks
            assert (size.num_prefills > 0) == (num_prefills > 0)
            assert size.num_prefills >= num_prefills
            assert size.num_tokens < num_tokens + 128


def test_padding_is_bounded_and_so_is_the_number_of_graphs_of_a_default_service() -> None:
    sizes = graph_sizes(256, limits_of(2048, 256, 256))
    assert [size.num_prefills == 0 for size in sizes] == [True] * 19 + [False] * (len(sizes) - 19)
    assert [(size.num_tokens, size.num_samples) for size in sizes[19:]] == [
        (64, 8), (128, 8), (192, 8), (256, 8), (64, 32), (128, 32), (192, 32), (256, 32),
        (64, 64), (128, 128), (192, 128), (256, 128), (192, 192), (256, 256),
    ]  # fmt: skip


def test_a_size_is_recorded_after_it_has_run_and_not_too_often() -> None:
    now = [0.0]
    backend = CountingBackend(limits_of(4, 4, 0))
    graphs = make_graphs(backend, now)
    for count in (1, 1, 2, 2):
        graphs.run(shape_of(decode_size(count), count), None)  # type: ignore[arg-type]
    assert backend.events == ["run", "capture 1", "replay 1", "run", "run"]
    assert graphs.replayed_size == 1
    now[0] = MIN_INTERVAL_S
    graphs.run(shape_of(decode_size(2), 2), None)  # type: ignore[arg-type]
    assert backend.events[5:] == ["capture 2", "replay 2"]
    assert graphs.replayed_size == 2  # also in the step that recorded it
    assert (graphs.num_graphs, graphs.missing_size) == (2, decode_size(4))
    assert [graphs.padded_size(decode_size(n)) for n in (1, 2, 3, 4, 5)] == [
        decode_size(1), decode_size(2), decode_size(4), decode_size(4), None,
    ]  # fmt: skip


def test_prompts_alone_are_replayed_but_not_recorded_when_they_come() -> None:
    backend = CountingBackend(limits_of(64, 8, 64))
    graphs = make_graphs(backend, [0.0])
    size = graphs.padded_size(StepSize(40, 0, 2, 2))
    assert size == StepSize(64, 8, 8, 8)
    prompts, mixed = shape_of(size, 0), shape_of(size, 5)
    for shape in (prompts, prompts, mixed, prompts):
        graphs.run(shape, None)  # type: ignore[arg-type]
    assert backend.events == ["run", "run", "capture 64", "replay 64", "replay 64"]


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RecordingOperations, "max_graph_requests", 8)
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    return


def run(model: TinyModel, *, max_mixed_tokens: int, prepared: bool) -> tuple[TinyEngine, dict[int, list[int]]]:
    engine = TinyEngine(model, replace(batch_limits(), max_mixed_tokens=max_mixed_tokens), num_in_flight=2)
    while prepared and engine.runner.prepare():
        pass
    assert not prepared or engine.runner.num_graphs == engine.runner.num_graphs_wanted
    for request_id in range(11):
        temperature = 0.0 if request_id % 2 else 0.9
        sampling = SamplingParams(max_tokens=5 + 2 * request_id, temperature=temperature, seed=request_id)
        engine.add(request_id, range(request_id + 1, 3 * request_id + 5), sampling)
    engine.run()
    return engine, engine.outputs


@pytest.mark.parametrize("max_mixed_tokens", [0, 40, 64])
def test_padded_and_recorded_steps_give_the_same_tokens(
    qwen2: TinyModel, request: pytest.FixtureRequest, max_mixed_tokens: int
) -> None:
    _, expected = run(qwen2, max_mixed_tokens=0, prepared=False)
    request.getfixturevalue("with_graphs")
    for prepared in (False, True):
        engine, outputs = run(qwen2, max_mixed_tokens=max_mixed_tokens, prepared=prepared)
        assert outputs == expected
        assert any(size.num_prefills for size in engine.runner._graphs._graphs) == (max_mixed_tokens > 0)


def test_without_graphs_nothing_is_prepared(qwen2: TinyModel) -> None:
    engine = TinyEngine(qwen2, batch_limits())
    assert not engine.runner.prepare()
    assert engine.runner.num_graphs_wanted == 0
