"""The one narrow door to a GPU: everything that the cuda backend and the loader ask of it.

`nvidia.py` is the implementation on the driver API and cuBLAS. Tests have a second, true one in host memory. Addresses
and handles are plain integers. What ends in `_async` returns before it has happened. Errors of an asynchronous call may
surface in any later one. Every method raises `DriverError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Protocol

from server.errors import EngineDead
from server.ops.cuda.buffer import Buffer, BufferDType

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Graph = NewType("Graph", int)


class DriverError(EngineDead):
    """A call failed; the context may be unusable from here on. `code` is the driver's or library's number."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class OutOfDeviceMemory(DriverError):
    """An allocation does not fit. The context is as good as before."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """`arch` is the compute capability as in "sm_90"; `granularity` what sizes of shareable memory are multiples of."""

    name: str
    arch: str
    num_multiprocessors: int
    total_bytes: int
    granularity: int
    can_share_memory: bool

    def shareable_bytes(self, num_bytes: int) -> int:
        """What `num_bytes` take as shareable memory."""
        return -(-num_bytes // self.granularity) * self.granularity


@dataclass(frozen=True, slots=True)
class Parameter:
    """One run-time argument of a kernel, by its type in Triton's notation: "*bf16", "*fp32", "i32", "i64", "fp32".

    `alignment`: of what the compiled code assumes the address or number to be a multiple (1: of nothing).
    """

    name: str
    type: str
    alignment: int


@dataclass(frozen=True, slots=True)
class KernelImage:
    """One compiled variant of a kernel, as kernels/manifest.json lists it.

    source: "module:function" below server.kernels; constants: its constexpr arguments; path: cubin, or PTX. waits: its
    first access to memory comes after a wait for all kernels before it, so that it may begin before they have ended.
    """

    name: str
    source: str
    constants: dict[str, int | float | bool | str]
    parameters: tuple[Parameter, ...]
    entry: str
    num_warps: int
    shared_bytes: int
    path: Path
    waits: bool = False


@dataclass(frozen=True, slots=True)
class GemmAlgorithm:
    """One way to run a GEMM, as the library itself notes it; means nothing to another version of the library."""

    data: bytes
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """out [m, n] = x [m, k] @ weight [n, k].T, maybe + bias [n], for which an algorithm is sought."""

    m: int
    n: int
    k: int
    dtype: BufferDType
    out_dtype: BufferDType
    has_bias: bool
    workspace_bytes: int


class Function(Protocol):
    """A kernel that is loaded."""

    @property
    def image(self) -> KernelImage: ...


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Page-locked host memory, seen by host code as `view` and by copies as `address`."""

    address: int
    view: memoryview


class Driver(Protocol):
    """One GPU's primary context.

    Safe for several threads, each of which called `attach_thread` first, if each launches functions of its own and one
    alone calls GEMMs.
    """

    @property
    def facts(self) -> DeviceFacts: ...

    def attach_thread(self) -> None:
        """Make the context current in this thread."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    # Memory

    def allocate(self, num_bytes: int) -> int:
        """Device memory for as long as the process lives or until `free`. Raises OutOfDeviceMemory."""
        ...

    def free(self, address: int) -> None: ...

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory: ...

    def free_pinned(self, memory: PinnedMemory) -> None: ...

    def create_shareable(self, num_bytes: int) -> int:
        """A file descriptor (closed on exec) that holds device memory of `num_bytes`, a multiple of the granularity.

        The memory lives as long as any process holds the descriptor or a mapping. Raises OutOfDeviceMemory.
        """
        ...

    def map_shareable(self, fd: int, num_bytes: int, *, writable: bool) -> int:
        """Address of the memory behind `fd`, which stays the caller's. Read-only mappings fault on a write."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    # Order

    def create_stream(self) -> Stream: ...

    def create_event(self) -> Event: ...

    def create_timed_event(self) -> Event:
        """One that remembers when it was done: for measurements, not for serving."""
        ...

    def elapsed_ms(self, first: Event, last: Event) -> float:
        """Between two timed events that are done, on the device's clock."""
        ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def is_done(self, event: Event) -> bool:
        """Whether what was recorded last is over; true for an event never recorded."""
        ...

    def wait(self, event: Event) -> None:
        """Block this thread until the event is done."""
        ...

    def wait_on_stream_async(self, event: Event, stream: Stream) -> None:
        """Work issued to `stream` from now on waits for the event."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block this thread until the stream is empty."""
        ...

    # Copies; host addresses are of pinned memory

    def copy_to_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_to_host_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_on_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def fill_async(self, dest: int, value: int, num_bytes: int, stream: Stream) -> None:
        """Every byte becomes `value`."""
        ...

    # Kernels

    def load(self, image: KernelImage) -> Function:
        """Load one compiled kernel, so that a launch of it loads nothing."""
        ...

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        """Run `function` on `grid`; `values` in the order of its parameters, addresses as integers.

        Only one thread may launch a function: another loads it for itself. Raises struct.error if a value does not fit
        its parameter's type or their number is wrong.
        """
        ...

    # GEMM

    def prepare_gemms(self) -> None:
        """Load the GEMM library now, so that the first GEMM does not. Raises StartupError if it is missing.

        Must be called before the first capture that holds a GEMM.
        """
        ...

    def gemm_version(self) -> int:
        """Of the GEMM library: the version for which its algorithms are good."""
        ...

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
        """out [m, n] = x [m, k] @ weight [n, k].T + bias [n], summed in fp32 and rounded once to out's dtype.

        x and weight are both bf16 or both fp16; out is of that dtype, or without a bias fp32; bias is of that dtype.
        m may be 0; n and k are multiples of 8. All GEMMs come from one thread. algorithm: of `search_gemms` for this
        kind of GEMM; one that the library cannot run for m is replaced by its own choice, which is also the default.
        """
        ...

    def search_gemms(self, problem: GemmProblem, max_results: int) -> list[GemmAlgorithm]:
        """Algorithms for it, the library's best guess first: for measurements, not for serving."""
        ...

    def vary_gemm(self, problem: GemmProblem, algorithm: GemmAlgorithm) -> list[GemmAlgorithm]:
        """Algorithms for it that differ from one in a single respect: for measurements, not for serving."""
        ...

    # Graphs

    def begin_capture(self, stream: Stream) -> None:
        """What is issued to `stream` from now on is recorded, not run. Captures of other threads are not disturbed."""
        ...

    def end_capture(self, stream: Stream) -> Graph:
        """The recorded work, ready to be launched as often as wanted."""
        ...

    def abandon_capture(self, stream: Stream) -> None:
        """End a capture in which a call failed; nothing is left of it. Does nothing if none is under way."""
        ...

    def launch_graph_async(self, graph: Graph, stream: Stream) -> None: ...

    def destroy_graph(self, graph: Graph) -> None: ...
