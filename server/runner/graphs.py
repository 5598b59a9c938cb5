"""Which decode steps are replayed from a recorded graph, and when the missing graphs are recorded.

A step of n decoding requests uses the graph of the next larger size; rows without a request are padding. The graph of
one request is there before the service is ready, the others are recorded when a step needs them or while nothing runs.
Knows sizes and time. Does not know requests or devices.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Generic

from server.ops.interface import Activations, BufferT, Operations, StepGraph, StepShape

MIN_INTERVAL_S = 0.2  # between two recordings beside running requests: each delays a step by some milliseconds


def graph_sizes(max_requests: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of an eighth of the size at least: at most 8 padding rows up to 64, 32 up to 256."""
    sizes: list[int] = []
    size = 1
    while size < max_requests:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 3))
    return (*sizes, max_requests) if max_requests else ()


class DecodeGraphs(Generic[BufferT]):
    """The graphs of one backend. `run` issues a begun step from its activations to its samples."""

    def __init__(
        self,
        ops: Operations[BufferT],
        run: Callable[[Activations[BufferT]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sizes = graph_sizes(ops.max_graph_requests)
        self._ops = ops
        self._run = run
        self._clock = clock
        self._graphs: dict[int, StepGraph] = {}
        self._has_run: set[int] = set()  # sizes whose kernels are loaded: only those may be recorded
        self._next_recording_at = 0.0
        self.replayed_size = 0  # rows of the graph that the step replayed, whose runner begins it with 0

    @property
    def num_graphs(self) -> int:
        """Recorded so far."""
        return len(self._graphs)

    @property
    def missing_size(self) -> int | None:
        """The smallest size without a graph."""
        return next((size for size in self.sizes if size not in self._graphs), None)

    def padded_size(self, num_requests: int) -> int | None:
        """Rows of a step of `num_requests` decodes that sample; None: there is no graph so large."""
        index = bisect_left(self.sizes, num_requests)
        return self.sizes[index] if index < len(self.sizes) else None

    def run_decodes(self, shape: StepShape, act: Activations[BufferT]) -> None:
        """Issue the begun step of padded size `shape.num_chunks`: by its graph, if there is one or time for one."""
        size = shape.num_chunks
        if size not in self._graphs and size in self._has_run and self._clock() >= self._next_recording_at:
            self.record(shape)
        if size in self._graphs:
            self.replayed_size = size
            self._ops.replay(self._graphs[size], shape)
        else:
            self._run(act)
            self._has_run.add(size)

    def has_run(self, size: int) -> bool:
        """Whether a step of this size has run, so that it may be recorded."""
        return size in self._has_run

    def record(self, shape: StepShape) -> None:
        """Record the step of size `shape.num_chunks`, which has run before."""
        size = shape.num_chunks
        assert size in self._has_run, f"a step of {size} requests has not run yet"
        self._graphs[size] = self._ops.capture(shape, self._run)
        self._next_recording_at = self._clock() + MIN_INTERVAL_S
