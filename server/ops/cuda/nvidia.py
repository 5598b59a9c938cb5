"""The driver protocol on an NVIDIA GPU, by cuda-bindings. GEMMs are cublas.py's.

Knows contexts, streams and modules; does not know which kernels there are. The only importer of cuda-bindings.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from server.errors import StartupError
from server.ops.cuda.arguments import PackedArguments
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.cublas import Gemms, load_cublas
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
from server.ops.cuda.huge_pages import HUGE_PAGE_BYTES, HugePages

# What launches may use without asking: more must be allowed per function.
DEFAULT_SHARED_BYTES = 48 * 1024
THREADS_PER_WARP = 32

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
_POSIX_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _raise(code: Any, call: str) -> None:
    kind = OutOfDeviceMemory if code == _OUT_OF_MEMORY else DriverError
    raise kind(call, int(code), getattr(code, "name", "an error that cuda-bindings does not know"))


def _ask(result: tuple[Any, ...], call: str) -> Any:
    """The value that a call gave besides its code."""
    if result[0] != _SUCCESS:
        _raise(result[0], call)
    return result[1]


def _do(result: tuple[Any, ...], call: str) -> None:
    if result[0] != _SUCCESS:
        _raise(result[0], call)


class EarlyLaunch:
    """How one kernel is launched so that it may begin before the kernel before it has ended.

    A launch changes little of what the driver is told; to build that anew would cost the host more than the launch.
    """

    def __init__(self, image: KernelImage) -> None:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = cu.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = image.num_warps * THREADS_PER_WARP, 1, 1
        config.sharedMemBytes = image.shared_bytes
        config.attrs, config.numAttrs = [attribute], 1
        self._config = config
        self._grid: tuple[int, int, int] | None = None
        self._stream: Stream | None = None

    def config(self, grid: tuple[int, int, int], stream: Stream) -> Any:
        """Good until the next call."""
        config = self._config
        if grid != self._grid:
            config.gridDimX, config.gridDimY, config.gridDimZ = self._grid = grid
        if stream != self._stream:
            config.hStream = self._stream = stream
        return config


class NvidiaFunction:
    """A kernel of a loaded module. Belongs to the thread that launches it: its arguments are packed in one place."""

    def __init__(self, image: KernelImage, module: Any, handle: Any, *, begins_early: bool) -> None:
        self.image = image
        self.early = EarlyLaunch(image) if begins_early else None
        self.handle = handle
        self.arguments = PackedArguments(image.parameters)
        self.num_threads = image.num_warps * THREADS_PER_WARP
        self.shared_bytes = image.shared_bytes
        self._module = module


class NvidiaDriver:
    """One GPU's primary context. Threads share it, but launches of one function, and GEMMs, belong to one thread.

    `sync_launches`: after every launch, GEMM and graph the stream is waited for (except while it captures), so that
    an error names what caused it. `early_launch`: kernels that wait for those before them may begin before these end.
    """

    def __init__(
        self, context: Any, device_ordinal: int, facts: DeviceFacts, *, sync_launches: bool, early_launch: bool
    ) -> None:
        self._context = context
        self._facts = facts
        self._sync_launches = sync_launches
        self._early_launch = early_launch
        self._captures: set[Stream] = set()
        self._registered: dict[int, HugePages] = {}
        self._gemms: Gemms | None = None
        self._shareable = _shareable_properties(device_ordinal)

    @classmethod
    def open(cls, device_index: int = 0, sync_launches: bool = False, early_launch: bool = False) -> "NvidiaDriver":
        """Initialise the driver and make the device's primary context current in this thread (0.1 to 0.25 s).

        Raises StartupError where there is no driver or no such device, DriverError if the device fails.
        """
        device = _find_device(device_index)
        context = _ask(cu.cuDevicePrimaryCtxRetain(device), f"cuDevicePrimaryCtxRetain of device {device_index}")
        _do(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        facts = _read_facts(device)
        return cls(context, int(device), facts, sync_launches=sync_launches, early_launch=early_launch)

    @property
    def facts(self) -> DeviceFacts:
        """Read once, by `open`."""
        return self._facts

    def attach_thread(self) -> None:
        """Make the context current in this thread."""
        _do(cu.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        code, num_free, num_total = cu.cuMemGetInfo()
        if code != _SUCCESS:
            _raise(code, "cuMemGetInfo")
        return num_free, num_total

    # Memory

    def allocate(self, num_bytes: int) -> int:
        """Device memory, at a multiple of 256 bytes; its content is arbitrary."""
        return int(_ask(cu.cuMemAlloc(num_bytes), f"cuMemAlloc of {num_bytes} bytes"))

    def free(self, address: int) -> None:
        """Give back what `allocate` gave. Waits for the device."""
        _do(cu.cuMemFree(address), "cuMemFree")

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        """Page-locked host memory. In huge pages a checkpoint loads 6 % faster than through the driver's own."""
        if num_bytes >= HUGE_PAGE_BYTES:
            pages = HugePages(num_bytes)
            if cu.cuMemHostRegister(pages.address, num_bytes, 0)[0] == _SUCCESS:
                self._registered[pages.address] = pages
                return PinnedMemory(pages.address, pages.view)
        address = int(_ask(cu.cuMemHostAlloc(num_bytes, 0), f"cuMemHostAlloc of {num_bytes} bytes"))
        return PinnedMemory(address, memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B"))

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Nobody may touch `memory.view` afterwards."""
        if memory.address in self._registered:
            _do(cu.cuMemHostUnregister(memory.address), "cuMemHostUnregister")
            del self._registered[memory.address]
        else:
            _do(cu.cuMemFreeHost(memory.address), "cuMemFreeHost")

    def create_shareable(self, num_bytes: int) -> int:
        """A file descriptor, closed on exec, that holds device memory."""
        handle = _ask(cu.cuMemCreate(num_bytes, self._shareable, 0), f"cuMemCreate of {num_bytes} bytes")
        try:
            fd = int(_ask(cu.cuMemExportToShareableHandle(handle, _POSIX_FD, 0), "cuMemExportToShareableHandle"))
        finally:
            _do(cu.cuMemRelease(handle), "cuMemRelease")
        os.set_inheritable(fd, False)
        return fd

    def map_shareable(self, fd: int, num_bytes: int, *, writable: bool) -> int:
        """Address of the memory behind `fd`, which stays the caller's."""
        handle = _ask(cu.cuMemImportFromShareableHandle(fd, _POSIX_FD), "cuMemImportFromShareableHandle")
        try:
            return self._map(handle, num_bytes, writable=writable)
        finally:
            _do(cu.cuMemRelease(handle), "cuMemRelease")  # the mapping holds the memory

    def _map(self, handle: Any, num_bytes: int, *, writable: bool) -> int:
        address = int(_ask(cu.cuMemAddressReserve(num_bytes, 0, 0, 0), f"cuMemAddressReserve of {num_bytes} bytes"))
        is_mapped = False
        try:
            _do(cu.cuMemMap(address, num_bytes, 0, handle, 0), f"cuMemMap of {num_bytes} bytes")
            is_mapped = True
            access = [_access(self._shareable.location, writable=writable)]
            _do(cu.cuMemSetAccess(address, num_bytes, access, 1), "cuMemSetAccess")
        except DriverError:
            if is_mapped:
                cu.cuMemUnmap(address, num_bytes)
            cu.cuMemAddressFree(address, num_bytes)
            raise
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        """End a mapping of `map_shareable`. Waits for the device."""
        _do(cu.cuMemUnmap(address, num_bytes), "cuMemUnmap")
        _do(cu.cuMemAddressFree(address, num_bytes), "cuMemAddressFree")

    # Order

    def create_stream(self) -> Stream:
        """One that does not wait for the default stream."""
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        return Stream(int(_ask(cu.cuStreamCreate(flags), "cuStreamCreate")))

    def create_event(self) -> Event:
        """One without a time stamp."""
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return Event(int(_ask(cu.cuEventCreate(flags), "cuEventCreate")))

    def create_timed_event(self) -> Event:
        """One with a time stamp."""
        return Event(int(_ask(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DEFAULT), "cuEventCreate")))

    def elapsed_ms(self, first: Event, last: Event) -> float:
        """Between two timed events that are done."""
        return float(_ask(cu.cuEventElapsedTime(first, last), "cuEventElapsedTime"))

    def record(self, event: Event, stream: Stream) -> None:
        """The event is done when what `stream` holds now is done."""
        result = cu.cuEventRecord(event, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], "cuEventRecord")

    def is_done(self, event: Event) -> bool:
        """Whether what was recorded last is over; true for an event never recorded."""
        (code,) = cu.cuEventQuery(event)
        if code == _SUCCESS:
            return True
        if code != _NOT_READY:
            _raise(code, "cuEventQuery")
        return False

    def wait(self, event: Event) -> None:
        """Block this thread (spinning, without the interpreter's lock) until the event is done."""
        _do(cu.cuEventSynchronize(event), "cuEventSynchronize")

    def wait_on_stream_async(self, event: Event, stream: Stream) -> None:
        """Work issued to `stream` from now on waits for the event."""
        _do(cu.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    def synchronize(self, stream: Stream) -> None:
        """Block this thread until the stream is empty."""
        _do(cu.cuStreamSynchronize(stream), "cuStreamSynchronize")

    # Copies

    def copy_to_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        """From pinned memory."""
        result = cu.cuMemcpyHtoDAsync(dest, source, num_bytes, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], f"cuMemcpyHtoDAsync of {num_bytes} bytes")

    def copy_to_host_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Into pinned memory."""
        result = cu.cuMemcpyDtoHAsync(dest, source, num_bytes, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], f"cuMemcpyDtoHAsync of {num_bytes} bytes")

    def copy_on_device_async(self, dest: int, source: int, num_bytes: int, stream: Stream) -> None:
        """The two ranges must not overlap."""
        result = cu.cuMemcpyDtoDAsync(dest, source, num_bytes, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], f"cuMemcpyDtoDAsync of {num_bytes} bytes")

    def fill_async(self, dest: int, value: int, num_bytes: int, stream: Stream) -> None:
        """Every byte becomes `value`."""
        result = cu.cuMemsetD8Async(dest, value, num_bytes, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], f"cuMemsetD8Async of {num_bytes} bytes")

    # Kernels

    def load(self, image: KernelImage) -> NvidiaFunction:
        """Load one compiled kernel, so that a launch of it loads nothing. Raises StartupError if its file is gone."""
        what = f"kernel {image.name} ({image.path})"
        try:
            data = image.path.read_bytes() + b"\0"  # PTX must end in zero
        except OSError as error:
            raise StartupError(f"cannot read {what}: {error.strerror}; build the kernels again") from error
        module = _ask(cu.cuModuleLoadData(data), f"cuModuleLoadData of {what}")
        handle = _ask(cu.cuModuleGetFunction(module, image.entry.encode()), f"cuModuleGetFunction of {what}")
        if image.shared_bytes > DEFAULT_SHARED_BYTES:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            asked = f"cuFuncSetAttribute to {image.shared_bytes} bytes of shared memory for {what}"
            _do(cu.cuFuncSetAttribute(handle, attribute, image.shared_bytes), asked)
        _do(cu.cuFuncLoad(handle), f"cuFuncLoad of {what}")  # else the first launch would load it, maybe in a capture
        return NvidiaFunction(image, module, handle, begins_early=self._early_launch and image.waits)

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        """Run `function` on `grid`. Raises struct.error if the values do not suit its parameters."""
        assert isinstance(function, NvidiaFunction)
        arguments = function.arguments
        arguments.write(values)
        if function.early is None:
            x, y, z = grid
            result = cu.cuLaunchKernel(
                function.handle,
                x,
                y,
                z,
                function.num_threads,
                1,
                1,
                function.shared_bytes,
                stream,
                arguments.address,
                0,
            )
        else:
            result = cu.cuLaunchKernelEx(function.early.config(grid, stream), function.handle, arguments.address, 0)
        if result[0] != _SUCCESS:
            _raise(result[0], f"launch of {_describe(function.image)} on grid {grid}")
        if self._sync_launches:
            self._settle(f"{_describe(function.image)} on grid {grid}", stream)

    def _settle(self, what: str, stream: Stream) -> None:
        if stream not in self._captures:
            _do(cu.cuStreamSynchronize(stream), f"execution of {what}")

    # GEMM

    def prepare_gemms(self) -> None:
        """Load cuBLAS and make its handle, if that has not been done."""
        if self._gemms is None:
            self._gemms = Gemms(load_cublas())

    def gemm_version(self) -> int:
        """Of cublasLt."""
        return self._prepared().version

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
        """out [m, n] = x [m, k] @ weight [n, k].T + bias [n], summed in fp32 and rounded once to out's dtype."""
        self._prepared().run(x, weight, bias, out, workspace, stream, algorithm)
        if self._sync_launches:
            self._settle(f"GEMM {x.shape} x {weight.shape} {x.dtype} -> {out.dtype}", stream)

    def search_gemms(self, problem: GemmProblem, max_results: int) -> list[GemmAlgorithm]:
        """What cublasLt's heuristic thinks of."""
        return self._prepared().search(problem, max_results)

    def vary_gemm(self, problem: GemmProblem, algorithm: GemmAlgorithm) -> list[GemmAlgorithm]:
        """Another tile, another split, another order."""
        return self._prepared().vary(problem, algorithm)

    def _prepared(self) -> Gemms:
        if self._gemms is None:
            assert not self._captures, "prepare_gemms must come before the first capture"
            self.prepare_gemms()
        assert self._gemms is not None
        return self._gemms

    # Graphs

    def begin_capture(self, stream: Stream) -> None:
        """What is issued to `stream` from now on is recorded, not run. Captures of other threads are not disturbed."""
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _do(cu.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        self._captures.add(stream)

    def end_capture(self, stream: Stream) -> Graph:
        """The recorded work, ready to be launched as often as wanted."""
        self._captures.discard(stream)
        recorded = _ask(cu.cuStreamEndCapture(stream), "cuStreamEndCapture")
        try:
            return Graph(int(_ask(cu.cuGraphInstantiate(recorded, 0), "cuGraphInstantiate")))
        finally:
            _do(cu.cuGraphDestroy(recorded), "cuGraphDestroy")

    def abandon_capture(self, stream: Stream) -> None:
        """End a capture in which a call failed; nothing is left of it. Does nothing if none is under way."""
        self._captures.discard(stream)
        status = _ask(cu.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
        if status == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return
        code, recorded = cu.cuStreamEndCapture(stream)
        if code == _SUCCESS:  # else the capture was invalid already, and the call ended it by saying so
            _do(cu.cuGraphDestroy(recorded), "cuGraphDestroy")

    def launch_graph_async(self, graph: Graph, stream: Stream) -> None:
        """Run what was recorded."""
        result = cu.cuGraphLaunch(graph, stream)
        if result[0] != _SUCCESS:
            _raise(result[0], "cuGraphLaunch")
        if self._sync_launches:
            self._settle("a graph", stream)

    def destroy_graph(self, graph: Graph) -> None:
        """Only after its last launch is done."""
        _do(cu.cuGraphExecDestroy(graph), "cuGraphExecDestroy")


def _find_device(device_index: int) -> Any:
    try:
        (code,) = cu.cuInit(0)
    except RuntimeError as error:  # cuda-bindings found no libcuda
        raise StartupError(
            f"no NVIDIA driver: libcuda.so.1 cannot be loaded ({error}); install the driver, or use backend = torch"
        ) from error
    if code == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        raise StartupError("the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES may hide them); use backend = torch")
    if code != _SUCCESS:
        _raise(code, "cuInit")
    num_devices = _ask(cu.cuDeviceGetCount(), "cuDeviceGetCount")
    if not 0 <= device_index < num_devices:
        raise StartupError(f"GPU {device_index} was asked for, but the driver sees {num_devices}, counted from 0")
    return _ask(cu.cuDeviceGet(device_index), "cuDeviceGet")


def _read_facts(device: Any) -> DeviceFacts:
    names = cu.CUdevice_attribute

    def attribute(which: Any) -> int:
        return int(_ask(cu.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute"))

    major = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    can_share_memory = bool(
        attribute(names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        and attribute(names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    )
    return DeviceFacts(
        name=_ask(cu.cuDeviceGetName(256, device), "cuDeviceGetName").split(b"\0")[0].decode(),
        arch=f"sm_{major}{minor}",
        num_multiprocessors=attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        total_bytes=int(_ask(cu.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
        granularity=_granularity(int(device)) if can_share_memory else 1,
        can_share_memory=can_share_memory,
    )


def _granularity(device_ordinal: int) -> int:
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    result = cu.cuMemGetAllocationGranularity(_shareable_properties(device_ordinal), minimum)
    return int(_ask(result, "cuMemGetAllocationGranularity"))


def _shareable_properties(device_ordinal: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _POSIX_FD
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device_ordinal
    return properties


def _access(location: Any, *, writable: bool) -> Any:
    flags = cu.CUmemAccess_flags
    access = cu.CUmemAccessDesc()
    access.location = location
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    return access


def _describe(image: KernelImage) -> str:
    constants = ", ".join(f"{name}={value}" for name, value in image.constants.items())
    return f"kernel {image.name}({constants})"
