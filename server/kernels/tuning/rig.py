"""One projection on the device: as many different weights as a model has layers, run by any contender, and timed.

Weights follow each other as in a step, so that none is found in the L2 cache; the calls are in one graph, so that the
host's time does not count.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from statistics import median

from server.kernels.tile_files import TileRange
from server.kernels.tuning.cases import GemmCase
from server.kernels.tuning.choose import Contender, Kind, Race
from server.kernels.tuning.values import agree, as_floats, random_inputs, random_weights
from server.models.facts import ModelFacts
from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import (
    Driver,
    DriverError,
    Event,
    GemmAlgorithm,
    GemmProblem,
    Graph,
    KernelImage,
    PinnedMemory,
    Stream,
)
from server.ops.cuda.gemms import Projections
from server.ops.cuda.kernels import Kernels
from server.ops.cuda.operations import GATE_TILE
from server.ops.cuda.sizes import GEMM_WORKSPACE
from server.ops.cuda.tiles import NO_TABLE, GemmChoice
from server.ops.interface import Linear

QUICK_BYTES = 200 << 20  # of weights: four times the L2 cache of an H200
QUICK_REPEATS = 2
CAREFUL_REPEATS = 7
POOL_BYTES = 64 << 20  # of random numbers, from which weights are cut
MAX_COMPARED = 400_000  # numbers of a result, which Python compares in 40 ms
EDGES = (0, 1, 15, 16, 17, 63, 64, 127, 128, 255)  # rows where tiles begin and end

Call = Callable[[int], None]  # the projection by the weight of that number


class GemmRig:
    """Of one case and one number of rows at a time. `close` gives the memory back."""

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        images: Iterable[KernelImage],
        facts: ModelFacts,
        case: GemmCase,
        max_rows: int,
        say: Callable[[str], None],
    ) -> None:
        self._driver, self._stream, self._facts, self._case, self._say = driver, stream, facts, case, say
        self._kernels = Kernels(driver, stream, images)
        self._addresses: list[int] = []
        shape, random = case.shape, Random(0)  # noqa: S311
        pool = self._pinned(random_weights(min(POOL_BYTES // 2, shape.n * shape.k), shape.dtype, random))
        count = max(case.num_weights, 2 if shape.operation == "logits" else 1)
        self._weights = [self._filled(pool, (shape.n, shape.k), random) for _ in range(count)]
        driver.free_pinned(pool)
        inputs = self._pinned(random_inputs(max_rows * shape.k + shape.n, shape.dtype, random))
        self._all_x = self._filled(inputs, (max_rows, shape.k), random)
        self._vector = self._filled(inputs, (shape.n,), random)  # bias, or weight of the norm
        driver.free_pinned(inputs)
        is_fp32 = shape.operation == "logits"
        self._all_out = self._empty((max_rows, case.out_columns), "float32" if is_fp32 else shape.dtype)
        self._all_wide = self._empty((max_rows, shape.n), shape.dtype)  # gate_up or delta
        self._all_residual = self._empty((max_rows, case.out_columns), "float32")
        self._projections = Projections(
            driver,
            stream,
            self._kernels,
            facts,
            self._empty(GEMM_WORKSPACE.shape, GEMM_WORKSPACE.dtype),
            NO_TABLE,
            add_rms_norm=self._add_rms_norm,
            gate=self._gate,
        )
        self._events: list[Event] = []
        self.host_us: dict[Kind, float] = {}  # a call of each kind, in the careful race that was last
        self._expected: list[Sequence[float]] = []
        self.set_rows(1)

    def close(self) -> None:
        """Nothing may be called afterwards."""
        self._driver.synchronize(self._stream)
        for address in self._addresses:
            self._driver.free(address)
        self._addresses.clear()

    def set_rows(self, m: int) -> None:
        """What is measured from here on is of m rows. cuBLAS's result is what others are held to."""
        self._x, self._out = self._all_x.rows(0, m), self._all_out.rows(0, m)
        self._wide, self._residual = self._all_wide.rows(0, m), self._all_residual.rows(0, m)
        rows = sorted({row for row in (*EDGES, m // 2, m - 1) if row < m}, reverse=True)
        self._samples = rows[:: -(-len(rows) * self._case.out_columns // MAX_COMPARED)]  # the last row always
        self._expected = self._result(self._call(None))

    def algorithms(self, max_results: int) -> list[GemmAlgorithm]:
        """What the GEMM library thinks of for the present number of rows."""
        return self._driver.search_gemms(self._problem, max_results)

    @property
    def _problem(self) -> GemmProblem:
        shape, room = self._case.shape, GEMM_WORKSPACE.num_bytes
        out_dtype: BufferDType = "float32" if shape.operation == "logits" else shape.dtype
        return GemmProblem(self._x.shape[0], shape.n, shape.k, shape.dtype, out_dtype, shape.has_bias, room)

    @property
    def race(self) -> Race:
        """For choose.choose."""
        return Race(self._quick_us, self._careful_us, self._is_right, self._vary)

    def _vary(self, contender: Contender) -> list[Contender]:
        if not isinstance(contender.choice, GemmAlgorithm):
            return []
        m = contender.range.max_rows
        return [algorithm_contender(m, variant) for variant in self._driver.vary_gemm(self._problem, contender.choice)]

    # Measuring

    def _quick_us(self, contender: Contender) -> float | None:
        weight_bytes = self._weights[0].num_bytes
        num_calls = min(len(self._weights), max(2, -(-QUICK_BYTES // weight_bytes)))
        try:
            call = self._call(contender.choice)
            call(0)  # what is loaded at first use is loaded
            graph = self._record(call, num_calls)
            (times,) = self._replay([graph], QUICK_REPEATS)
        except (DriverError, ValueError) as error:  # too much of something for the device, or a size that does not suit
            self._say(f"  left out: {_describe(contender)}: {error}")
            return None
        self._driver.destroy_graph(graph)
        return min(times) / num_calls

    def _careful_us(self, contenders: Sequence[Contender]) -> Sequence[float]:
        """Medians, in turns, so that a clock that drifts does so for all."""
        num_calls = len(self._weights)
        graphs = []
        self.host_us.clear()
        for contender in contenders:
            call = self._call(contender.choice)
            call(0)
            self._time_host(contender, call, num_calls)
            graphs.append(self._record(call, num_calls))
        times = self._replay(graphs, CAREFUL_REPEATS)
        for graph in graphs:
            self._driver.destroy_graph(graph)
        return [median(of_graph) / num_calls for of_graph in times]

    def _time_host(self, contender: Contender, call: Call, num_calls: int) -> None:
        """What a step that is issued call by call takes of the host: the best of a kind."""
        self._driver.synchronize(self._stream)
        begin = time.perf_counter()
        for index in range(num_calls):
            call(index)
        us = (time.perf_counter() - begin) / num_calls * 1e6
        self.host_us[contender.kind] = min(us, self.host_us.get(contender.kind, us))

    def _record(self, call: Call, num_calls: int) -> Graph:
        self._driver.begin_capture(self._stream)
        try:
            for index in range(num_calls):
                call(index)
            return self._driver.end_capture(self._stream)
        except BaseException:
            with suppress(DriverError):
                self._driver.abandon_capture(self._stream)
            raise

    def _replay(self, graphs: Sequence[Graph], repeats: int) -> list[list[float]]:
        """Microseconds of each repeat of each graph, in turns.

        All are issued at once, behind one that does not count: the device never waits for the host.
        """
        turns = [graph for _ in range(repeats) for graph in graphs]
        while len(self._events) <= len(turns):
            self._events.append(self._driver.create_timed_event())
        for graph in graphs[-1:]:
            self._driver.launch_graph_async(graph, self._stream)
        for graph, event in zip(turns, self._events, strict=False):
            self._driver.record(event, self._stream)
            self._driver.launch_graph_async(graph, self._stream)
        last = self._events[len(turns)]
        self._driver.record(last, self._stream)
        self._driver.wait(last)
        times = [
            self._driver.elapsed_ms(first, second) * 1e3 for first, second in pairwise(self._events[: len(turns) + 1])
        ]
        return [times[index :: len(graphs)] for index in range(len(graphs))]

    # Results

    def _is_right(self, contender: Contender) -> bool:
        found = self._result(self._call(contender.choice))
        dtype = self._case.shape.dtype if self._out.dtype != "float32" else "float32"
        is_right = all(agree(*rows, dtype) for rows in zip(found, self._expected, strict=True))
        if not is_right:
            self._say(f"  WRONG RESULT, left out: {_describe(contender)}")
        return is_right

    def _result(self, call: Call) -> list[Sequence[float]]:
        """Sampled rows of the first weight's result."""
        for poisoned in (self._out, self._wide):
            self._driver.fill_async(poisoned.address, 0xFF, poisoned.num_bytes, self._stream)
        self._driver.fill_async(self._residual.address, 0, self._residual.num_bytes, self._stream)
        call(0)
        return [self._row(row) for row in self._samples]

    def _row(self, row: int) -> Sequence[float]:
        source = self._out.rows(row, row + 1)
        pinned = self._driver.allocate_pinned(source.num_bytes)
        self._driver.copy_to_host_async(pinned.address, source.address, source.num_bytes, self._stream)
        self._driver.synchronize(self._stream)
        data = bytes(pinned.view)
        self._driver.free_pinned(pinned)
        return as_floats(data, source.dtype)

    # Calls

    def _call(self, choice: GemmChoice) -> Call:
        """The operation as a decoder calls it."""
        shape, weights = self._case.shape, self._weights
        x, out, wide, residual, vector = self._x, self._out, self._wide, self._residual, self._vector
        bias = vector if shape.has_bias else None
        if shape.operation == "gated_linear":
            gated = self._projections.make_gated(choice)
            return lambda index: gated(x, Linear(weights[index], bias), wide, out)
        if shape.operation == "linear_add_norm":
            add_norm = self._projections.make_add_norm(choice)
            return lambda index: add_norm(x, Linear(weights[index], bias), wide, residual, vector, out)
        linear = self._projections.make_linear(choice)
        return lambda index: linear(x, weights[index], bias, out)

    def _add_rms_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer) -> None:
        kernel = self._kernels.get("add_rms_norm", self._case.shape.dtype)
        kernel((out.shape[0], 1, 1), residual, delta, weight, out, out.shape[1], self._facts.rms_eps)

    def _gate(self, gate_up: Buffer, out: Buffer) -> None:
        kernel = self._kernels.get("gate", self._case.shape.dtype, BLOCK=GATE_TILE)
        (m, columns), block = out.shape, self._case.block
        kernel((m, columns // block * -(-block // GATE_TILE), 1), gate_up, out, columns, block)

    # Memory

    def _empty(self, shape: tuple[int, ...], dtype: BufferDType) -> Buffer:
        buffer = Buffer(0, shape, dtype)
        address = self._driver.allocate(buffer.num_bytes)
        self._addresses.append(address)
        return Buffer(address, shape, dtype)

    def _pinned(self, data: bytearray) -> PinnedMemory:
        pinned = self._driver.allocate_pinned(len(data))
        pinned.view[:] = data
        return pinned

    def _filled(self, pool: PinnedMemory, shape: tuple[int, ...], random: Random) -> Buffer:
        """A buffer of the pool's numbers, from another place of it on."""
        buffer, pool_bytes, done = self._empty(shape, self._case.shape.dtype), len(pool.view), 0
        while done < buffer.num_bytes:
            begin = random.randrange(max(1, pool_bytes // 4)) // 2 * 2
            num_bytes = min(pool_bytes - begin, buffer.num_bytes - done)
            self._driver.copy_to_device_async(buffer.address + done, pool.address + begin, num_bytes, self._stream)
            done += num_bytes
        self._driver.synchronize(self._stream)
        return buffer


def algorithm_contender(m: int, algorithm: GemmAlgorithm) -> Contender:
    """For m rows."""
    range_ = TileRange(m, algorithm=algorithm.data.hex(), workspace_bytes=algorithm.workspace_bytes)
    return Contender("cublas_lt", range_, algorithm)


def _describe(contender: Contender) -> str:
    range_ = contender.range
    if range_.kernel is None:
        return f"{contender.kind} {(range_.algorithm or '')[:32]} with {range_.workspace_bytes} bytes of workspace"
    return f"{range_.kernel} {range_.constants}, {range_.num_warps} warps, {range_.num_stages} stages"
