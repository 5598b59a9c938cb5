"""What whole steps do not show of the cuda backend: its memory, its ways to the host and back, recording, refusals."""

import threading
from dataclasses import fields, replace

import pytest
import torch

from server.errors import StartupError
from server.models.facts import ModelFacts
from server.ops.cuda.arena import ALIGNMENT, Arena, BufferSpec
from server.ops.cuda.backend import create_backend
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DriverError, OutOfDeviceMemory, Stream
from server.ops.cuda.operations import CudaOperations
from server.ops.cuda.sizes import GRAPH_BYTES, activation_bound_bytes, kv_pool_spec
from server.ops.cuda.staging import NUM_FETCHES, Staging, TokenRing, staging_spec
from server.ops.cuda.support import why_unsupported
from server.ops.cuda.weights import weight_buffers
from server.ops.interface import Activations, BatchLimits, StepInputs, StepShape, StepSize
from server.ops.sampling import SamplingUse
from server.weights.layout import weight_layout
from tests.ops.host_driver import HostDriver, as_tensor, to_device
from tests.ops.host_kernels import host_images

FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=512,
    rms_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=False,
    tied_head=True,
    dtype="float16",
)
LIMITS = BatchLimits(max_batched_tokens=20, max_num_requests=5, max_model_len=100, num_blocks=9, block_size=16)
NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver()


@pytest.fixture
def stream(driver: HostDriver) -> Stream:
    return driver.create_stream()


@pytest.fixture
def ops(driver: HostDriver, stream: Stream) -> CudaOperations:
    layout = weight_layout(FACTS)
    address = driver.allocate(layout.total_bytes)
    driver.fill_async(address, 0, layout.total_bytes, stream)
    made = create_backend(
        FACTS,
        weight_buffers(address, layout),
        LIMITS,
        vocab_limit=FACTS.vocab_size,
        driver=driver,
        stream=stream,
        images=host_images(),
    )
    assert isinstance(made, CudaOperations)
    return made


COLUMNS = LIMITS.max_blocks_per_request


def decode_shape(num_requests: int) -> StepShape:
    return StepShape(
        starts=(0,) * num_requests,
        lengths=(1,) * num_requests,
        num_decodes=num_requests,
        num_samples=num_requests,
        num_random=0,
        reads_last_tokens=False,
        sampling=NO_SAMPLING,
        table_rows=num_requests,
        table_columns=COLUMNS,
        size=StepSize(num_requests, num_requests, 0, num_requests),
    )


# Memory


def test_an_arena_gives_aligned_buffers_until_it_is_full(driver: HostDriver) -> None:
    specs = [BufferSpec((3,), "uint8"), BufferSpec((5, 7), "float32"), BufferSpec((1,), "int32")]
    arena = Arena(driver, sum(spec.num_bytes for spec in specs))
    buffers = [arena.take(spec) for spec in specs]
    assert [(buffer.shape, buffer.dtype) for buffer in buffers] == [(spec.shape, spec.dtype) for spec in specs]
    assert all(buffer.address % ALIGNMENT == 0 for buffer in buffers)
    assert buffers[1].address - buffers[0].address == ALIGNMENT
    assert buffers[0].owner is arena
    with pytest.raises(AssertionError, match="the arena ends"):
        arena.take(BufferSpec((1,), "uint8"))


MODELS = (
    FACTS,
    replace(FACTS, head_dim=128, num_heads=8, num_kv_heads=1, qk_norm=True),
    replace(FACTS, vocab_size=1000, hidden_size=88, intermediate_size=112, dtype="bfloat16", num_layers=1),
)


@pytest.mark.parametrize("facts", MODELS)
@pytest.mark.parametrize(
    "limits", [LIMITS, BatchLimits(256, 64, 300, 3, 8), BatchLimits(16, 32, 4096, 2, 64), BatchLimits(1, 1, 64, 2, 32)]
)
def test_the_announced_memory_is_exactly_what_is_allocated(
    driver: HostDriver, stream: Stream, facts: ModelFacts, limits: BatchLimits
) -> None:
    weights = weight_buffers(256, weight_layout(facts))
    ops = create_backend(
        facts,
        weights,
        limits,
        vocab_limit=facts.vocab_size,
        driver=driver,
        stream=stream,
        images=host_images(),
    )
    pool_bytes = limits.num_blocks * limits.block_size * facts.kv_bytes_per_token
    assert kv_pool_spec(facts, limits).num_bytes - pool_bytes in range(ALIGNMENT)
    announced = activation_bound_bytes(facts, limits) + kv_pool_spec(facts, limits).num_bytes
    assert driver.num_used_bytes == announced
    assert isinstance(ops, CudaOperations)
    arena = ops._largest.residual.owner
    assert isinstance(arena, Arena)
    with pytest.raises(AssertionError, match="the arena ends before"):  # nothing is announced and not used
        arena.take(BufferSpec((1,), "uint8"))


def test_a_pool_that_others_keep_is_used_where_it_lies(driver: HostDriver, stream: Stream) -> None:
    spec = kv_pool_spec(FACTS, LIMITS)
    address = driver.allocate(spec.num_bytes)
    ops = create_backend(
        FACTS,
        {},
        LIMITS,
        vocab_limit=FACTS.vocab_size,
        driver=driver,
        stream=stream,
        images=host_images(),
        kv_pool_address=address,
        records_steps=False,
    )
    assert isinstance(ops, CudaOperations)
    assert ops.kv_pool == Buffer(address, spec.shape, spec.dtype)
    assert driver.num_used_bytes == spec.num_bytes + activation_bound_bytes(FACTS, LIMITS)
    assert ops.max_graph_requests == 0


def test_graphs_are_announced_by_their_number() -> None:
    without = activation_bound_bytes(FACTS, LIMITS)
    assert activation_bound_bytes(FACTS, LIMITS, num_graphs=3) == without + 3 * GRAPH_BYTES


def test_a_pool_that_does_not_fit_is_said_so() -> None:
    driver = HostDriver(total_bytes=16 << 20)
    with pytest.raises(OutOfDeviceMemory):
        create_backend(
            FACTS,
            {},
            replace(LIMITS, num_blocks=10_000),
            vocab_limit=FACTS.vocab_size,
            driver=driver,
            stream=driver.create_stream(),
            images=host_images(),
        )


def test_weights_are_seen_where_they_lie() -> None:
    layout = weight_layout(FACTS)
    buffers = weight_buffers(0x10000, layout, owner="mapping")
    assert list(buffers) == [spec.name for spec in layout.tensors]
    for spec in layout.tensors:
        buffer = buffers[spec.name]
        assert (buffer.address, buffer.shape, buffer.dtype) == (0x10000 + spec.offset, spec.shape, "float16")
        assert buffer.owner == "mapping"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dtype": "float32"},
            "the weights are float32; the cuda backend serves bfloat16 and float16 (model-server convert)",
        ),
        ({"head_dim": 80}, "head_dim is 80; the cuda backend has kernels for 64 and 128"),
        ({"num_heads": 9, "num_kv_heads": 1}, "9 query heads share a KV head; the cuda backend serves up to 8"),
        ({"hidden_size": 60}, "hidden_size is 60; the cuda backend needs a multiple of 8"),
        ({"intermediate_size": 72}, "intermediate_size per block is 36; the cuda backend needs a multiple of 8"),
        ({"vocab_size": 101}, "vocab_size is 101; the cuda backend needs a multiple of 8"),
    ],
)
def test_models_for_another_backend_are_refused(
    driver: HostDriver, stream: Stream, change: dict[str, object], message: str
) -> None:
    facts = replace(FACTS, **change)  # type: ignore[arg-type]
    assert why_unsupported(facts) == message
    with pytest.raises(StartupError, match="use backend = torch"):
        create_backend(facts, {}, LIMITS, vocab_limit=1, driver=driver, stream=stream, images=())


def test_the_models_that_this_backend_is_for_are_not_refused() -> None:
    assert why_unsupported(FACTS) is None
    assert why_unsupported(replace(FACTS, dtype="bfloat16", head_dim=128, num_heads=28, num_kv_heads=4)) is None


# To the device


def packed_buffer(driver: HostDriver, spec: BufferSpec) -> Buffer:
    return Arena(driver, spec.num_bytes).take(spec)


def test_one_copy_takes_every_array_to_its_place(driver: HostDriver, stream: Stream) -> None:
    staging = Staging(driver, stream, LIMITS, packed_buffer(driver, staging_spec(LIMITS)))
    host = staging.next_host()
    for number, field in enumerate(fields(StepInputs)):
        values = getattr(host, field.name)
        values[:] = memoryview(torch.arange(len(values), dtype=torch.int32).add(1000 * number).numpy())
    staging.upload(decode_shape(LIMITS.max_num_requests))
    assert driver.calls["copy_to_device_async"] == 1
    for field in fields(StepInputs):
        device = getattr(staging.inputs, field.name)
        assert device.address % ALIGNMENT == 0
        assert as_tensor(device).tolist() == getattr(host, field.name).tolist()


def test_only_the_block_tables_of_a_step_are_copied(driver: HostDriver, stream: Stream) -> None:
    staging = Staging(driver, stream, LIMITS, packed_buffer(driver, staging_spec(LIMITS)))
    host = staging.next_host()
    host.block_tables[:] = memoryview(torch.ones(len(host.block_tables), dtype=torch.int32).numpy())
    before = driver.num_copied_bytes
    staging.upload(replace(decode_shape(2), table_rows=3, table_columns=4))
    assert as_tensor(staging.inputs.block_tables).tolist() == [1] * 12 + [-1] * (len(host.block_tables) - 12)
    offset = staging.inputs.block_tables.address - staging.inputs.header.address
    assert driver.num_copied_bytes - before == offset + 12 * 4


def test_a_step_may_be_filled_while_the_one_before_is_copied(driver: HostDriver, stream: Stream) -> None:
    staging = Staging(driver, stream, LIMITS, packed_buffer(driver, staging_spec(LIMITS)))
    first = staging.next_host()
    first.token_ids[0] = 11
    staging.upload(decode_shape(1))
    second = staging.next_host()
    second.token_ids[0] = 12
    assert first.token_ids[0] == 11
    assert as_tensor(staging.inputs.token_ids)[0] == 11
    staging.upload(decode_shape(1))
    assert as_tensor(staging.inputs.token_ids)[0] == 12
    assert staging.next_host().token_ids[0] == 11, "the two take turns"


# To the host


def write_tokens(packed: Buffer, first_id: int) -> None:
    ids, logprobs, is_finite = as_tensor(packed)
    ids.copy_(torch.arange(first_id, first_id + len(ids)))
    logprobs.view(torch.float32).copy_(-torch.arange(first_id, first_id + len(ids)).float())
    is_finite.copy_(torch.arange(len(ids)) % 2)


def test_tokens_come_back_as_they_were_when_they_were_fetched(driver: HostDriver, stream: Stream) -> None:
    packed = to_device(driver, torch.zeros(3, 5, dtype=torch.int32))
    ring = TokenRing(driver, stream, packed)
    pending = []
    for step in range(3 * NUM_FETCHES):  # nobody reads meanwhile: the ring does
        write_tokens(packed, 10 * step)
        pending.append(ring.fetch(4))
    for step, tokens in enumerate(pending):
        assert tokens.is_done()
        read = tokens.wait()
        assert read.token_ids == [10 * step + row for row in range(4)]
        assert read.logprobs == [-10.0 * step - row for row in range(4)]
        assert read.is_finite == [False, True, False, True]
        assert tokens.wait() is read


def test_a_step_without_samples_copies_nothing_and_is_done_in_turn(driver: HostDriver, stream: Stream) -> None:
    ring = TokenRing(driver, stream, to_device(driver, torch.zeros(3, 5, dtype=torch.int32)))
    pending = ring.fetch(0)
    assert driver.calls["copy_to_host_async"] == 0
    assert driver.calls["record"] == 1
    assert pending.wait().token_ids == []


def test_a_failed_wait_may_be_repeated(driver: HostDriver, stream: Stream) -> None:
    packed = to_device(driver, torch.zeros(3, 5, dtype=torch.int32))
    write_tokens(packed, 7)
    pending = TokenRing(driver, stream, packed).fetch(1)
    driver.fail_at(1, method="wait")
    with pytest.raises(DriverError):
        pending.wait()
    assert pending.wait().token_ids == [7]


# Steps


def begin(ops: CudaOperations, num_requests: int) -> Activations[Buffer]:
    """A step of token 0 at position 0 of the scratch block, in slots 0, 1, 2 .."""
    host = ops.next_staging()
    for row in range(num_requests):
        host.token_ids[row] = host.positions[row] = host.kv_rows[row] = 0
        host.token_slots[row] = -1
        host.query_starts[row], host.query_starts[row + 1] = row, row + 1
        host.context_lens[row] = host.sample_positions[row] = 1
        host.sample_rows[row] = host.sample_slots[row] = host.slots[row] = row
        host.block_tables[row * COLUMNS] = 0
    for place, number in enumerate((num_requests, num_requests, num_requests, COLUMNS)):
        host.header[place] = number
    return ops.begin_step(decode_shape(num_requests))


def test_rows_of_a_step_are_the_first_of_each_buffer(ops: CudaOperations) -> None:
    act = begin(ops, 3)
    assert (act.residual.shape, act.residual.dtype) == ((3, 64), "float32")
    assert (act.qkv.shape, act.qkv.dtype) == ((3, FACTS.qkv_rows), "float16")
    assert (act.logits.shape, act.logits.dtype) == ((3, 128), "float32")
    assert begin(ops, 3) is act
    assert begin(ops, 2).qkv == act.qkv.rows(0, 2)


def test_a_step_that_did_not_sample_has_no_tokens(ops: CudaOperations) -> None:
    begin(ops, 2)
    assert ops.fetch_tokens().wait().token_ids == []


def test_every_thread_is_attached_before_it_calls(ops: CudaOperations, driver: HostDriver) -> None:
    errors: list[BaseException] = []

    def step() -> None:
        try:
            with ops.execution_context():
                begin(ops, 1)
            with ops.execution_context():
                ops.fetch_tokens().wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert errors == []
    assert driver.calls["attach_thread"] == 1


def test_a_recorded_step_does_what_was_recorded_with_new_inputs(ops: CudaOperations, driver: HostDriver) -> None:
    def run(act: Activations[Buffer]) -> None:
        ops.embed(table, act.residual)

    values = torch.arange(128 * 64).view(128, 64).remainder(1000).half()
    table = to_device(driver, values)
    graph = ops.capture(decode_shape(2), run)
    host = ops.next_staging()
    host.token_ids[0], host.token_ids[1] = 5, 77
    host.token_slots[0] = host.token_slots[1] = -1
    act = ops.begin_step(decode_shape(2))
    assert as_tensor(act.residual).isnan().all(), "recording ran"
    ops.replay(graph, decode_shape(2))
    assert torch.equal(as_tensor(act.residual), values[[5, 77]].float())
    assert len(ops.fetch_tokens().wait().token_ids) == 2


def test_a_failed_recording_leaves_the_stream_as_it_was(ops: CudaOperations, driver: HostDriver) -> None:
    table = to_device(driver, torch.zeros(128, 64).half())

    def run(act: Activations[Buffer]) -> None:
        ops.embed(table, act.residual)
        ops.embed(table, act.residual)

    driver.fail_at(2, method="launch_async")
    with pytest.raises(DriverError, match="a call that a test lets fail"):
        ops.capture(decode_shape(2), run)
    assert driver.calls["abandon_capture"] == 1
    run(begin(ops, 2))
    assert ops.capture(decode_shape(2), run)


def test_the_first_of_two_errors_of_a_recording_is_told(ops: CudaOperations, driver: HostDriver) -> None:
    def run(act: Activations[Buffer]) -> None:
        driver.fail_at(1, DriverError("abandon", 1, "SECOND"), method="abandon_capture")
        raise DriverError("launch", 1, "FIRST")

    with pytest.raises(DriverError, match="FIRST"):
        ops.capture(decode_shape(1), run)


def test_operations_that_record_nothing_refuse_to(ops: CudaOperations) -> None:
    assert ops.max_graph_requests == LIMITS.max_num_requests
    ops.max_graph_requests = 0
    with pytest.raises(AssertionError, match="made to record nothing"):
        ops.capture(decode_shape(1), lambda act: None)
