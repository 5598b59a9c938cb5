"""The second true implementation of the driver protocol: a GPU in host memory, on which everything happens at once.

Addresses are real host addresses, so tests may look with `as_tensor`. What a real driver refuses is refused here with
its error, and what a real GPU would do wrong in silence (use of freed memory, a copy from memory that is not pinned,
reading beyond an allocation) raises too.
"""

import ctypes
import importlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from server.ops.cuda.buffer import ITEM_BYTES, Buffer
from server.ops.cuda.driver import (
    DeviceFacts,
    DriverError,
    Event,
    Function,
    GemmAlgorithm,
    GemmProblem,
    Graph,
    KernelImage,
    OutOfDeviceMemory,
    PinnedMemory,
    Stream,
)
from tests.ops.host_interpreter import HostFunction
from tests.ops.host_memory import PAGE, BadAccess, HostMemory, Kind

GEMM_VERSION = 130000  # of the library that this stands for
MAX_GRID = (2**31 - 1, 65535, 65535)

INVALID_VALUE = (1, "CUDA_ERROR_INVALID_VALUE")
OUT_OF_MEMORY = (2, "CUDA_ERROR_OUT_OF_MEMORY")
INVALID_CONTEXT = (201, "CUDA_ERROR_INVALID_CONTEXT")
INVALID_HANDLE = (400, "CUDA_ERROR_INVALID_HANDLE")
ILLEGAL_STATE = (401, "CUDA_ERROR_ILLEGAL_STATE")
ILLEGAL_ADDRESS = (700, "CUDA_ERROR_ILLEGAL_ADDRESS")
CAPTURE_UNSUPPORTED = (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
CAPTURE_INVALIDATED = (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
CAPTURE_UNJOINED = (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED")
CAPTURE_ISOLATION = (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION")
CAPTURED_EVENT = (907, "CUDA_ERROR_CAPTURED_EVENT")
INJECTED = DriverError("a call that a test lets fail", 719, "CUDA_ERROR_LAUNCH_FAILED")

Work = Callable[[], None]


@dataclass(slots=True, eq=False)
class Capture:
    """Of the stream `origin`, and of those that wait for an event recorded in it, until the origin waits for theirs."""

    thread_id: int
    origin: Stream
    work: list[Work] = field(default_factory=list)
    is_valid: bool = True
    num_recorded: Counter[Stream] = field(default_factory=Counter)
    num_awaited: dict[Stream, int] = field(default_factory=dict)  # by the origin, of each other stream's

    @property
    def is_joined(self) -> bool:
        return all(self.num_recorded[stream] == count for stream, count in self.num_awaited.items())


@dataclass(frozen=True, slots=True)
class Mark:
    """Where in a capture an event was recorded."""

    capture: Capture
    stream: Stream
    num_recorded: int


@dataclass(slots=True)
class Failure:
    calls_left: int
    error: Exception
    method: str | None


class HostDriver:
    """One GPU of `total_bytes`. `calls` counts the calls by method."""

    def __init__(
        self, *, total_bytes: int = 1 << 30, granularity: int = 2 << 20, can_share_memory: bool = True
    ) -> None:
        assert granularity % PAGE == 0
        self.calls: Counter[str] = Counter()
        self.algorithms: list[GemmAlgorithm | None] = []  # asked for by each GEMM
        self.memory = HostMemory()
        self._facts = DeviceFacts("host memory", "sm_80", 4, total_bytes, granularity, can_share_memory)
        self._num_used = 0
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._threads.is_attached = True
        self._failures: list[Failure] = []
        self._ids = itertools.count(1000)
        self._streams: set[int] = set()
        self._events: dict[int, Mark | None] = {}  # of those recorded in a capture, where
        self.clock_ms: Callable[[], float] = lambda: 0.0
        self._recorded_ms: dict[int, float] = {}
        self._graphs: dict[int, list[Work]] = {}
        self._captures: dict[int, Capture] = {}
        self._has_gemms = False
        self.num_copied_bytes = 0  # by all copies that have run

    # For tests

    @property
    def num_calls(self) -> int:
        """Calls of all methods together."""
        return self.calls.total()

    @property
    def num_used_bytes(self) -> int:
        """Device memory that is allocated."""
        return self._num_used

    def fail_at(self, n: int, error: Exception = INJECTED, *, method: str | None = None) -> None:
        """The n-th call from now on (1: the next), of `method` if given, raises `error` and does nothing else."""
        assert n >= 1
        with self._lock:
            self._failures.append(Failure(n, error, method))

    def forgive(self) -> None:
        """Forget the failures that have not happened."""
        with self._lock:
            self._failures.clear()

    # Protocol

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    def attach_thread(self) -> None:
        self._threads.is_attached = True
        self._enter("attach_thread")

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self._facts.total_bytes - self._num_used, self._facts.total_bytes

    # Memory

    def allocate(self, num_bytes: int) -> int:
        self._enter("allocate", is_unsafe_in_capture=True)
        self._take(num_bytes, "allocate")
        return self.memory.allocate(num_bytes, "device")

    def free(self, address: int) -> None:
        self._enter("free", is_unsafe_in_capture=True)
        with _errors("free", INVALID_VALUE):
            num_bytes = self.memory.release(address, "device")
        with self._lock:
            self._num_used -= num_bytes

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        self._enter("allocate_pinned", is_unsafe_in_capture=True)
        if num_bytes <= 0:
            raise DriverError(f"allocate_pinned of {num_bytes} bytes", *INVALID_VALUE)
        address = self.memory.allocate(num_bytes, "pinned")
        return PinnedMemory(address, memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B"))

    def free_pinned(self, memory: PinnedMemory) -> None:
        self._enter("free_pinned", is_unsafe_in_capture=True)
        with _errors("free_pinned", INVALID_VALUE):
            self.memory.release(memory.address, "pinned")

    def create_shareable(self, num_bytes: int) -> int:
        """It counts as used for ever: nobody can see here who still holds it."""
        self._enter("create_shareable", is_unsafe_in_capture=True)
        if not self._facts.can_share_memory:
            raise DriverError("create_shareable", 801, "CUDA_ERROR_NOT_SUPPORTED")
        if num_bytes % self._facts.granularity:
            raise DriverError(f"create_shareable of {num_bytes} bytes", *INVALID_VALUE)
        self._take(num_bytes, "create_shareable")
        fd = os.memfd_create("device memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return fd

    def map_shareable(self, fd: int, num_bytes: int, *, writable: bool) -> int:
        self._enter("map_shareable", is_unsafe_in_capture=True)
        if num_bytes <= 0 or num_bytes % self._facts.granularity:
            raise DriverError(f"map_shareable of {num_bytes} bytes", *INVALID_VALUE)
        with _errors("map_shareable", INVALID_VALUE):
            return self.memory.map_file(fd, num_bytes, writable=writable)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._enter("unmap", is_unsafe_in_capture=True)
        with _errors("unmap", INVALID_VALUE):
            self.memory.check(address, num_bytes, "device", write=False)
            released = self.memory.release(address, "device", is_shared=True)
        assert released == num_bytes, f"unmap of {num_bytes} bytes, of a mapping of {released}"

    # Order

    def create_stream(self) -> Stream:
        self._enter("create_stream")
        stream = Stream(next(self._ids))
        self._streams.add(stream)
        return stream

    def create_event(self) -> Event:
        self._enter("create_event")
        event = Event(next(self._ids))
        self._events[event] = None
        return event

    def create_timed_event(self) -> Event:
        return self.create_event()

    def elapsed_ms(self, first: Event, last: Event) -> float:
        """Work takes no time here: what `clock_ms` says has passed between the two records."""
        self._enter("elapsed_ms", is_unsafe_in_capture=True)
        return self._recorded_ms[last] - self._recorded_ms[first]

    def record(self, event: Event, stream: Stream) -> None:
        capture = self._enter("record", stream)
        self._check_event(event, "record")
        self._events[event] = None if capture is None else Mark(capture, stream, capture.num_recorded[stream])
        self._recorded_ms[event] = self.clock_ms()

    def is_done(self, event: Event) -> bool:
        self._enter("is_done", is_unsafe_in_capture=True)
        self._check_event(event, "is_done", waits=True)
        return True

    def wait(self, event: Event) -> None:
        self._enter("wait", is_unsafe_in_capture=True)
        self._check_event(event, "wait", waits=True)

    def wait_on_stream_async(self, event: Event, stream: Stream) -> None:
        capture = self._enter("wait_on_stream_async", stream)
        self._check_event(event, "wait_on_stream_async")
        mark = self._events[event]
        if mark is None and capture is None:
            return
        if mark is None or capture not in (None, mark.capture) or mark.capture not in self._captures.values():
            # Work outside a capture cannot be waited for in it, nor that of another.
            self._spoil(capture)
            raise DriverError("wait_on_stream_async", *CAPTURE_ISOLATION)
        if capture is None:
            self._captures[stream] = mark.capture
            mark.capture.num_awaited[stream] = -1
        elif stream == capture.origin != mark.stream:
            capture.num_awaited[mark.stream] = mark.num_recorded

    def synchronize(self, stream: Stream) -> None:
        if self._enter("synchronize", stream, is_unsafe_in_capture=True) is not None:
            raise DriverError("synchronize", *CAPTURE_UNSUPPORTED)

    # Copies

    def copy_to_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy("copy_to_device_async", (dest, "device"), (source, "pinned"), num_bytes, stream)

    def copy_to_host_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy("copy_to_host_async", (dest, "pinned"), (source, "device"), num_bytes, stream)

    def copy_on_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        assert dest + num_bytes <= source or source + num_bytes <= dest, "the ranges overlap"
        self._copy("copy_on_device_async", (dest, "device"), (source, "device"), num_bytes, stream)

    def _copy(
        self, name: str, dest: tuple[int, Kind], source: tuple[int, Kind], num_bytes: int, stream: Stream
    ) -> None:
        def copy() -> None:
            if num_bytes == 0:
                return
            with _errors(f"{name} of {num_bytes} bytes", INVALID_VALUE):
                self.memory.check(*_range(source, num_bytes), write=False)
                self.memory.check(*_range(dest, num_bytes), write=True)
            ctypes.memmove(dest[0], source[0], num_bytes)
            self.num_copied_bytes += num_bytes

        self._issue(self._enter(name, stream), copy)

    def fill_async(self, dest: int, value: int, num_bytes: int, stream: Stream) -> None:
        assert 0 <= value <= 255

        def fill() -> None:
            if num_bytes == 0:
                return
            with _errors(f"fill_async of {num_bytes} bytes", INVALID_VALUE):
                self.memory.check(dest, num_bytes, "device", write=True)
            ctypes.memset(dest, value, num_bytes)

        self._issue(self._enter("fill_async", stream), fill)

    # Kernels

    def load(self, image: KernelImage) -> HostFunction:
        """The interpreted source: `image.path` is not read. A source with a dot is no kernel of the server's."""
        self._enter("load", is_unsafe_in_capture=True)
        module_name, function_name = image.source.split(":")
        full_name = module_name if "." in module_name else f"server.kernels.{module_name}"
        return HostFunction(image, getattr(importlib.import_module(full_name), function_name))

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        capture = self._enter("launch_async", stream)
        assert isinstance(function, HostFunction)
        packed = function.pack(tuple(values))
        call = f"launch of kernel {function.image.name} on grid {grid}"
        if not all(1 <= size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)):
            raise DriverError(call, *INVALID_VALUE)
        for parameter, value in zip(function.image.parameters, values, strict=True):
            multiple = parameter.alignment
            assert multiple == 1 or value % multiple == 0, f"{call}: {parameter.name} is no multiple of {multiple}"

        def launch() -> None:
            with _errors(call, ILLEGAL_ADDRESS):
                function.run(grid, packed, self.memory)

        self._issue(capture, launch)

    # GEMM

    def prepare_gemms(self) -> None:
        self._enter("prepare_gemms", is_unsafe_in_capture=True)
        self._has_gemms = True

    def gemm_version(self) -> int:
        self._enter("gemm_version", is_unsafe_in_capture=True)
        return GEMM_VERSION

    def search_gemms(self, problem: GemmProblem, max_results: int) -> list[GemmAlgorithm]:
        """Two, which differ in name alone."""
        self._enter("search_gemms", is_unsafe_in_capture=True)
        return [GemmAlgorithm(bytes([number]) * 64, 0) for number in (1, 2)][:max_results]

    def vary_gemm(self, problem: GemmProblem, algorithm: GemmAlgorithm) -> list[GemmAlgorithm]:
        """The next two, up to number 9."""
        self._enter("vary_gemm", is_unsafe_in_capture=True)
        numbers = range(algorithm.data[0] + 1, min(algorithm.data[0] + 3, 10))
        return [GemmAlgorithm(bytes([number]) * 64, 0) for number in numbers]

    def gemm_async(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        out: Buffer,
        workspace: Buffer,
        stream: Stream,
        algorithm: GemmAlgorithm | None = None,
    ) -> None:
        capture = self._enter("gemm_async", stream)
        _check_gemm(x, weight, bias, out)
        self.algorithms.append(algorithm)
        assert self._has_gemms or capture is None, "prepare_gemms must come before the first capture"
        self._has_gemms = True
        call = f"gemm_async of x {x.shape}, weight {weight.shape}"
        read = [x, weight, *([bias] if bias is not None else [])]

        def multiply() -> None:
            if x.shape[0] == 0:
                return
            with _errors(call, ILLEGAL_ADDRESS):
                for buffer in read:
                    self.memory.check(buffer.address, buffer.num_bytes, "device", write=False)
                for buffer in (out, workspace):
                    self.memory.check(buffer.address, buffer.num_bytes, "device", write=True)
            total = as_tensor(x).float() @ as_tensor(weight).float().T
            if bias is not None:
                total += as_tensor(bias).float()
            as_tensor(out).copy_(total)

        self._issue(capture, multiply)

    # Graphs

    def begin_capture(self, stream: Stream) -> None:
        if self._enter("begin_capture", stream) is not None:
            raise DriverError("begin_capture", *ILLEGAL_STATE)
        self._captures[stream] = Capture(threading.get_ident(), stream)

    def end_capture(self, stream: Stream) -> Graph:
        self._enter("end_capture")
        capture = self._captures.get(stream)
        if capture is None or capture.origin != stream:
            raise DriverError("end_capture", *ILLEGAL_STATE)
        self._forget(capture)
        if not capture.is_valid:
            raise DriverError("end_capture", *CAPTURE_INVALIDATED)
        if not capture.is_joined:
            raise DriverError("end_capture", *CAPTURE_UNJOINED)
        graph = Graph(next(self._ids))
        self._graphs[graph] = capture.work
        return graph

    def abandon_capture(self, stream: Stream) -> None:
        self._enter("abandon_capture")
        if (capture := self._captures.get(stream)) is not None:
            self._forget(capture)

    def launch_graph_async(self, graph: Graph, stream: Stream) -> None:
        capture = self._enter("launch_graph_async", stream)
        if graph not in self._graphs:
            raise DriverError("launch_graph_async", *INVALID_HANDLE)
        for work in self._graphs[graph]:
            self._issue(capture, work)

    def destroy_graph(self, graph: Graph) -> None:
        self._enter("destroy_graph")
        if self._graphs.pop(graph, None) is None:
            raise DriverError("destroy_graph", *INVALID_HANDLE)

    # What the methods share

    def _enter(
        self, method: str, stream: Stream | None = None, *, is_unsafe_in_capture: bool = False
    ) -> Capture | None:
        """Count the call, let it fail if it shall, and give the stream's capture."""
        capture = self._captures.get(stream) if stream is not None else None
        self._count(method, capture)
        if not getattr(self._threads, "is_attached", False):
            raise DriverError(f"{method} in a thread that did not call attach_thread", *INVALID_CONTEXT)
        if stream is not None and stream not in self._streams:
            raise DriverError(f"{method} on stream {stream}", *INVALID_HANDLE)
        if is_unsafe_in_capture:
            for own in self._captures.values():
                if own.thread_id == threading.get_ident():
                    self._spoil(own)
                    raise DriverError(f"{method} while this thread captures", *CAPTURE_UNSUPPORTED)
        if capture is not None and not capture.is_valid:
            raise DriverError(method, *CAPTURE_INVALIDATED)
        if capture is not None and stream is not None and method not in ("record", "wait_on_stream_async"):
            capture.num_recorded[stream] += 1
        return capture

    def _forget(self, capture: Capture) -> None:
        self._captures = {stream: other for stream, other in self._captures.items() if other is not capture}

    def _count(self, method: str, capture: Capture | None) -> None:
        with self._lock:
            self.calls[method] += 1
            due = None
            for failure in self._failures:
                if failure.method in (None, method):
                    failure.calls_left -= 1
                    if failure.calls_left == 0:
                        due = failure
            if due is None:
                return
            self._failures.remove(due)
        self._spoil(capture)
        raise due.error

    def _spoil(self, capture: Capture | None) -> None:
        if capture is not None:
            capture.is_valid = False

    def _issue(self, capture: Capture | None, work: Work) -> None:
        if capture is not None:
            capture.work.append(work)
        else:
            work()

    def _take(self, num_bytes: int, call: str) -> None:
        if num_bytes <= 0:
            raise DriverError(f"{call} of {num_bytes} bytes", *INVALID_VALUE)
        with self._lock:
            if self._num_used + num_bytes > self._facts.total_bytes:
                raise OutOfDeviceMemory(f"{call} of {num_bytes} bytes", *OUT_OF_MEMORY)
            self._num_used += num_bytes

    def _check_event(self, event: Event, call: str, *, waits: bool = False) -> None:
        if event not in self._events:
            raise DriverError(f"{call} of event {event}", *INVALID_HANDLE)
        if waits and self._events[event]:
            raise DriverError(call, *CAPTURED_EVENT)


@contextmanager
def _errors(call: str, kind: tuple[int, str]) -> Iterator[None]:
    try:
        yield
    except BadAccess as error:
        raise DriverError(f"{call}: {error}", *kind) from error


def _range(place: tuple[int, Kind], num_bytes: int) -> tuple[int, int, Kind]:
    return place[0], num_bytes, place[1]


def _check_gemm(x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer) -> None:
    (m, k), (n, weight_k) = x.shape, weight.shape
    assert weight_k == k, f"x {x.shape} does not suit weight {weight.shape}"
    assert out.shape == (m, n), f"x {x.shape} and weight {weight.shape} do not make {out.shape}"
    assert n % 8 == k % 8 == 0, f"both sizes of a weight must be multiples of 8, not {weight.shape}"
    assert (x.dtype, weight.dtype) in (("bfloat16",) * 2, ("float16",) * 2), f"{x.dtype} x {weight.dtype}"
    assert out.dtype in (x.dtype, "float32") if bias is None else out.dtype == bias.dtype == x.dtype
    assert bias is None or bias.shape == (n,), f"bias {bias.shape} for {n} columns"
    for buffer in (x, weight, bias, out):
        assert buffer is None or buffer.address % 16 == 0, f"{buffer} does not start at a multiple of 16 bytes"


TORCH_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """The memory itself, not a copy: valid until it is freed."""
    dtype, count = TORCH_DTYPES[buffer.dtype], math.prod(buffer.shape)
    if count == 0:
        return torch.empty(buffer.shape, dtype=dtype)
    memory = (ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(buffer.shape)


def allocate_buffer(driver: HostDriver, shape: tuple[int, ...], dtype: str) -> Buffer:
    """Device memory of that shape, full of poison."""
    num_bytes = max(1, math.prod(shape) * ITEM_BYTES[dtype])
    return Buffer(driver.allocate(num_bytes), shape, dtype)


def to_device(driver: HostDriver, tensor: torch.Tensor) -> Buffer:
    """A copy of the tensor in device memory."""
    buffer = allocate_buffer(driver, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    as_tensor(buffer).copy_(tensor)
    return buffer
