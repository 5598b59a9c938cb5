"""Which steps are replayed from a recorded graph, and when the missing graphs are recorded.

A step uses the graph of the next larger size of its kind: decodes alone, or decodes and chunks of several tokens; rows
without a request are padding. The graph of one decode is there before the service is ready, the others are recorded
when a step needs them or while nothing runs. Knows sizes and time. Does not know requests or devices.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic

from server.ops.interface import Activations, BatchLimits, BufferT, Operations, StepGraph, StepShape, StepSize

MIN_INTERVAL_S = 0.2  # between two recordings beside running requests: each delays a step by some milliseconds
MAX_GRAPHS = 48  # device memory, and time to record them, is spent on no more
MAX_GRAPH_TOKENS = 512  # longer steps keep the device busy for longer than issuing them takes the host
MAX_GRAPH_PREFILLS = 32  # each may add a tile to the launches of attention, whether it is there or not


def decode_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of an eighth of the size at least: at most 8 padding rows up to 64, 32 up to 256."""
    sizes: list[int] = []
    size = 1
    while size < max_requests:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return (*sizes, max_requests) if max_requests else ()


def mixed_token_counts(max_tokens: int) -> tuple[int, ...]:
    """Multiples of 64 up to 256, then of 128: what a GEMM's tiles make of the counts between takes as long."""
    counts = [*range(64, 257, 64), *range(384, MAX_GRAPH_TOKENS + 1, 128)]
    most = min(max_tokens, MAX_GRAPH_TOKENS)
    return (*(count for count in counts if count < most), most) if most else ()


def mixed_request_counts(max_requests: int) -> tuple[int, ...]:
    """Few: a row too many costs a row of logits and of sampling, and programs of attention that leave at once."""
    return (*(count for count in (8, 32, 128) if count < max_requests), max_requests) if max_requests else ()


def graph_sizes(max_graph_requests: int, limits: BatchLimits) -> tuple[StepSize, ...]:
    """At most MAX_GRAPHS, in the order in which they are worth recording: decodes, then mixed with few requests first.

    max_graph_requests: the most decodes of a recorded step; 0: none is.
    """
    decodes = [StepSize(count, count, 0, count) for count in decode_sizes(max_graph_requests)]
    mixed = {
        StepSize(num_tokens, count, min(count, MAX_GRAPH_PREFILLS), count): None
        for num_requests in mixed_request_counts(max_graph_requests)
        for num_tokens in mixed_token_counts(min(limits.max_mixed_tokens, limits.max_batched_tokens))
        for count in [min(num_requests, num_tokens)]
    }
    return (*decodes, *mixed)[:MAX_GRAPHS]


class StepGraphs(Generic[BufferT]):
    """The graphs of one backend. `run` issues a begun step from its activations to its samples."""

    def __init__(
        self,
        ops: Operations[BufferT],
        run: Callable[[Activations[BufferT]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sizes = graph_sizes(ops.max_graph_requests, ops.limits)
        decodes = [size for size in self.sizes if not size.num_prefills]
        self._decode_counts = [size.num_decodes for size in decodes]
        mixed = [size for size in self.sizes if size.num_prefills]
        self._token_counts = sorted({size.num_tokens for size in mixed})
        self._request_counts = mixed_request_counts(ops.max_graph_requests)
        self._mixed = {(size.num_tokens, size.num_samples): size for size in mixed}
        self._ops = ops
        self._run = run
        self._clock = clock
        self._graphs: dict[StepSize, StepGraph] = {}
        self._has_run: set[StepSize] = set()  # sizes whose kernels are loaded: only those may be recorded
        self._next_recording_at = 0.0
        self.replayed_size = 0  # token rows of the graph that the step replayed, whose runner begins it with 0

    @property
    def num_graphs(self) -> int:
        """Recorded so far."""
        return len(self._graphs)

    @property
    def missing_size(self) -> StepSize | None:
        """The first size without a graph."""
        return next((size for size in self.sizes if size not in self._graphs), None)

    def padded_size(self, exact: StepSize) -> StepSize | None:
        """What a step of these counts is padded to; None: there is no graph for it."""
        if not exact.num_prefills:
            count = _next_count(self._decode_counts, exact.num_decodes)
            return None if count is None else StepSize(count, count, 0, count)
        num_tokens = _next_count(self._token_counts, exact.num_tokens)
        num_requests = _next_count(self._request_counts, exact.num_decodes + exact.num_prefills)
        if num_tokens is None or num_requests is None:
            return None
        size = self._mixed.get((num_tokens, min(num_tokens, num_requests)))
        return size if size is not None and exact.num_prefills <= size.num_prefills else None

    def run(self, shape: StepShape, act: Activations[BufferT]) -> None:
        """Issue the begun step, which is padded to one of the sizes: by its graph, if there is one or time for one."""
        size = shape.size
        if size not in self._graphs and self._may_record(shape):
            self.record(shape)
        if size in self._graphs:
            self.replayed_size = size.num_tokens
            self._ops.replay(self._graphs[size], shape)
        else:
            self._run(act)
            self._has_run.add(size)

    def has_run(self, size: StepSize) -> bool:
        """Whether a step of this size has run, so that it may be recorded."""
        return size in self._has_run

    def record(self, shape: StepShape) -> None:
        """Record the step of this size, which has run before."""
        assert shape.size in self._has_run, f"a step of {shape.size} has not run yet"
        self._graphs[shape.size] = self._ops.capture(shape, self._run)
        self._next_recording_at = self._clock() + MIN_INTERVAL_S

    def _may_record(self, shape: StepShape) -> bool:
        """Prompts alone are not recorded when they come: somebody waits for their first token, and nobody else does.

        Without decodes the host has nothing to hide, and a start makes its first token before any graph but one.
        """
        return shape.num_decodes > 0 and shape.size in self._has_run and self._clock() >= self._next_recording_at


def _next_count(counts: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(counts, wanted)
    return counts[index] if index < len(counts) else None
