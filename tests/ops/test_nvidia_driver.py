"""What nvidia.py and cublas.py ask of the driver API and cuBLAS, on stand-ins. tests/gpu asks the real ones."""

import ctypes
import ctypes.util
import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import StartupError
from server.ops.cuda import cublas, cublas_lt, lt_variants, nvidia
from server.ops.cuda.arguments import PackedArguments
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import (
    Driver,
    DriverError,
    GemmAlgorithm,
    GemmProblem,
    KernelImage,
    OutOfDeviceMemory,
    Parameter,
    Stream,
)
from server.ops.cuda.nvidia import NvidiaDriver
from tests.ops.nvidia_stand_ins import StandInCublas, StandInCuda, real

CTYPES = {
    "*bf16": ctypes.c_void_p,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
WORKSPACE = Buffer(0x10000, (1 << 20,), "uint8")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    monkeypatch.setattr(nvidia, "cu", stand_in)
    return stand_in


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> StandInCublas:
    stand_in = StandInCublas()
    monkeypatch.setattr(nvidia, "load_cublas", lambda: cublas.CublasLibrary(stand_in, stand_in))
    return stand_in


@pytest.fixture
def driver(cuda: StandInCuda) -> NvidiaDriver:
    return NvidiaDriver.open(1)


@pytest.fixture
def stream(driver: NvidiaDriver) -> Stream:
    return driver.create_stream()


def parameters(*types: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(f"p{i}", kind, 1) for i, kind in enumerate(types))


@pytest.fixture
def kernel(tmp_path: Path) -> KernelImage:
    path = tmp_path / "scale.ptx"
    path.write_bytes(b".version 8.0")
    types = parameters("*fp32", "i32", "fp32")
    return KernelImage("scale", "scale:scale", {"BLOCK": 16}, types, "scale_entry", 4, 0, path)


# Arguments


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(sorted(CTYPES)), max_size=12))
def test_arguments_lie_as_in_a_c_struct(types: list[str]) -> None:
    fields = [(f"f{i}", CTYPES[kind]) for i, kind in enumerate(types)]
    fields += [("scratch0", ctypes.c_void_p), ("scratch1", ctypes.c_void_p)]
    reference = type("Reference", (ctypes.Structure,), {"_fields_": fields})()
    packed = PackedArguments(parameters(*types))
    values = [0.1 * (i + 1) if kind.startswith("fp") else i + 1 for i, kind in enumerate(types)]
    for (name, _), value in zip(fields, values, strict=False):
        setattr(reference, name, value)
    packed.write(values)
    assert packed.raw == bytes(reference)
    assert packed.offsets == tuple(getattr(type(reference), name).offset for name, _ in fields)


def test_the_pointer_array_points_at_the_values() -> None:
    packed = PackedArguments(parameters("i32", "*fp32"))
    packed.write((-5, 0x1234567890))
    pointers = (ctypes.c_void_p * 4).from_address(packed.address)
    assert ctypes.c_int32.from_address(pointers[0]).value == -5
    assert [ctypes.c_uint64.from_address(pointer).value for pointer in pointers[1:]] == [0x1234567890, 0, 0]


@pytest.mark.parametrize("values", [(2**31, 0.0), (-(2**31) - 1, 0.0), (1.5, 0.0), (1,), (1, 2.0, 3)])
def test_values_that_do_not_fit_are_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(struct.error):
        PackedArguments(parameters("i32", "fp32")).write(values)


def test_unknown_parameter_types_are_refused() -> None:
    with pytest.raises(ValueError, match="p0: no way to pass type 'i1'"):
        PackedArguments(parameters("i1"))


# Opening


def test_opening_makes_the_primary_context_current_and_reads_facts(cuda: StandInCuda) -> None:
    protocol: Driver = NvidiaDriver.open(1)
    facts = protocol.facts
    assert (facts.name, facts.arch, facts.num_multiprocessors) == ("Stand-in GPU", "sm_90", 132)
    assert (facts.total_bytes, facts.granularity, facts.can_share_memory) == (1 << 37, 2 << 20, True)
    context = cuda.arguments("cuCtxSetCurrent")
    protocol.attach_thread()
    assert cuda.names()[-1] == "cuCtxSetCurrent"
    assert cuda.arguments("cuCtxSetCurrent") == context
    assert int(cuda.arguments("cuDevicePrimaryCtxRetain")[0]) == 1
    assert protocol.memory_info() == (5, 7)


def test_a_device_that_cannot_share_has_no_granularity(cuda: StandInCuda) -> None:
    cuda.can_share_memory = False
    facts = NvidiaDriver.open().facts
    assert (facts.granularity, facts.can_share_memory) == (1, False)


def test_a_missing_driver_is_told(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def cuda_init(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda, "cuInit", cuda_init, raising=False)
    with pytest.raises(StartupError, match=r"no NVIDIA driver: libcuda\.so\.1 .*install the driver"):
        NvidiaDriver.open()


def test_a_missing_gpu_is_told(cuda: StandInCuda) -> None:
    with pytest.raises(StartupError, match="GPU 2 was asked for, but the driver sees 2"):
        NvidiaDriver.open(2)
    cuda.failures["cuInit"] = real.CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(StartupError, match="sees no GPU"):
        NvidiaDriver.open()


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemGetInfo"])
def test_a_failing_device_is_no_fault_of_the_user(cuda: StandInCuda, call: str) -> None:
    cuda.failures[call] = real.CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(DriverError, match=r"CUDA_ERROR_UNKNOWN \(999\)"):
        NvidiaDriver.open().memory_info()


# Memory


def test_bytes_travel(driver: NvidiaDriver, stream: Stream) -> None:
    pinned = driver.allocate_pinned(8)
    device = driver.allocate(8)
    pinned.view[:] = b"abcdefgh"
    driver.copy_to_device_async(device, pinned.address, 8, stream)
    driver.fill_async(device + 6, 0x7A, 2, stream)
    driver.copy_on_device_async(device, device + 6, 2, stream)
    driver.copy_to_host_async(pinned.address, device, 8, stream)
    assert bytes(pinned.view) == b"zzcdefzz"
    driver.free(device)
    driver.free_pinned(pinned)


def test_large_pinned_memory_is_in_huge_pages_that_are_registered(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    pinned = driver.allocate_pinned(3 << 20)
    assert pinned.address % (2 << 20) == 0
    assert cuda.registered == {pinned.address}
    pinned.view[:] = bytes(range(256)) * (3 << 12)
    assert ctypes.string_at(pinned.address + 512, 256) == bytes(range(256))
    driver.free_pinned(pinned)
    assert not cuda.registered


def test_what_cannot_be_registered_comes_from_the_driver(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    cuda.failures = {"cuMemHostRegister": real.CUresult.CUDA_ERROR_NOT_SUPPORTED}
    pinned = driver.allocate_pinned(3 << 20)
    pinned.view[-1] = 1
    driver.free_pinned(pinned)
    assert not cuda.registered


def test_a_full_device_raises_its_own_error(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    cuda.failures = dict.fromkeys(("cuMemAlloc", "cuMemCreate"), real.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory, match="of 77 bytes: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.allocate(77)
    with pytest.raises(OutOfDeviceMemory, match="of 2097152 bytes"):
        driver.create_shareable(2 << 20)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        ("cuMemcpyHtoDAsync", "copy_to_device_async"),
        ("cuMemcpyDtoHAsync", "copy_to_host_async"),
        ("cuMemcpyDtoDAsync", "copy_on_device_async"),
        ("cuMemsetD8Async", "fill_async"),
    ],
)
def test_a_failed_copy_says_how_much(
    driver: NvidiaDriver, stream: Stream, cuda: StandInCuda, call: str, method: str
) -> None:
    cuda.failures[call] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=rf"{call} of 12 bytes: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        getattr(driver, method)(1, 2, 12, stream)


def test_a_code_that_cuda_bindings_does_not_know_is_shown(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    cuda.failures["cuMemFree"] = 12345
    with pytest.raises(DriverError, match="12345"):
        driver.free(1)


# Shareable memory


def test_shareable_memory_is_a_descriptor_closed_on_exec(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    fd = driver.create_shareable(2 << 20)
    assert not os.get_inheritable(fd)
    os.close(fd)
    num_bytes, properties, _ = cuda.arguments("cuMemCreate")
    assert (num_bytes, properties.location.id) == (2 << 20, 1)
    assert properties.requestedHandleTypes == nvidia._POSIX_FD
    assert cuda.names()[-1] == "cuMemRelease"


def test_memory_that_cannot_be_exported_is_released(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    cuda.failures["cuMemExportToShareableHandle"] = real.CUresult.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(DriverError, match="cuMemExportToShareableHandle"):
        driver.create_shareable(2 << 20)
    assert cuda.names()[-1] == "cuMemRelease"


@pytest.mark.parametrize("writable", [False, True])
def test_a_mapping_has_the_access_asked_for(driver: NvidiaDriver, cuda: StandInCuda, writable: bool) -> None:
    address = driver.map_shareable(5, 2 << 20, writable=writable)
    flags = real.CUmemAccess_flags
    expected = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    mapped_at, _, descriptors, count = cuda.arguments("cuMemSetAccess")
    assert (mapped_at, count, descriptors[0].flags, descriptors[0].location.id) == (address, 1, expected, 1)
    assert cuda.arguments("cuMemImportFromShareableHandle")[0] == 5
    assert cuda.names()[-1] == "cuMemRelease"
    driver.unmap(address, 2 << 20)
    assert cuda.names()[-2:] == ["cuMemUnmap", "cuMemAddressFree"]


@pytest.mark.parametrize(
    ("call", "undone"),
    [
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
        ("cuMemMap", ["cuMemMap", "cuMemAddressFree", "cuMemRelease"]),
    ],
)
def test_half_a_mapping_is_undone(driver: NvidiaDriver, cuda: StandInCuda, call: str, undone: list[str]) -> None:
    cuda.failures[call] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=call):
        driver.map_shareable(5, 2 << 20, writable=True)
    assert cuda.names()[-3:] == undone


# Order


def test_streams_are_apart_and_events_carry_no_time(driver: NvidiaDriver, cuda: StandInCuda) -> None:
    stream, event = driver.create_stream(), driver.create_event()
    assert cuda.arguments("cuStreamCreate") == (real.CUstream_flags.CU_STREAM_NON_BLOCKING,)
    assert cuda.arguments("cuEventCreate") == (real.CUevent_flags.CU_EVENT_DISABLE_TIMING,)
    driver.record(event, stream)
    driver.wait_on_stream_async(event, stream)
    driver.wait(event)
    driver.synchronize(stream)
    assert cuda.calls[-4:] == [
        ("cuEventRecord", event, stream),
        ("cuStreamWaitEvent", stream, event, 0),
        ("cuEventSynchronize", event),
        ("cuStreamSynchronize", stream),
    ]


def test_an_event_is_done_not_done_or_broken(driver: NvidiaDriver, stream: Stream, cuda: StandInCuda) -> None:
    event = driver.create_event()
    assert driver.is_done(event)
    cuda.failures["cuEventQuery"] = real.CUresult.CUDA_ERROR_NOT_READY
    assert not driver.is_done(event)
    for call in ("cuEventQuery", "cuEventRecord"):
        cuda.failures[call] = real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DriverError, match="cuEventQuery"):
        driver.is_done(event)
    with pytest.raises(DriverError, match="cuEventRecord"):
        driver.record(event, stream)


# Kernels


def test_loading_leaves_nothing_for_the_launch(driver: NvidiaDriver, cuda: StandInCuda, kernel: KernelImage) -> None:
    function = driver.load(kernel)
    assert cuda.arguments("cuModuleLoadData") == (b".version 8.0\0",)
    assert cuda.arguments("cuModuleGetFunction")[1] == b"scale_entry"
    assert cuda.arguments("cuFuncLoad") == (function.handle,)
    assert "cuFuncSetAttribute" not in cuda.names()
    assert function.image is kernel


def test_much_shared_memory_is_asked_for(
    driver: NvidiaDriver, stream: Stream, cuda: StandInCuda, kernel: KernelImage
) -> None:
    image = KernelImage(**{name: getattr(kernel, name) for name in kernel.__slots__} | {"shared_bytes": 99_000})
    function = driver.load(image)
    attribute = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert cuda.arguments("cuFuncSetAttribute") == (function.handle, attribute, 99_000)
    driver.launch_async(function, (1, 1, 1), (0, 0, 0.0), stream)
    assert cuda.arguments("cuLaunchKernel")[7] == 99_000


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad"])
def test_a_kernel_that_cannot_be_loaded_is_named(
    driver: NvidiaDriver, cuda: StandInCuda, kernel: KernelImage, call: str
) -> None:
    cuda.failures[call] = real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(DriverError, match=rf"{call} of kernel scale \(.*scale\.ptx\): CUDA_ERROR_NO_BINARY"):
        driver.load(kernel)


def test_a_vanished_kernel_is_for_the_user_to_mend(driver: NvidiaDriver, kernel: KernelImage) -> None:
    kernel.path.unlink()
    with pytest.raises(StartupError, match=r"kernel scale .*No such file.*build the kernels again"):
        driver.load(kernel)


def test_a_launch_is_one_call(driver: NvidiaDriver, stream: Stream, cuda: StandInCuda, kernel: KernelImage) -> None:
    function = driver.load(kernel)
    cuda.calls.clear()
    driver.launch_async(function, (3, 2, 1), (0x1234567890, -7, 0.5), stream)
    ((name, handle, *sizes, packed_at, extra),) = cuda.calls
    assert (name, handle, sizes, extra) == ("cuLaunchKernel", function.handle, [3, 2, 1, 128, 1, 1, 0, stream], 0)
    assert packed_at == function.arguments.address
    assert struct.unpack("@QifQQ", function.arguments.raw) == (0x1234567890, -7, 0.5, 0, 0)


def test_a_failed_launch_names_the_kernel(
    driver: NvidiaDriver, stream: Stream, cuda: StandInCuda, kernel: KernelImage
) -> None:
    function = driver.load(kernel)
    cuda.failures["cuLaunchKernel"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=r"launch of kernel scale\(BLOCK=16\) on grid \(0, 1, 1\)"):
        driver.launch_async(function, (0, 1, 1), (1, 2, 3.0), stream)


# Beginning early


@pytest.fixture
def early(cuda: StandInCuda) -> NvidiaDriver:
    return NvidiaDriver.open(early_launch=True)


def test_a_kernel_that_waits_may_begin_early(early: NvidiaDriver, cuda: StandInCuda, kernel: KernelImage) -> None:
    function = early.load(dataclasses.replace(kernel, waits=True, shared_bytes=1234))
    streams = early.create_stream(), early.create_stream()
    for stream, grid in ((streams[0], (3, 2, 1)), (streams[0], (4, 2, 5)), (streams[1], (4, 2, 5))):
        cuda.calls.clear()
        early.launch_async(function, grid, (0x1234567890, -7, 0.5), stream)
        ((name, config, handle, packed_at, extra),) = cuda.calls
        assert (name, handle, packed_at, extra) == ("cuLaunchKernelEx", function.handle, function.arguments.address, 0)
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == grid
        assert (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes) == (128, 1, 1, 1234)
        assert int(config.hStream) == stream
        (attribute,) = config.attrs
        wanted = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert (config.numAttrs, attribute.id) == (1, wanted)
        assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_kernel_that_does_not_wait_never_begins_early(
    early: NvidiaDriver, stream: Stream, cuda: StandInCuda, kernel: KernelImage
) -> None:
    early.launch_async(early.load(kernel), (1, 1, 1), (1, 2, 3.0), stream)
    assert cuda.calls[-1][0] == "cuLaunchKernel"


def test_nothing_begins_early_unless_asked_for(
    driver: NvidiaDriver, stream: Stream, cuda: StandInCuda, kernel: KernelImage
) -> None:
    driver.launch_async(driver.load(dataclasses.replace(kernel, waits=True)), (1, 1, 1), (1, 2, 3.0), stream)
    assert cuda.calls[-1][0] == "cuLaunchKernel"


def test_a_failed_early_launch_names_the_kernel(early: NvidiaDriver, cuda: StandInCuda, kernel: KernelImage) -> None:
    function = early.load(dataclasses.replace(kernel, waits=True))
    cuda.failures["cuLaunchKernelEx"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match=r"launch of kernel scale\(BLOCK=16\) on grid \(0, 1, 1\)"):
        early.launch_async(function, (0, 1, 1), (1, 2, 3.0), early.create_stream())


# Waiting after every launch


def test_what_faults_is_named_when_launches_are_waited_for(
    cuda: StandInCuda, blas: StandInCublas, kernel: KernelImage
) -> None:
    driver = NvidiaDriver.open(sync_launches=True)
    stream, function, operands = driver.create_stream(), driver.load(kernel), Operands(2, 8, 16)
    graph = record_nothing(driver, stream)
    driver.launch_async(function, (1, 1, 1), (1, 2, 3.0), stream)
    assert cuda.calls[-1] == ("cuStreamSynchronize", stream)
    cuda.failures["cuStreamSynchronize"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match=r"execution of kernel scale\(BLOCK=16\) on grid \(1, 1, 1\): .* \(700\)"):
        driver.launch_async(function, (1, 1, 1), (1, 2, 3.0), stream)
    with pytest.raises(DriverError, match=r"execution of GEMM \(2, 16\) x \(8, 16\) bfloat16 -> bfloat16"):
        operands.run(driver, stream)
    with pytest.raises(DriverError, match="execution of a graph"):
        driver.launch_graph_async(graph, stream)


def test_nothing_is_waited_for_in_a_capture(cuda: StandInCuda, kernel: KernelImage) -> None:
    driver = NvidiaDriver.open(sync_launches=True)
    stream, function = driver.create_stream(), driver.load(kernel)
    driver.begin_capture(stream)
    driver.launch_async(function, (1, 1, 1), (1, 2, 3.0), stream)
    assert "cuStreamSynchronize" not in cuda.names()
    driver.abandon_capture(stream)
    driver.launch_async(function, (1, 1, 1), (1, 2, 3.0), stream)
    assert "cuStreamSynchronize" in cuda.names()


# Graphs


def record_nothing(driver: NvidiaDriver, stream: Stream) -> Any:
    driver.begin_capture(stream)
    return driver.end_capture(stream)


def test_a_capture_becomes_a_graph(driver: NvidiaDriver, stream: Stream, cuda: StandInCuda) -> None:
    cuda.calls.clear()
    graph = record_nothing(driver, stream)
    mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert cuda.calls[0] == ("cuStreamBeginCapture", stream, mode)
    assert cuda.names()[1:] == ["cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]
    driver.launch_graph_async(graph, stream)
    driver.destroy_graph(graph)
    assert cuda.calls[-2:] == [("cuGraphLaunch", graph, stream), ("cuGraphExecDestroy", graph)]


def test_a_graph_that_cannot_be_made_leaves_nothing(driver: NvidiaDriver, stream: Stream, cuda: StandInCuda) -> None:
    cuda.failures["cuGraphInstantiate"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfDeviceMemory, match="cuGraphInstantiate"):
        record_nothing(driver, stream)
    assert cuda.names()[-1] == "cuGraphDestroy"
    cuda.failures["cuGraphLaunch"] = real.CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(DriverError, match="cuGraphLaunch"):
        driver.launch_graph_async(1, stream)  # type: ignore[arg-type]


def test_a_capture_is_abandoned_whatever_its_state(driver: NvidiaDriver, stream: Stream, cuda: StandInCuda) -> None:
    driver.begin_capture(stream)
    driver.abandon_capture(stream)
    assert cuda.names()[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]
    cuda.failures["cuStreamEndCapture"] = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    driver.begin_capture(stream)
    driver.abandon_capture(stream)
    assert cuda.names()[-1] == "cuStreamEndCapture"
    cuda.is_capturing = False
    driver.abandon_capture(stream)
    assert cuda.names()[-1] == "cuStreamIsCapturing"


# GEMM


class Operands:
    """x [m, k], weight [n, k], bias [n] and out [m, n] in host memory, at multiples of 256 bytes plus `shift`."""

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.bfloat16,
        out_dtype: torch.dtype | None = None,
        *,
        has_bias: bool = False,
        shift: int = 0,
    ) -> None:
        self._memory: list[Any] = []
        self._shift = shift
        generator = torch.Generator().manual_seed(m)
        self.tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (n, k), (n,))]
        self.x, self.weight, self.bias = (self._place(tensor) for tensor in self.tensors)
        if not has_bias:
            self.bias = None  # type: ignore[assignment]
        self.out = self._place(torch.zeros(m, n, dtype=out_dtype or dtype))

    def run(
        self,
        driver: NvidiaDriver,
        stream: Stream,
        workspace: Buffer = WORKSPACE,
        algorithm: GemmAlgorithm | None = None,
    ) -> None:
        driver.gemm_async(self.x, self.weight, self.bias, self.out, workspace, stream, algorithm)

    def check(self) -> None:
        x, weight, bias = (tensor.double() for tensor in self.tensors)
        expected = x @ weight.T + (bias if self.bias is not None else 0)
        out = self._tensor(self.out)
        assert torch.equal(out, expected.to(out.dtype))

    def _place(self, tensor: torch.Tensor) -> Buffer:
        memory = ctypes.create_string_buffer(tensor.nbytes + 512)
        self._memory.append(memory)
        address = -(-ctypes.addressof(memory) // 256) * 256 + self._shift
        buffer = Buffer(address, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))  # type: ignore[arg-type]
        self._tensor(buffer).copy_(tensor)
        return buffer

    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        if not buffer.num_bytes:
            return torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype))
        memory = (ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address)
        return torch.frombuffer(memory, dtype=getattr(torch, buffer.dtype)).view(buffer.shape)


@pytest.mark.parametrize("m", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_dtype", "has_bias"), [(None, False), (torch.float32, False), (None, True)])
def test_cublas_is_asked_for_the_right_product(
    driver: NvidiaDriver,
    stream: Stream,
    blas: StandInCublas,
    m: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    has_bias: bool,
) -> None:
    for n, k in ((16, 24), (24, 8)):
        operands = Operands(m, n, k, dtype, out_dtype, has_bias=has_bias)
        operands.run(driver, stream)
        operands.check()


def test_the_same_weight_shape_serves_other_weights_and_sizes(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    everything = [Operands(m, 16, 8, has_bias=has_bias) for has_bias in (False, True) for m in (3, 1, 3)]
    for operands in everything * 2:
        operands.run(driver, stream)
        operands.check()
    assert blas.calls.count("cublasLtMatmulDescCreate") == 1 + 3, "one to choose by, and one for each bias"
    assert blas.calls.count("cublasLtMatrixLayoutCreate") == 3
    assert len(blas.heuristics) == 2


def test_the_handle_is_made_once_and_keeps_sums_exact(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    driver.prepare_gemms()
    driver.prepare_gemms()
    Operands(1, 8, 8).run(driver, stream)
    assert blas.calls.count("cublasCreate_v2") == blas.calls.count("cublasSetMathMode") == 1


def test_stream_and_workspace_are_bound_when_they_change(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    operands = Operands(1, 8, 8)
    for _ in range(3):
        operands.run(driver, stream)
    binding = [call for call in blas.calls if "SetStream" in call or "SetWorkspace" in call]
    assert binding == ["cublasSetStream_v2", "cublasSetWorkspace_v2"]
    operands.run(driver, driver.create_stream())
    operands.run(driver, stream, Buffer(0x20000, (1 << 10,), "uint8"))
    assert blas.calls.count("cublasSetWorkspace_v2") == 3


def test_no_rows_are_no_call(driver: NvidiaDriver, stream: Stream, blas: StandInCublas) -> None:
    Operands(0, 8, 8).run(driver, stream)
    assert "cublasGemmEx" not in blas.calls


def test_the_choice_of_an_algorithm_knows_workspace_and_alignment(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    for shift in (0, 16, 32):
        operands = Operands(2, 8, 8, has_bias=True, shift=shift)
        operands.run(driver, stream)
        operands.check()
    common = {cublas_lt.LT_PREF_MAX_WORKSPACE_BYTES: 1 << 20, cublas_lt.LT_PREF_REDUCTION_SCHEME_MASK: 2}
    assert blas.heuristics == [common | dict.fromkeys((0, 5, 6, 7, 8), alignment) for alignment in (256, 16)]
    assert blas.calls.count("cublasLtMatmulPreferenceDestroy") == 2


def test_the_algorithm_used_longest_ago_is_forgotten_first(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "MAX_ALGORITHMS", 2)
    for m, num_choices in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        operands = Operands(m, 8, 8, has_bias=True)
        operands.run(driver, stream)
        operands.check()
        assert len(blas.heuristics) == num_choices


@pytest.mark.parametrize(
    ("call", "has_bias"),
    [
        ("cublasGemmEx", False),
        ("cublasSetWorkspace_v2", False),
        ("cublasLtMatmul", True),
        ("cublasLtMatmulDescCreate", True),
        ("cublasLtMatmulDescSetAttribute", True),
        ("cublasLtMatrixLayoutSetAttribute", True),
        ("cublasLtMatmulPreferenceSetAttribute", True),
        ("cublasLtMatmulAlgoGetHeuristic", True),
    ],
)
def test_a_failing_library_call_is_named(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas, call: str, has_bias: bool
) -> None:
    blas.failures[call] = 13
    expected = call.removesuffix("_v2")
    with pytest.raises(DriverError, match=rf"{expected}.*: CUBLAS_STATUS_EXECUTION_FAILED \(13\)"):
        Operands(3, 8, 8, has_bias=has_bias).run(driver, stream)


def test_a_status_without_name_and_a_shape_without_algorithm_are_errors(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    blas.num_algorithms = 0
    with pytest.raises(DriverError, match="m 3, n 8, k 16, bfloat16 -> bfloat16, with bias: no algorithm"):
        Operands(3, 8, 16, has_bias=True).run(driver, stream)
    blas.failures["cublasGemmEx"] = 99
    with pytest.raises(DriverError, match=r"x \(3, 16\), weight \(8, 16\), bfloat16 -> bfloat16: unknown status"):
        Operands(3, 8, 16).run(driver, stream)


def test_unsuitable_operands_are_refused(driver: NvidiaDriver, stream: Stream, blas: StandInCublas) -> None:
    good = Operands(2, 8, 16, has_bias=True)

    def gemm(x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer) -> None:
        driver.gemm_async(x, weight, bias, out, WORKSPACE, stream)

    def retyped(buffer: Buffer) -> Buffer:
        return Buffer(buffer.address, buffer.shape, "float16")

    for operands in (
        (good.out, good.weight, None, good.out),
        (good.x, good.weight, None, good.x),
        (retyped(good.x), good.weight, None, good.out),
        (good.x, good.weight, None, retyped(good.out)),
        (good.x, good.weight, retyped(good.bias), good.out),
        (good.x, good.weight.rows(0, 4), None, good.out.view(4, 4).rows(0, 2)),
    ):
        with pytest.raises(AssertionError):
            gemm(*operands)


def an_algorithm(first_word: int, workspace_bytes: int = 0) -> GemmAlgorithm:
    return GemmAlgorithm(first_word.to_bytes(8, "little") + bytes(56), workspace_bytes)


@pytest.mark.parametrize(("out_dtype", "has_bias"), [(None, False), (torch.float32, False), (None, True)])
def test_an_algorithm_that_is_asked_for_is_checked_once_per_size_and_used(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas, out_dtype: torch.dtype | None, has_bias: bool
) -> None:
    for m in (2, 2, 5):
        operands = Operands(m, 16, 8, torch.float16, out_dtype, has_bias=has_bias)
        operands.run(driver, stream, algorithm=an_algorithm(0xBEEF))
        operands.check()
    assert blas.used == [0xBEEF] * 3
    assert blas.heuristics == []
    assert blas.calls.count("cublasLtMatmulAlgoCheck") == 2
    assert "cublasGemmEx" not in blas.calls


@pytest.mark.parametrize("algorithm", [an_algorithm(0xBAD), an_algorithm(0xBEEF, workspace_bytes=2 << 20)])
def test_an_algorithm_that_cannot_be_run_is_replaced_and_told_once(
    driver: NvidiaDriver,
    stream: Stream,
    blas: StandInCublas,
    algorithm: GemmAlgorithm,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blas.refused = {0xBAD}
    for m in (2, 3, 2):
        operands = Operands(m, 16, 8)
        operands.run(driver, stream, algorithm=algorithm)
        operands.check()
    assert blas.used == [0xA1] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "m 2, n 16, k 8, bfloat16 -> bfloat16" in caplog.text
    assert "run scripts/tune-kernels" in caplog.text


def test_an_algorithm_is_not_used_on_addresses_that_it_was_not_found_for(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    operands = Operands(2, 16, 8, shift=16)
    operands.run(driver, stream, algorithm=an_algorithm(0xBEEF))
    operands.check()
    assert blas.used == [0xA1]


def test_a_search_gives_what_a_gemm_can_be_asked_for(driver: NvidiaDriver, stream: Stream, blas: StandInCublas) -> None:
    blas.num_algorithms = 5
    operands = Operands(3, 16, 8, has_bias=True)
    found = driver.search_gemms(GemmProblem(3, 16, 8, "bfloat16", "bfloat16", True, 1 << 20), 4)
    assert found == [an_algorithm(0xA1 + index, 512 * index) for index in range(4)]
    assert blas.heuristics[0][cublas_lt.LT_PREF_REDUCTION_SCHEME_MASK] == 2
    for algorithm in found:
        operands.run(driver, stream, algorithm=algorithm)
        operands.check()
    assert blas.used == [0xA1, 0xA2, 0xA3, 0xA4]
    assert driver.gemm_version() == 130101


def test_a_search_looks_at_other_sizes_and_keeps_what_this_one_can_use(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    blas.num_algorithms, blas.refused = 3, {0xA2}
    found = driver.search_gemms(GemmProblem(3, 16, 8, "bfloat16", "bfloat16", False, 600), 64)
    assert found == [an_algorithm(0xA1)], "one is refused, and one needs more workspace than there is"
    rooms = [asked[cublas_lt.LT_PREF_MAX_WORKSPACE_BYTES] for asked in blas.heuristics]
    assert rooms == [600, 0] * 4
    assert blas.rows == [3, 3, 6, 6, 12, 12, 2, 2]
    Operands(3, 16, 8).run(driver, stream, algorithm=found[0])
    assert blas.used == [0xA1]


def test_a_search_fails_only_where_nothing_is_known_at_all(driver: NvidiaDriver, blas: StandInCublas) -> None:
    problem = GemmProblem(3, 16, 8, "bfloat16", "bfloat16", False, 600)
    blas.least_room = 1
    assert driver.search_gemms(problem, 64)
    blas.least_room = 601
    with pytest.raises(DriverError, match="AlgoGetHeuristic of m 3, n 16, k 8"):
        driver.search_gemms(problem, 64)


def test_variants_of_an_algorithm_differ_in_one_respect_and_sum_in_fp32(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas
) -> None:
    problem = GemmProblem(3, 16, 8, "bfloat16", "float32", False, 1 << 20)
    original = an_algorithm(0xA1)
    found = driver.vary_gemm(problem, original)
    assert len(set(found)) == len(found)
    assert original not in found
    changes = [changed_words(original, other) for other in found]
    tiles = [change for change in changes if change.keys() == {lt_variants.CONFIG_TILE_ID}]
    assert tiles == [{lt_variants.CONFIG_TILE_ID: tile} for tile in blas.TILE_IDS]
    splits = [change for change in changes if lt_variants.CONFIG_SPLITK_NUM in change]
    assert splits[1] == {lt_variants.CONFIG_SPLITK_NUM: 2, lt_variants.CONFIG_REDUCTION_SCHEME: 2}
    assert all(change.get(lt_variants.CONFIG_REDUCTION_SCHEME, 0) in (0, 2) for change in changes)
    options = [change[5] for change in changes if lt_variants.CONFIG_CUSTOM_OPTION in change]
    assert options == [1, 2, 3]
    assert not any(lt_variants.CONFIG_STAGES_ID in change for change in changes), "the library lists none"


def changed_words(before: GemmAlgorithm, after: GemmAlgorithm) -> dict[int, int]:
    """The stand-in keeps attribute i in the half-word 8 + i."""
    words = [struct.unpack("<32H", algorithm.data) for algorithm in (before, after)]
    return {index - 8: new for index, (old, new) in enumerate(zip(*words, strict=True)) if old != new}


def test_descriptors_of_more_biases_than_a_model_has_are_given_back(
    driver: NvidiaDriver, stream: Stream, blas: StandInCublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "MAX_DESCRIPTORS", 2)
    many = [Operands(2, 16, 8, has_bias=True) for _ in range(3)]
    for operands in many:
        operands.run(driver, stream)
        operands.check()
    assert blas.calls.count("cublasLtMatmulDescDestroy") == 2


def test_the_library_is_not_loaded_in_a_capture(driver: NvidiaDriver, stream: Stream, blas: StandInCublas) -> None:
    driver.begin_capture(stream)
    with pytest.raises(AssertionError, match="prepare_gemms"):
        Operands(1, 8, 8).run(driver, stream)


# Finding cuBLAS


def test_a_missing_library_is_told_with_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot load libcublasLt\.so\.13.*nvidia/cu13/lib.*nvidia-cublas"):
        cublas._load("libcublasLt.so.13 that nobody has", [tmp_path])
    broken = tmp_path / "nvidia/cu13/lib" / cublas.LIBRARY_NAMES[0]
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    with pytest.raises(StartupError, match=str(broken)):
        cublas.load_cublas([str(tmp_path)])


@pytest.mark.parametrize("below", cublas.WHEEL_FOLDERS)
def test_the_libraries_of_a_wheel_are_found(tmp_path: Path, below: str) -> None:
    library = ctypes.util.find_library("m")
    assert library is not None
    real_path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if library in line)
    folder = tmp_path / "site-packages" / below
    folder.mkdir(parents=True)
    for name in cublas.LIBRARY_NAMES:
        (folder / name).symlink_to(real_path)
    found = cublas.load_cublas([str(tmp_path / "nothing here"), str(tmp_path / "site-packages")])
    assert found.cublas._name == str(folder / "libcublas.so.13")
    found.lt.cos.restype, found.lt.cos.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert found.lt.cos(1.0) == math.cos(1.0)
