"""Every method of the driver protocol on a GPU, and every kind of GEMM against fp64."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda.buffer import ITEM_BYTES, Buffer
from server.ops.cuda.driver import (
    DriverError,
    GemmAlgorithm,
    GemmProblem,
    KernelImage,
    OutOfDeviceMemory,
    Parameter,
    PinnedMemory,
    Stream,
)
from server.ops.cuda.nvidia import NvidiaDriver

WORKSPACE_BYTES = 64 << 20
ROOT = Path(__file__).parents[2]

# out[i] = x[i] * factor. The last two parameters are those that Triton adds.
SCALE_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 out, .param .u32 n, .param .f32 factor, .param .u64 s, .param .u64 t)
{
  .reg .pred %p; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %d<6>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [n];
  setp.ge.s32 %p, %r4, %r5;
  @%p bra DONE;
  ld.param.u64 %d1, [x]; ld.param.u64 %d2, [out];
  mul.wide.s32 %d3, %r4, 4;
  add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3;
  ld.global.f32 %f1, [%d4]; ld.param.f32 %f2, [factor];
  mul.f32 %f3, %f1, %f2;
  st.global.f32 [%d5], %f3;
DONE:
  ret;
}
"""
TRAP_PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry fail(.param .u64 s, .param .u64 t)
{
  trap;
}
"""


@pytest.fixture(scope="module")
def driver(device: str) -> NvidiaDriver:
    driver = NvidiaDriver.open()
    driver.prepare_gemms()
    return driver


@pytest.fixture(autouse=True)
def attached(driver: NvidiaDriver) -> None:
    driver.attach_thread()  # other tests' torch may have made another context current


@pytest.fixture
def stream(driver: NvidiaDriver) -> Stream:
    return driver.create_stream()


@pytest.fixture(scope="module")
def pinned(driver: NvidiaDriver) -> PinnedMemory:
    return driver.allocate_pinned(1 << 20)


@pytest.fixture(scope="module")
def workspace(driver: NvidiaDriver) -> Buffer:
    return Buffer(driver.allocate(WORKSPACE_BYTES), (WORKSPACE_BYTES,), "uint8")


@pytest.fixture
def scale(tmp_path: Path) -> KernelImage:
    path = tmp_path / "scale.ptx"
    path.write_text(SCALE_PTX)
    types = {"x": "*fp32", "out": "*fp32", "n": "i32", "factor": "fp32"}
    parameters = tuple(Parameter(name, kind, 1) for name, kind in types.items())
    return KernelImage("scale", "none:scale", {}, parameters, "scale", 4, 0, path)


Read = Callable[[int, int], bytes]


@pytest.fixture
def read(driver: NvidiaDriver, stream: Stream, pinned: PinnedMemory) -> Read:
    def read_bytes(address: int, num_bytes: int) -> bytes:
        driver.copy_to_host_async(pinned.address, address, num_bytes, stream)
        driver.synchronize(stream)
        return bytes(pinned.view[:num_bytes])

    return read_bytes


def to_device(tensor: torch.Tensor) -> tuple[Buffer, torch.Tensor]:
    """torch's memory of the same context, which the second of the pair keeps alive."""
    tensor = tensor.cuda().contiguous()
    torch.cuda.synchronize()
    name = str(tensor.dtype).removeprefix("torch.")
    assert name in ITEM_BYTES
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), name, tensor), tensor  # type: ignore[arg-type]


# Facts and memory


def test_facts_are_those_that_torch_reads(driver: NvidiaDriver) -> None:
    properties = torch.cuda.get_device_properties(0)
    facts = driver.facts
    assert (facts.name, facts.arch) == (properties.name, f"sm_{properties.major}{properties.minor}")
    assert facts.num_multiprocessors == properties.multi_processor_count
    assert facts.total_bytes == properties.total_memory
    assert facts.can_share_memory
    assert facts.granularity % 4096 == 0


def test_memory_is_taken_and_given_back(driver: NvidiaDriver) -> None:
    free, total = driver.memory_info()
    address = driver.allocate(1 << 30)
    assert address % 256 == 0
    assert driver.memory_info()[0] <= free - (1 << 30)
    driver.free(address)
    assert driver.memory_info()[1] == total
    assert driver.memory_info()[0] >= free - (64 << 20)
    with pytest.raises(OutOfDeviceMemory, match=f"of {2 * total} bytes"):
        driver.allocate(2 * total)
    driver.free(driver.allocate(1 << 20))


def test_bytes_travel(driver: NvidiaDriver, stream: Stream, pinned: PinnedMemory, read: Read) -> None:
    first, second = driver.allocate(8), driver.allocate(8)
    pinned.view[:8] = b"abcdefgh"
    driver.copy_to_device_async(first, pinned.address, 8, stream)
    driver.fill_async(first + 2, 0x7A, 2, stream)
    driver.copy_on_device_async(second, first, 8, stream)
    assert read(second + 1, 4) == b"bzze"
    driver.free(first)
    driver.free(second)


def test_pinned_memory_comes_and_goes(driver: NvidiaDriver) -> None:
    memory = driver.allocate_pinned(1 << 16)
    memory.view[-1] = 7
    assert (memory.view.nbytes, memory.view[-1]) == (1 << 16, 7)
    driver.free_pinned(memory)


# Shareable memory


def test_one_memory_is_mapped_twice(driver: NvidiaDriver, stream: Stream, read: Read) -> None:
    num_bytes = 2 * driver.facts.granularity
    fd = driver.create_shareable(num_bytes)
    assert not os.get_inheritable(fd)
    writer = driver.map_shareable(fd, num_bytes, writable=True)
    reader = driver.map_shareable(fd, num_bytes, writable=False)
    os.close(fd)
    driver.fill_async(writer, 7, num_bytes, stream)
    assert read(reader + num_bytes - 3, 3) == b"\7\7\7"
    driver.unmap(writer, num_bytes)
    assert read(reader, 3) == b"\7\7\7"
    driver.unmap(reader, num_bytes)


def test_a_descriptor_of_something_else_is_refused(driver: NvidiaDriver) -> None:
    fd = os.memfd_create("no device memory")
    with pytest.raises(DriverError):
        driver.map_shareable(fd, driver.facts.granularity, writable=True)
    os.close(fd)


def run_python(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, pass_fds=pass_fds, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


MAKER = """
import os, socket, sys
from server.ops.cuda.nvidia import NvidiaDriver
driver = NvidiaDriver.open()
stream = driver.create_stream()
num_bytes = driver.facts.granularity
fd = driver.create_shareable(num_bytes)
driver.fill_async(driver.map_shareable(fd, num_bytes, writable=True), 9, num_bytes, stream)
driver.synchronize(stream)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [fd])
os.kill(os.getpid(), 9)
"""


def test_memory_outlives_its_maker(driver: NvidiaDriver, read: Read) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", MAKER, str(theirs.fileno())]
    maker = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),))
    assert maker.wait(timeout=120) == -9
    _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    address = driver.map_shareable(fd, driver.facts.granularity, writable=False)
    assert read(address, 4) == b"\x09" * 4
    driver.unmap(address, driver.facts.granularity)
    os.close(fd)
    ours.close()
    theirs.close()


WRITER = """
import sys
from server.ops.cuda.driver import DriverError
from server.ops.cuda.nvidia import NvidiaDriver
driver = NvidiaDriver.open()
stream = driver.create_stream()
address = driver.map_shareable(int(sys.argv[1]), driver.facts.granularity, writable=False)
try:
    driver.fill_async(address, 1, 16, stream)
    driver.synchronize(stream)
    print("written")
except DriverError as error:
    print(error)
"""


def test_another_process_cannot_write_what_it_maps_read_only(driver: NvidiaDriver, stream: Stream, read: Read) -> None:
    num_bytes = driver.facts.granularity
    fd = driver.create_shareable(num_bytes)
    address = driver.map_shareable(fd, num_bytes, writable=True)
    driver.fill_async(address, 5, num_bytes, stream)
    driver.synchronize(stream)
    assert "CUDA_ERROR" in run_python(WRITER, str(fd), pass_fds=(fd,))
    assert read(address, 16) == b"\5" * 16
    driver.unmap(address, num_bytes)
    os.close(fd)


# Order and threads


def test_events_order_streams(driver: NvidiaDriver, stream: Stream, read: Read) -> None:
    other, event = driver.create_stream(), driver.create_event()
    assert driver.is_done(event)
    num_bytes = 1 << 28
    source, dest = driver.allocate(num_bytes), driver.allocate(num_bytes)
    driver.fill_async(dest, 0, num_bytes, stream)
    driver.synchronize(stream)
    driver.fill_async(source, 3, num_bytes, other)
    driver.record(event, other)
    driver.wait_on_stream_async(event, stream)
    driver.copy_on_device_async(dest, source, num_bytes, stream)
    assert read(dest + num_bytes - 2, 2) == b"\3\3"
    driver.wait(event)
    assert driver.is_done(event)
    driver.free(source)
    driver.free(dest)


def test_each_thread_attaches_itself(driver: NvidiaDriver) -> None:
    names: list[str] = []

    def work() -> None:
        try:
            driver.allocate(16)
        except DriverError as error:
            names.append(error.name)
        driver.attach_thread()
        driver.free(driver.allocate(16))
        names.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert names == ["CUDA_ERROR_INVALID_CONTEXT", "done"]


# Kernels


def test_a_kernel_is_loaded_and_launched(driver: NvidiaDriver, stream: Stream, scale: KernelImage) -> None:
    function = driver.load(scale)
    x, source = to_device(torch.randn(1000))
    out, result = to_device(torch.zeros(1000))
    driver.launch_async(function, (8, 1, 1), (x.address, out.address, 990, 0.1), stream)
    driver.launch_async(function, (8, 1, 1), (out.address, out.address, 500, 2.0), stream)
    driver.synchronize(stream)
    expected = source * torch.tensor(0.1)
    expected[:500] *= 2
    expected[990:] = 0
    assert torch.equal(result, expected)


def test_what_is_no_kernel_is_refused_by_name(driver: NvidiaDriver, scale: KernelImage) -> None:
    scale.path.write_text("nothing like PTX")
    with pytest.raises(DriverError, match="kernel scale"):
        driver.load(scale)


def test_every_built_kernel_can_be_loaded(driver: NvidiaDriver) -> None:
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"nothing is built in {built_folder()}: run scripts/build-kernels")
    images = manifest.images(driver.facts.arch)
    assert images
    for image in images:
        assert driver.load(image).image is image


TRAP = """
import sys
from pathlib import Path
from server.ops.cuda.driver import DriverError, KernelImage
from server.ops.cuda.nvidia import NvidiaDriver
driver = NvidiaDriver.open(sync_launches=True)
function = driver.load(KernelImage("trap", "none:trap", {"KIND": 1}, (), "fail", 1, 0, Path(sys.argv[1])))
try:
    driver.launch_async(function, (2, 1, 1), (), driver.create_stream())
except DriverError as error:
    print(error)
"""


def test_a_kernel_that_traps_is_named_when_launches_are_waited_for(tmp_path: Path, driver: NvidiaDriver) -> None:
    path = tmp_path / "trap.ptx"
    path.write_text(TRAP_PTX)
    assert "execution of kernel trap(KIND=1) on grid (2, 1, 1): CUDA_ERROR" in run_python(TRAP, str(path))


# GEMM


def check_gemm(
    driver: NvidiaDriver,
    stream: Stream,
    workspace: Buffer,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    out_dtype: torch.dtype,
    algorithm: GemmAlgorithm | None = None,
) -> torch.Tensor:
    """Run it and hold it to fp64: one rounding to out's dtype, and sums of k products in fp32."""
    x, weight, bias = ((to_device(tensor) if tensor is not None else (None, None)) for tensor in operands)
    shape = (operands[0].shape[0], operands[1].shape[0])
    out, result = to_device(torch.full(shape, float("nan"), dtype=out_dtype))
    assert x[0] is not None
    assert weight[0] is not None
    driver.gemm_async(x[0], weight[0], bias[0], out, workspace, stream, algorithm)
    driver.synchronize(stream)
    assert x[1] is not None
    assert weight[1] is not None
    expected = x[1].double() @ weight[1].double().T
    magnitude = x[1].double().abs() @ weight[1].double().abs().T
    if bias[1] is not None:
        expected += bias[1].double()
    rounding = torch.finfo(out_dtype).eps / 2 if out_dtype != torch.float32 else 0.0
    limit = expected.abs() * rounding * 1.01 + magnitude * 2.0**-18
    assert bool(((result.double() - expected).abs() <= limit).all())
    return result


@pytest.mark.parametrize("m", [1, 2, 7, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("is_fp32_out", "has_bias"), [(False, False), (True, False), (False, True)])
def test_gemms_agree_with_fp64(
    driver: NvidiaDriver,
    stream: Stream,
    workspace: Buffer,
    m: int,
    dtype: torch.dtype,
    is_fp32_out: bool,
    has_bias: bool,
) -> None:
    torch.manual_seed(m)
    for n, k in ((4608, 3584), (3584, 18944), (264, 72)):
        x, weight = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
        bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
        check_gemm(driver, stream, workspace, (x, weight, bias), torch.float32 if is_fp32_out else dtype)


@pytest.mark.parametrize("m", [1, 24, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("is_fp32_out", "has_bias"), [(False, False), (True, False), (False, True)])
def test_every_algorithm_that_is_found_agrees_with_fp64(
    driver: NvidiaDriver,
    stream: Stream,
    workspace: Buffer,
    m: int,
    dtype: torch.dtype,
    is_fp32_out: bool,
    has_bias: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(m)
    out_dtype = torch.float32 if is_fp32_out else dtype
    for n, k in ((4608, 3584), (264, 72)):
        x, weight = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
        bias = torch.randn(n, device="cuda").to(dtype) if has_bias else None
        dtypes = [str(kind).removeprefix("torch.") for kind in (dtype, out_dtype)]
        problem = GemmProblem(m, n, k, *dtypes, has_bias, workspace.num_bytes)  # type: ignore[arg-type]
        found = driver.search_gemms(problem, 64)
        assert found
        assert len({algorithm.data for algorithm in found}) == len(found)
        variants = driver.vary_gemm(problem, found[0])
        assert variants, "other tiles at least"
        for algorithm in (*found, *variants):
            check_gemm(driver, stream, workspace, (x, weight, bias), out_dtype, algorithm)
    assert caplog.records == [], "all of them can be run"
    assert driver.gemm_version() >= 130000


def test_an_algorithm_that_makes_no_sense_is_replaced(
    driver: NvidiaDriver, stream: Stream, workspace: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    check_gemm(driver, stream, workspace, (x, weight, None), torch.bfloat16, GemmAlgorithm(b"\xee" * 64, 0))
    assert "cuBLAS cannot run the tuned algorithm for m 3, n 32, k 64" in caplog.text


def test_timed_events_measure_what_lies_between(driver: NvidiaDriver, stream: Stream, workspace: Buffer) -> None:
    first, last = driver.create_timed_event(), driver.create_timed_event()
    driver.record(first, stream)
    for value in range(8):
        driver.fill_async(workspace.address, value, workspace.num_bytes, stream)
    driver.record(last, stream)
    driver.wait(last)
    assert 0.05 < driver.elapsed_ms(first, last) < 50, "eight times 64 MiB"


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_a_buffer_need_only_16_bytes_of_alignment(
    driver: NvidiaDriver, stream: Stream, workspace: Buffer, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, x_tensor = to_device(torch.randn(9, 72, generator=generator).bfloat16())
    weight, weight_tensor = to_device(torch.randn(40, 72, generator=generator).bfloat16())
    bias, bias_tensor = to_device(torch.randn(40, generator=generator).bfloat16())
    out, result = to_device(torch.zeros(9, 40).bfloat16())
    for first in (1, 3):
        part = bias.rows(8, 32) if has_bias else None
        narrow = Buffer(out.address + first * 80, (9 - first, 24), "bfloat16")
        driver.gemm_async(x.rows(first, 9), weight.rows(8, 32), part, narrow, workspace, stream)
        driver.synchronize(stream)
        expected = x_tensor[first:].double() @ weight_tensor[8:32].double().T
        if has_bias:
            expected += bias_tensor[8:32].double()
        got = result.view(-1)[first * 40 :][: (9 - first) * 24].view(9 - first, 24)
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)


def test_a_gemm_of_no_rows_does_nothing(driver: NvidiaDriver, stream: Stream, workspace: Buffer) -> None:
    weight = torch.randn(8, 8).bfloat16()
    assert check_gemm(driver, stream, workspace, (weight[:0], weight, None), torch.bfloat16).shape == (0, 8)


def test_many_sizes_with_bias_fit_the_memory_of_algorithms(
    driver: NvidiaDriver, stream: Stream, workspace: Buffer
) -> None:
    weight, bias = torch.randn(64, 64).bfloat16(), torch.randn(64).bfloat16()
    for m in range(1, 1100, 7):
        check_gemm(driver, stream, workspace, (torch.randn(m, 64).bfloat16(), weight, bias), torch.bfloat16)


# Graphs


def test_a_graph_repeats_launches_gemms_and_copies(
    driver: NvidiaDriver, stream: Stream, workspace: Buffer, scale: KernelImage
) -> None:
    function = driver.load(scale)
    x, x_tensor = to_device(torch.randn(4, 64))
    half, half_tensor = to_device(torch.randn(4, 64).bfloat16())
    weight, _ = to_device(torch.randn(32, 64).bfloat16())
    bias, _ = to_device(torch.randn(32).bfloat16())
    scaled, scaled_tensor = to_device(torch.zeros(4, 64))
    logits, logits_tensor = to_device(torch.zeros(4, 32))
    biased, biased_tensor = to_device(torch.zeros(4, 32).bfloat16())

    def step() -> None:
        driver.launch_async(function, (2, 1, 1), (x.address, scaled.address, 256, 3.0), stream)
        driver.gemm_async(half, weight, None, logits, workspace, stream)
        driver.gemm_async(half, weight, bias, biased, workspace, stream)

    step()
    driver.begin_capture(stream)
    step()
    graph = driver.end_capture(stream)
    for seed in range(3):
        torch.manual_seed(seed)
        x_tensor.normal_()
        half_tensor.normal_()
        torch.cuda.synchronize()
        step()
        driver.synchronize(stream)
        expected = [tensor.clone() for tensor in (scaled_tensor, logits_tensor, biased_tensor)]
        for tensor in (scaled_tensor, logits_tensor, biased_tensor):
            tensor.zero_()
        torch.cuda.synchronize()
        driver.launch_graph_async(graph, stream)
        driver.synchronize(stream)
        for tensor, wanted in zip((scaled_tensor, logits_tensor, biased_tensor), expected, strict=True):
            assert torch.equal(tensor, wanted)
    driver.destroy_graph(graph)


def test_an_abandoned_capture_leaves_a_usable_stream(driver: NvidiaDriver, stream: Stream, read: Read) -> None:
    address = driver.allocate(16)
    driver.fill_async(address, 1, 16, stream)
    driver.synchronize(stream)
    for spoil in (True, False):
        driver.begin_capture(stream)
        driver.fill_async(address, 2, 16, stream)
        if spoil:
            with pytest.raises(DriverError, match="CAPTURE"):
                driver.synchronize(stream)
        driver.abandon_capture(stream)
        assert read(address, 2) == b"\1\1"
    driver.abandon_capture(stream)
    driver.free(address)


def test_other_threads_allocate_while_one_captures(driver: NvidiaDriver, stream: Stream) -> None:
    address = driver.allocate(16)
    errors: list[Exception] = []

    def work() -> None:
        try:
            driver.attach_thread()
            driver.free(driver.allocate(1 << 20))
            driver.synchronize(driver.create_stream())
        except DriverError as error:
            errors.append(error)

    driver.begin_capture(stream)
    driver.fill_async(address, 2, 16, stream)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    graph = driver.end_capture(stream)
    assert not errors
    driver.launch_graph_async(graph, stream)
    driver.synchronize(stream)
    driver.destroy_graph(graph)
    driver.free(address)
