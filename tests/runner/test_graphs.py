"""Recorded decode steps: which sizes there are, when they are recorded, and that padding changes no token."""

import itertools
from collections.abc import Iterator

import pytest

from server.engine.messages import SamplingParams
from server.ops.interface import Activations, StepGraph, StepShape
from server.ops.sampling import SamplingUse
from server.runner.graphs import MIN_INTERVAL_S, DecodeGraphs, graph_sizes
from tests.runner.tiny_engine import RecordingOperations, TinyEngine, TinyModel, batch_limits

NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


class CountingBackend:
    """As much of a backend as the policy sees."""

    def __init__(self, max_graph_requests: int) -> None:
        self.max_graph_requests = max_graph_requests
        self.events: list[str] = []

    def run(self, _act: Activations[object]) -> None:
        self.events.append("run")

    def capture(self, shape: StepShape, _run: object) -> StepGraph:
        self.events.append(f"capture {shape.num_chunks}")
        return StepGraph(shape.num_chunks)

    def replay(self, graph: StepGraph, _shape: StepShape) -> None:
        self.events.append(f"replay {graph}")


def decode_shape(size: int) -> StepShape:
    return StepShape((0,) * size, (1,) * size, size, size, size, 0, reads_last_tokens=False, sampling=NO_SAMPLING)


@pytest.mark.parametrize("max_requests", [0, 1, 2, 3, 7, 8, 9, 64, 100, 256, 1024])
def test_sizes_rise_to_the_largest_batch_by_at_most_a_quarter(max_requests: int) -> None:
    sizes = graph_sizes(max_requests)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[-1] if sizes else 0) == max_requests
    for below, size in itertools.pairwise(sizes):
        assert size - below <= max(8, size // 4)
    assert len(sizes) <= 30


def test_a_size_is_recorded_after_it_has_run_and_not_too_often() -> None:
    now = [0.0]
    backend = CountingBackend(4)
    graphs = DecodeGraphs(backend, backend.run, lambda: now[0])  # type: ignore[arg-type]
    for size in (1, 1, 2, 2):
        graphs.run_decodes(decode_shape(size), None)  # type: ignore[arg-type]
    assert backend.events == ["run", "capture 1", "replay 1", "run", "run"]
    assert graphs.replayed_size == 1
    now[0] = MIN_INTERVAL_S
    graphs.run_decodes(decode_shape(2), None)  # type: ignore[arg-type]
    assert backend.events[5:] == ["capture 2", "replay 2"]
    assert graphs.replayed_size == 2  # also in the step that recorded it
    assert (graphs.num_graphs, graphs.missing_size) == (2, 4)
    assert [graphs.padded_size(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]


@pytest.fixture
def with_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RecordingOperations, "max_graph_requests", 8)
    monkeypatch.setattr("server.runner.graphs.MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(TinyEngine, "_assign_logits", lambda *_: None)  # padded steps have more rows
    return


def run(model: TinyModel, *, prepared: bool) -> dict[int, list[int]]:
    engine = TinyEngine(model, batch_limits(), num_in_flight=2)
    while prepared and engine.runner.prepare():
        pass
    assert not prepared or engine.runner.num_graphs == engine.runner.num_graphs_wanted
    for request_id in range(11):
        temperature = 0.0 if request_id % 2 else 0.9
        sampling = SamplingParams(max_tokens=5 + 2 * request_id, temperature=temperature, seed=request_id)
        engine.add(request_id, range(request_id + 1, 3 * request_id + 5), sampling)
    engine.run()
    return engine.outputs


def test_padded_and_recorded_steps_give_the_same_tokens(qwen2: TinyModel, request: pytest.FixtureRequest) -> None:
    expected = run(qwen2, prepared=False)
    request.getfixturevalue("with_graphs")
    assert run(qwen2, prepared=False) == expected
    assert run(qwen2, prepared=True) == expected


def test_without_graphs_nothing_is_prepared(qwen2: TinyModel) -> None:
    engine = TinyEngine(qwen2, batch_limits())
    assert not engine.runner.prepare()
    assert engine.runner.num_graphs_wanted == 0
