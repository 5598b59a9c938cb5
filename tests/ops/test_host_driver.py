"""The driver in host memory does what the protocol says, and refuses what a GPU would refuse or do wrong in silence."""

import os
import struct
import threading
from collections.abc import Callable

import pytest
import torch

from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, DriverError, Graph, OutOfDeviceMemory, Stream
from tests.ops.driver_kernels import image, scale_image
from tests.ops.host_driver import HostDriver, allocate_buffer, as_tensor, to_device

GRANULARITY = 2 << 20
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


@pytest.fixture
def stream(driver: HostDriver) -> Stream:
    return driver.create_stream()


def test_it_is_a_driver(driver: HostDriver) -> None:
    protocol: Driver = driver
    assert protocol.facts.can_share_memory
    for name in vars(Driver):
        assert name.startswith("_") or hasattr(driver, name)


# Memory


def test_memory_is_counted_poisoned_and_given_back(driver: HostDriver) -> None:
    free, total = driver.memory_info()
    buffer = allocate_buffer(driver, (3, 5), "float32")
    assert as_tensor(buffer).isnan().all()
    assert driver.memory_info() == (free - 60, total)
    driver.free(buffer.address)
    assert driver.memory_info() == (free, total)


def test_what_does_not_fit_is_refused_and_the_rest_goes_on() -> None:
    driver = HostDriver(total_bytes=1000)
    driver.allocate(600)
    with pytest.raises(OutOfDeviceMemory, match="500 bytes"):
        driver.allocate(500)
    driver.allocate(400)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_nothing_cannot_be_allocated(driver: HostDriver, num_bytes: int) -> None:
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.allocate(num_bytes)
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.allocate_pinned(num_bytes)


def test_only_what_was_allocated_can_be_freed_and_only_once(driver: HostDriver) -> None:
    address = driver.allocate(100)
    pinned = driver.allocate_pinned(100)
    for wrong in (address + 1, pinned.address):
        with pytest.raises(DriverError, match="nothing to release"):
            driver.free(wrong)
    driver.free(address)
    with pytest.raises(DriverError, match="nothing to release"):
        driver.free(address)
    driver.free_pinned(pinned)
    with pytest.raises(DriverError, match="nothing to release"):
        driver.free_pinned(pinned)


def test_bytes_go_to_the_device_across_it_and_back(driver: HostDriver, stream: Stream) -> None:
    pinned = driver.allocate_pinned(8)
    first, second = driver.allocate(8), driver.allocate(8)
    pinned.view[:] = b"abcdefgh"
    driver.copy_to_device_async(first, pinned.address, 8, stream)
    driver.fill_async(first + 2, 0x7A, 2, stream)
    driver.copy_on_device_async(second, first, 8, stream)
    driver.copy_to_host_async(pinned.address, second + 1, 4, stream)
    assert bytes(pinned.view) == b"bzzeefgh"


def test_copies_of_nothing_look_at_no_address(driver: HostDriver, stream: Stream) -> None:
    driver.copy_to_device_async(0, 0, 0, stream)
    driver.fill_async(0, 0, 0, stream)


def test_copies_check_both_ends(driver: HostDriver, stream: Stream) -> None:
    device, pinned = driver.allocate(8), driver.allocate_pinned(8).address
    with pytest.raises(DriverError, match="pinned memory, not device"):
        driver.copy_to_device_async(pinned, pinned, 8, stream)
    with pytest.raises(DriverError, match="device memory, not pinned"):
        driver.copy_to_host_async(device, device, 8, stream)
    with pytest.raises(DriverError, match=r"9 bytes at .* are not"):
        driver.copy_to_device_async(device, pinned, 9, stream)
    with pytest.raises(DriverError, match="are not"):
        driver.fill_async(device - 1, 0, 2, stream)
    with pytest.raises(AssertionError, match="overlap"):
        driver.copy_on_device_async(device, device + 2, 4, stream)


def test_freed_memory_is_never_touched_again(driver: HostDriver, stream: Stream) -> None:
    address = driver.allocate(4096)
    driver.free(address)
    assert all(driver.allocate(4096) != address for _ in range(20))
    with pytest.raises(DriverError, match="are not"):
        driver.fill_async(address, 0, 1, stream)


# Shareable memory


def test_shared_memory_is_one_memory_wherever_it_is_mapped(driver: HostDriver, stream: Stream) -> None:
    fd = driver.create_shareable(GRANULARITY)
    assert not os.get_inheritable(fd)
    writer = driver.map_shareable(fd, GRANULARITY, writable=True)
    other = HostDriver()
    reader = other.map_shareable(fd, GRANULARITY, writable=False)
    os.close(fd)
    driver.fill_async(writer, 7, 100, stream)
    assert as_tensor(Buffer(reader, (101,), "uint8")).tolist() == [7] * 100 + [0]
    driver.unmap(writer, GRANULARITY)
    assert as_tensor(Buffer(reader, (1,), "uint8")).item() == 7
    with pytest.raises(DriverError, match="are not"):
        driver.fill_async(writer, 7, 100, stream)


def test_a_read_only_mapping_refuses_every_kind_of_write(driver: HostDriver, stream: Stream) -> None:
    fd = driver.create_shareable(GRANULARITY)
    address = driver.map_shareable(fd, GRANULARITY, writable=False)
    ones = to_device(driver, torch.ones(8, 8, dtype=torch.float16))
    inside, workspace = Buffer(address, (8, 8), "float16"), allocate_buffer(driver, (64,), "uint8")
    function = driver.load(scale_image("fp16"))
    driver.launch_async(function, (1, 1, 1), (address, ones.address, 16, 2.0), stream)
    assert as_tensor(ones)[:2].eq(0).all()
    writes: list[Callable[[], None]] = [
        lambda: driver.fill_async(address, 0, 1, stream),
        lambda: driver.copy_on_device_async(address, ones.address, 1, stream),
        lambda: driver.launch_async(function, (1, 1, 1), (ones.address, address, 16, 2.0), stream),
        lambda: driver.gemm_async(ones, ones, None, inside, workspace, stream),
    ]
    for write in writes:
        with pytest.raises(DriverError, match="read-only"):
            write()
    os.close(fd)


def test_shareable_memory_comes_in_whole_granules(driver: HostDriver) -> None:
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.create_shareable(GRANULARITY + 1)
    fd = driver.create_shareable(GRANULARITY)
    for num_bytes in (1000, 2 * GRANULARITY):
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            driver.map_shareable(fd, num_bytes, writable=True)
    address = driver.map_shareable(fd, GRANULARITY, writable=True)
    with pytest.raises(DriverError, match="nothing to release"):
        driver.free(address)
    with pytest.raises(AssertionError, match="of a mapping of"):
        driver.unmap(address, 4096)
    os.close(fd)


def test_a_device_may_be_full_or_unable_to_share() -> None:
    with pytest.raises(OutOfDeviceMemory):
        HostDriver(total_bytes=GRANULARITY).create_shareable(2 * GRANULARITY)
    with pytest.raises(DriverError, match="NOT_SUPPORTED"):
        HostDriver(can_share_memory=False).create_shareable(GRANULARITY)


# Order and threads


def test_events_are_done_at_once(driver: HostDriver, stream: Stream) -> None:
    event, other = driver.create_event(), driver.create_stream()
    assert driver.is_done(event)
    driver.record(event, stream)
    driver.wait_on_stream_async(event, other)
    driver.wait(event)
    driver.synchronize(other)
    assert driver.is_done(event)


def test_handles_that_are_none_are_refused(driver: HostDriver, stream: Stream) -> None:
    calls: list[Callable[[], object]] = [
        lambda: driver.synchronize(Stream(5)),
        lambda: driver.is_done(5),
        lambda: driver.record(5, stream),
        lambda: driver.launch_graph_async(5, stream),
        lambda: driver.destroy_graph(5),
    ]
    for call in calls:
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            call()


def test_each_thread_must_attach_itself(driver: HostDriver) -> None:
    errors: list[DriverError] = []

    def work() -> None:
        try:
            driver.allocate(10)
        except DriverError as error:
            errors.append(error)
        driver.attach_thread()
        driver.allocate(10)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [error.name for error in errors] == ["CUDA_ERROR_INVALID_CONTEXT"]
    assert driver.calls["allocate"] == 2


# Kernels


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_kernel_computes_what_its_source_says(driver: HostDriver, stream: Stream, dtype: str) -> None:
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    x = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(torch_dtype)
    source, out = to_device(driver, x), to_device(driver, torch.zeros_like(x))
    function = driver.load(scale_image(dtype))
    driver.launch_async(function, (3, 1, 1), (source.address, out.address, 37, 1.1), stream)
    expected = (x[:37].float() * torch.tensor(1.1)).to(torch_dtype)
    assert torch.equal(as_tensor(out)[:37], expected)
    assert as_tensor(out)[37:].eq(0).all()


def test_scalars_are_what_they_are_on_the_device(driver: HostDriver, stream: Stream) -> None:
    ints, floats = to_device(driver, torch.zeros(2, dtype=torch.int64)), to_device(driver, torch.zeros(1))
    types = {"ints": "*i64", "floats": "*fp32", "number": "i32", "wide": "i64", "factor": "fp32"}
    function = driver.load(image("copy_scalars", **types))
    addresses = (ints.address, floats.address)
    driver.launch_async(function, (1, 1, 1), (*addresses, -(2**31), 2**40 + 1, 0.1), stream)
    assert as_tensor(ints).tolist() == [-(2**31), 2**40 + 1]
    assert as_tensor(floats).item() == struct.unpack("f", struct.pack("f", 0.1))[0]
    for values in ((*addresses, 2**31, 0, 0.0), (*addresses, 0, 0.5, 0.0), (*addresses, 0, 0)):
        with pytest.raises(struct.error):
            driver.launch_async(function, (1, 1, 1), values, stream)


def test_run_time_loops_and_atomics_work(driver: HostDriver, stream: Stream) -> None:
    counters = to_device(driver, torch.zeros(4, dtype=torch.int32))
    function = driver.load(image("count_up", constants={"COUNT": 4}, counters="*i32", last="i32"))
    driver.launch_async(function, (2, 1, 1), (counters.address, 3), stream)
    assert as_tensor(counters).tolist() == [6] * 4
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        driver.launch_async(function, (1, 1, 1), (counters.address + 4, 1), stream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_products_are_summed_in_fp32(driver: HostDriver, stream: Stream, dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    name = {"torch.bfloat16": "*bf16", "torch.float16": "*fp16"}[str(dtype)]
    out = to_device(driver, torch.zeros(16, 16))
    function = driver.load(image("multiply", constants={"SIZE": 16}, a=name, b=name, out="*fp32"))
    addresses = (to_device(driver, a).address, to_device(driver, b).address, out.address)
    driver.launch_async(function, (1, 1, 1), addresses, stream)
    torch.testing.assert_close(as_tensor(out), a.float() @ b.float(), rtol=1e-6, atol=1e-6)


def test_numbers_beyond_all_bounds_raise_no_warning(driver: HostDriver, stream: Stream) -> None:
    function = driver.load(image("peaks", constants={"SIZE": 4}, x="*fp32", out="*fp32"))
    out = to_device(driver, torch.zeros(2))
    for x in (torch.full((4,), 1e30), torch.full((4,), float("nan"))):
        driver.launch_async(function, (1, 1, 1), (to_device(driver, x).address, out.address), stream)
    assert as_tensor(out).isnan().all()


def test_rounding_to_bf16_is_that_of_torch(driver: HostDriver, stream: Stream) -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    x = torch.cat(
        [bits.view(torch.float32), torch.tensor([0.0, -0.0, 1e-45, 3.4e38, torch.inf, -torch.inf, torch.nan])]
    )
    source, out = to_device(driver, x), to_device(driver, torch.zeros(len(x), dtype=torch.bfloat16))
    types = {"x": "*fp32", "out": "*bf16", "n": "i32", "factor": "fp32"}
    function = driver.load(image("scale", constants={"BLOCK": 4096}, **types))
    driver.launch_async(function, (2, 1, 1), (source.address, out.address, len(x), 1.0), stream)
    torch.testing.assert_close(as_tensor(out), x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_a_kernel_may_not_compute_in_bf16(driver: HostDriver, stream: Stream) -> None:
    x = to_device(driver, torch.ones(1, dtype=torch.bfloat16))
    function = driver.load(image("add_as_stored", x="*bf16", out="*bf16"))
    with pytest.raises(TypeError, match="convert to float32 first"):
        driver.launch_async(function, (1, 1, 1), (x.address, x.address), stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
def test_what_a_mask_hides_is_not_zero(driver: HostDriver, stream: Stream, dtype: torch.dtype) -> None:
    name = {torch.float32: "*fp32", torch.int32: "*i32", torch.bool: "*i1"}[dtype]
    raw = torch.zeros(4, dtype=torch.uint8 if dtype == torch.bool else dtype)
    x, out = to_device(driver, raw), to_device(driver, raw)
    function = driver.load(image("load_without_other", constants={"SIZE": 4}, x=name, out=name, n="i32"))
    driver.launch_async(function, (1, 1, 1), (x.address, out.address, 2), stream)
    assert as_tensor(out)[:2].eq(0).all()
    assert as_tensor(out)[2:].ne(0).all()


def test_a_kernel_that_leaves_its_buffers_is_stopped(driver: HostDriver, stream: Stream) -> None:
    x, out = to_device(driver, torch.zeros(32)), to_device(driver, torch.zeros(32))
    function = driver.load(scale_image())
    with pytest.raises(DriverError, match=r"kernel scale on grid \(3, 1, 1\).*not \(all\) allocated"):
        driver.launch_async(function, (3, 1, 1), (x.address, out.address, 33, 1.0), stream)
    with pytest.raises(DriverError, match="no multiple of 4"):
        driver.launch_async(function, (1, 1, 1), (x.address + 2, out.address, 8, 1.0), stream)
    pinned = driver.allocate_pinned(64)
    with pytest.raises(DriverError, match="pinned memory, not device"):
        driver.launch_async(function, (1, 1, 1), (pinned.address, out.address, 8, 1.0), stream)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 65536, 1), (1, 1, 0)])
def test_impossible_grids_are_refused(driver: HostDriver, stream: Stream, grid: tuple[int, int, int]) -> None:
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        driver.launch_async(driver.load(scale_image()), grid, (0, 0, 0, 0.0), stream)


def test_alignment_that_the_image_promises_is_checked(driver: HostDriver, stream: Stream) -> None:
    function = driver.load(scale_image(aligned=16))
    with pytest.raises(AssertionError, match="n is no multiple of 16"):
        driver.launch_async(function, (1, 1, 1), (0, 0, 8, 16.0), stream)


def test_an_image_must_suit_its_source(driver: HostDriver) -> None:
    with pytest.raises(TypeError, match="takes"):
        driver.load(image("scale", constants={"BLOCK": 16}, x="*fp32", n="i32", out="*fp32", factor="fp32"))
    with pytest.raises(TypeError, match="takes"):
        driver.load(image("copy_scalars", constants={"BLOCK": 16}, ints="*i64"))


# GEMM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_gemms_agree_with_fp64(driver: HostDriver, stream: Stream, m: int, dtype: torch.dtype, out_dtype: str) -> None:
    generator = torch.Generator().manual_seed(m)
    x, weight = (torch.randn(rows, 64, generator=generator).to(dtype) for rows in (m, 24))
    bias = torch.randn(24, generator=generator).to(dtype) if out_dtype == "same" else None
    out = to_device(driver, torch.zeros(m, 24, dtype=dtype if out_dtype == "same" else torch.float32))
    workspace = allocate_buffer(driver, (256,), "uint8")
    on_device = [to_device(driver, tensor) if tensor is not None else None for tensor in (x, weight, bias)]
    driver.gemm_async(*on_device, out, workspace, stream)  # type: ignore[arg-type]
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    torch.testing.assert_close(as_tensor(out), expected.to(as_tensor(out).dtype), rtol=1e-2, atol=1e-3)


def test_gemms_of_unsuitable_buffers_are_refused(driver: HostDriver, stream: Stream) -> None:
    workspace = allocate_buffer(driver, (256,), "uint8")

    def gemm(x: Buffer, weight: Buffer, out: Buffer, bias: Buffer | None = None) -> None:
        driver.gemm_async(x, weight, bias, out, workspace, stream)

    x, weight = (to_device(driver, torch.zeros(8, 8, dtype=torch.float16)) for _ in range(2))
    bad_calls: list[Callable[[], None]] = [
        lambda: gemm(x, weight, Buffer(weight.address, (8, 4), "float16")),
        lambda: gemm(Buffer(x.address, (8, 4), "float16"), weight, x),
        lambda: gemm(x, Buffer(weight.address, (8, 8), "bfloat16"), x),
        lambda: gemm(x, weight, Buffer(x.address, (8, 8), "bfloat16")),
        lambda: gemm(x, weight, x, Buffer(x.address, (8,), "float32")),
        lambda: gemm(x, weight, x, Buffer(x.address, (4,), "float16")),
        lambda: gemm(Buffer(x.address, (8, 4), "float16"), Buffer(x.address, (8, 4), "float16"), x),
        lambda: gemm(Buffer(x.address + 8, (4, 8), "float16"), weight, Buffer(x.address, (4, 8), "float16")),
    ]
    for call in bad_calls:
        with pytest.raises(AssertionError):
            call()
    with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
        gemm(x, Buffer(weight.address, (4096, 8), "float16"), Buffer(x.address, (8, 4096), "float16"))


# Graphs


def test_a_graph_repeats_what_was_recorded_on_what_is_there_now(driver: HostDriver, stream: Stream) -> None:
    x, out = to_device(driver, torch.ones(16)), to_device(driver, torch.zeros(16))
    pinned = driver.allocate_pinned(64)
    function = driver.load(scale_image())
    driver.begin_capture(stream)
    driver.launch_async(function, (1, 1, 1), (x.address, out.address, 16, 3.0), stream)
    driver.copy_to_host_async(pinned.address, out.address, 64, stream)
    graph = driver.end_capture(stream)
    assert as_tensor(out).eq(0).all()
    for factor in (1.0, 2.0):
        as_tensor(x).fill_(factor)
        driver.launch_graph_async(graph, stream)
        assert pinned.view.cast("f").tolist() == [3 * factor] * 16
    driver.destroy_graph(graph)
    with pytest.raises(DriverError, match="INVALID_HANDLE"):
        driver.launch_graph_async(graph, stream)


def test_other_streams_and_threads_go_on_while_one_captures(driver: HostDriver, stream: Stream) -> None:
    address, other = driver.allocate(4), driver.create_stream()
    driver.begin_capture(stream)
    driver.fill_async(address, 1, 4, stream)
    driver.fill_async(address, 2, 4, other)

    def work() -> None:
        driver.attach_thread()
        driver.free(driver.allocate(8))
        driver.synchronize(other)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    graph = driver.end_capture(stream)
    assert as_tensor(Buffer(address, (4,), "uint8")).tolist() == [2] * 4
    driver.launch_graph_async(graph, other)
    assert as_tensor(Buffer(address, (4,), "uint8")).tolist() == [1] * 4


@pytest.mark.parametrize("name", ["allocate", "synchronize", "wait", "is_done", "load", "prepare_gemms"])
def test_what_may_not_happen_in_a_capture_spoils_it(driver: HostDriver, stream: Stream, name: str) -> None:
    address, event = driver.allocate(4), driver.create_event()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: driver.allocate(4),
        "synchronize": lambda: driver.synchronize(stream),
        "wait": lambda: driver.wait(event),
        "is_done": lambda: driver.is_done(event),
        "load": lambda: driver.load(scale_image()),
        "prepare_gemms": driver.prepare_gemms,
    }
    driver.begin_capture(stream)
    with pytest.raises(DriverError, match="CAPTURE_UNSUPPORTED"):
        calls[name]()
    with pytest.raises(DriverError, match="CAPTURE_INVALIDATED"):
        driver.fill_async(address, 0, 4, stream)
    with pytest.raises(DriverError, match="CAPTURE_INVALIDATED"):
        driver.end_capture(stream)
    calls[name]()


def test_an_abandoned_capture_leaves_a_usable_stream(driver: HostDriver, stream: Stream) -> None:
    address = driver.allocate(4)
    driver.fill_async(address, 0, 4, stream)
    driver.begin_capture(stream)
    driver.fill_async(address, 1, 4, stream)
    driver.fail_at(1)
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        driver.fill_async(address, 2, 4, stream)
    driver.abandon_capture(stream)
    driver.abandon_capture(stream)
    assert as_tensor(Buffer(address, (4,), "uint8")).eq(0).all()
    driver.fill_async(address, 3, 4, stream)
    assert as_tensor(Buffer(address, (4,), "uint8")).eq(3).all()
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        driver.end_capture(stream)


def test_a_stream_captures_once_at_a_time(driver: HostDriver, stream: Stream) -> None:
    driver.begin_capture(stream)
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        driver.begin_capture(stream)


def test_events_do_not_cross_the_border_of_a_capture(driver: HostDriver, stream: Stream) -> None:
    outside, inside = driver.create_event(), driver.create_event()
    driver.begin_capture(stream)
    driver.record(inside, stream)
    driver.wait_on_stream_async(inside, stream)
    with pytest.raises(DriverError, match="CAPTURE_ISOLATION"):
        driver.wait_on_stream_async(outside, stream)
    driver.abandon_capture(stream)
    with pytest.raises(DriverError, match="CAPTURED_EVENT"):
        driver.wait(inside)
    driver.record(inside, stream)
    driver.wait(inside)


def test_a_stream_that_waits_for_a_capture_is_recorded_with_it_until_it_is_waited_for(
    driver: HostDriver, stream: Stream
) -> None:
    side, forked, joined = driver.create_stream(), driver.create_event(), driver.create_event()
    address = driver.allocate(8)
    driver.fill_async(address, 0, 8, stream)

    def record_branches(*, is_joined: bool, is_late: bool = False) -> Graph:
        driver.begin_capture(stream)
        driver.record(forked, stream)
        driver.wait_on_stream_async(forked, side)
        driver.fill_async(address, 1, 4, side)
        driver.record(joined, side)
        if is_late:
            driver.fill_async(address, 7, 4, side)
        if is_joined:
            driver.wait_on_stream_async(joined, stream)
        driver.fill_async(address + 4, 2, 4, stream)
        return driver.end_capture(stream)

    graph = record_branches(is_joined=True)
    values = as_tensor(Buffer(address, (8,), "uint8"))
    assert values.eq(0).all()
    driver.launch_graph_async(graph, stream)
    assert values.tolist() == [1] * 4 + [2] * 4
    driver.fill_async(address, 3, 4, side)
    assert values[0] == 3, "the stream is free again"
    for options in ({"is_joined": False}, {"is_joined": True, "is_late": True}):
        with pytest.raises(DriverError, match="CAPTURE_UNJOINED"):
            record_branches(**options)
        driver.fill_async(address, 4, 4, side)
        assert values[0] == 4, "a failed capture holds no stream"


def test_a_stream_that_joined_a_capture_cannot_end_it(driver: HostDriver, stream: Stream) -> None:
    side, forked = driver.create_stream(), driver.create_event()
    driver.begin_capture(stream)
    driver.record(forked, stream)
    driver.wait_on_stream_async(forked, side)
    with pytest.raises(DriverError, match="ILLEGAL_STATE"):
        driver.end_capture(side)
    driver.abandon_capture(stream)
    driver.begin_capture(side)


def test_gemms_in_a_capture_must_be_prepared(driver: HostDriver, stream: Stream) -> None:
    x, workspace = to_device(driver, torch.zeros(8, 8, dtype=torch.float16)), allocate_buffer(driver, (8,), "uint8")
    driver.begin_capture(stream)
    with pytest.raises(AssertionError, match="prepare_gemms"):
        driver.gemm_async(x, x, None, x, workspace, stream)


def test_a_replay_checks_its_memory_too(driver: HostDriver, stream: Stream) -> None:
    address = driver.allocate(4)
    driver.begin_capture(stream)
    driver.fill_async(address, 1, 4, stream)
    graph = driver.end_capture(stream)
    driver.free(address)
    with pytest.raises(DriverError, match="are not"):
        driver.launch_graph_async(graph, stream)


# Injected errors


def test_the_nth_call_fails_once(driver: HostDriver) -> None:
    error = OutOfDeviceMemory("allocate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    driver.fail_at(2, error)
    driver.memory_info()
    with pytest.raises(OutOfDeviceMemory):
        driver.allocate(1)
    driver.allocate(1)
    assert driver.calls == {"memory_info": 1, "allocate": 2}
    assert driver.num_calls == 3


def test_failures_may_be_of_one_method_or_forgiven(driver: HostDriver, stream: Stream) -> None:
    driver.fail_at(1, method="synchronize")
    driver.fail_at(2, method="memory_info")
    driver.memory_info()
    with pytest.raises(DriverError):
        driver.synchronize(stream)
    driver.forgive()
    driver.memory_info()
