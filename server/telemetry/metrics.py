"""What Prometheus reads: counters and histograms of requests over all web workers, and the engine's state on the board.

A scrape of any web worker gives the sums over all, the dead ones included, so their totals never fall; the engine's
begin again with each model worker. What vLLM counts too appears under its name as well, for dashboards that exist.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from server.launch.board import Board, ModelState
from server.telemetry.shared_values import SharedValues
from server.telemetry.timeline import read_startup

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OWN_PREFIX = "model_server_"
_VLLM_PREFIX = "vllm:"
# Ours that vLLM has not; everything else appears under both prefixes.
_WITHOUT_ALIAS = frozenset(
    f"{_OWN_PREFIX}{name}"
    for name in (
        "http_errors",
        "requests_aborted",
        "ready",
        "engine_starts",
        "engine_steps",
        "startup_seconds",
        "startup_bytes",
        "startup_ready_seconds",
        "startup_critical_seconds",
        "restart_seconds",
        "graphs",
    )
)
_FINISHED_REASONS = ("length", "stop")
_ERROR_STATUSES = (400, 404, 405, 413, 415, 422, 424, 429, 500, 503)
_OTHER_STATUS = "other"
_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 5)


class RequestMetrics:
    """The series that web workers write. Constructed once, before they are forked."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # times of the construction, which say nothing
        self._model_name = model_name
        self._registry = CollectorRegistry()
        default_values = values.ValueClass
        values.ValueClass = SharedValues().new_value
        try:
            self._create_series()
        finally:
            values.ValueClass = default_values

    def _create_series(self) -> None:
        """All of them: what a worker made after the fork, the others would not know.

        And a rate over a series that appears with its first event would miss that event.
        """
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_SECONDS)
        self.request_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "In the engine's queue", _SECONDS)
        self.requests_aborted = self._counter("requests_aborted", "Requests whose client left").labels(self._model_name)
        finished = self._counter("request_success", "Requests that ended with an answer", "finished_reason")
        errors = self._counter("http_errors", "Error responses and error events", "status")
        self._finished = {reason: finished.labels(self._model_name, reason) for reason in _FINISHED_REASONS}
        self._errors = {status: errors.labels(self._model_name, status) for status in (*_ERROR_STATUSES, _OTHER_STATUS)}

    def observe_gaps(self, gap_s: float, count: int) -> None:
        """`count` streams got a token `gap_s` after the one before: as many calls of `observe`, at the price of one."""
        histogram = self.inter_token_latency
        histogram._sum.inc(gap_s * count)
        histogram._buckets[bisect_left(_TOKEN_SECONDS, gap_s)].inc(count)

    def count_finished(self, reason: str) -> None:
        """One request ended with its answer; `reason` is length or stop."""
        self._finished[reason].inc()

    def count_error(self, status: int) -> None:
        """One request was refused or failed with this HTTP status (also when it failed inside a stream)."""
        self._errors.get(status, self._errors[_OTHER_STATUS]).inc()

    def render(self, board: Board) -> bytes:
        """The text of one scrape: milliseconds, so not for the event loop."""
        registry = CollectorRegistry()
        registry.register(_TwoNames([self._registry, _BoardCollector(board, self._model_name)]))
        return generate_latest(registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_OWN_PREFIX}{name}", text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"{_OWN_PREFIX}{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)


class _BoardCollector(Collector):
    """The engine's state: one set of numbers for the whole service, the same from any worker."""

    def __init__(self, board: Board, model_name: str) -> None:
        self._board = board
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        board = self._board
        yield self._gauge("num_requests_running", "Requests in the engine's batch", board.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting for the batch", board.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", kv_usage(board))
        sizes = {"block_size": str(board.block_size), "num_gpu_blocks": str(board.num_kv_blocks)}
        yield self._gauge("cache_config_info", "Sizes of the KV pool", 1, sizes)
        yield self._counter("num_preemptions", "Requests preempted for want of KV blocks", board.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", board.prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found", board.prefix_hit_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens computed or found", board.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", board.num_generated_tokens)
        yield self._gauge("ready", "1 when a model worker serves", int(board.model_state == ModelState.READY))
        yield self._counter("engine_starts", "Model workers that became ready", board.num_engine_starts)
        yield self._counter("engine_steps", "Steps of the running model worker", board.step)
        yield from self._startup()

    def _startup(self) -> Iterator[Metric]:
        """Seconds and bytes of each finished stage of the start; a stage that ran twice is added up."""
        board = self._board
        labels = ["model_name", "role", "stage"]
        seconds = GaugeMetricFamily(f"{_OWN_PREFIX}startup_seconds", "Time of a stage of the start", labels=labels)
        sizes = GaugeMetricFamily(f"{_OWN_PREFIX}startup_bytes", "Bytes moved by a stage of the start", labels=labels)
        totals: dict[tuple[str, str], tuple[float, int]] = {}
        for stage in board.timeline():
            if stage.end:
                key = (stage.role.decode(), stage.name.decode())
                duration_s, num_bytes = totals.get(key, (0.0, 0))
                totals[key] = (duration_s + stage.end - stage.begin, num_bytes + stage.num_bytes)
        for (role, name), (duration_s, num_bytes) in totals.items():
            seconds.add_metric([self._model_name, role, name], duration_s)
            sizes.add_metric([self._model_name, role, name], num_bytes)
        yield from (seconds, sizes)
        yield from self._whole_start()
        yield self._gauge("graphs", "Graphs of steps recorded by the model worker", board.num_graphs)

    def _whole_start(self) -> Iterator[Metric]:
        view = read_startup(self._board, "")
        if view.ready_s is not None:
            yield self._gauge("startup_ready_seconds", "From exec to the first possible answer", view.ready_s)
        labels = ["model_name", "role", "stage"]
        critical = GaugeMetricFamily(
            f"{_OWN_PREFIX}startup_critical_seconds", "Of each stage, what everyone waited for", labels=labels
        )
        totals: dict[tuple[str, str], float] = {}
        for part in view.critical_path:
            key = (part.role, part.stage or "")
            totals[key] = totals.get(key, 0.0) + part.seconds
        for (role, name), duration_s in totals.items():
            critical.add_metric([self._model_name, role, name], duration_s)
        yield critical
        restarts = GaugeMetricFamily(
            f"{_OWN_PREFIX}restart_seconds",
            "Of the last restart, from the loss to ready",
            labels=["model_name", "role"],
        )
        for role, restart in view.restarts.items():
            if restart.down_s is not None:
                restarts.add_metric([self._model_name, role], restart.down_s)
        yield restarts

    def _gauge(self, name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
        labels = {"model_name": self._model_name} | (labels or {})
        family = GaugeMetricFamily(f"{_OWN_PREFIX}{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{_OWN_PREFIX}{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class _TwoNames(Collector):
    """Yields each family, and those that vLLM has too a second time under vLLM's name."""

    def __init__(self, collectors: list[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        for collector in self._collectors:
            for metric in collector.collect():
                yield metric
                if metric.name not in _WITHOUT_ALIAS:
                    yield _renamed(metric)


def _renamed(metric: Metric) -> Metric:
    alias = Metric(metric.name.replace(_OWN_PREFIX, _VLLM_PREFIX, 1), metric.documentation, metric.type)
    alias.samples = [
        Sample(sample.name.replace(_OWN_PREFIX, _VLLM_PREFIX, 1), *sample[1:]) for sample in metric.samples
    ]
    return alias


def kv_usage(board: Board) -> float:
    """Share of the leasable KV blocks in use, 0 to 1."""
    return 1 - board.num_free_kv_blocks / board.num_kv_blocks if board.num_kv_blocks else 0.0
