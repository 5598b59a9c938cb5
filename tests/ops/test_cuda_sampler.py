"""The cuda backend's sampler on a GPU in host memory: the definition row by row, the slots' memory, and uploads."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from server.kernels import sample
from server.kernels.catalog import expand
from server.models.facts import ModelFacts
from server.ops.cuda.arena import Arena, BufferSpec
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, KernelImage
from server.ops.cuda.kernels import Kernels
from server.ops.cuda.sampler import PARAM_WORDS, SEEN, STOP, CudaSampler, UploadRing, sampler_bytes
from server.ops.interface import BatchLimits, SampledTokens, StepInputs
from server.ops.sampling import SlotSampling
from tests.ops.host_driver import HostDriver, as_tensor
from tests.ops.host_kernels import host_image
from tests.ops.sampling_reference import choose_row, log_softmax
from tests.ops.test_sampler import EVERYTHING, INF, NAN, SEEN_THIRD, VOCAB_SIZE, every_kind, sampling
from tests.ops.test_sampler import run as run_in_torch

DTYPES = {torch.float32: "float32", torch.int32: "int32", torch.uint8: "uint8"}


def interpreted_images() -> list[KernelImage]:
    return [host_image(recipe) for spec in sample.SPECS for recipe in expand(spec)]


class SamplerRig:
    """A sampler on any driver, fed with tensors of the host."""

    def __init__(
        self,
        driver: Driver,
        images: Iterable[KernelImage],
        vocab_size: int = VOCAB_SIZE,
        max_rows: int = 64,
        vocab_limit: int | None = None,
    ) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        facts = ModelFacts(
            "qwen2", vocab_size, 64, 64, 1, 1, 1, 64, 64, 1e-6, 1e4, None, False, False, False, True, "bfloat16"
        )
        self.limits = BatchLimits(max_rows, max_rows, 64, 2, 16)
        self.arena = Arena(driver, sampler_bytes(facts, self.limits))
        limit = vocab_size if vocab_limit is None else vocab_limit
        kernels = Kernels(driver, self.stream, images)
        self.sampler = CudaSampler(driver, self.stream, kernels, facts, self.limits, limit, self.arena)

    def upload(self, tensor: Tensor) -> Buffer:
        """A copy in device memory."""
        tensor = tensor.contiguous()
        data = tensor.view(torch.uint8).numpy().tobytes()
        staging = self.driver.allocate_pinned(len(data))
        staging.view[:] = data
        buffer = Buffer(self.driver.allocate(len(data)), tuple(tensor.shape), DTYPES[tensor.dtype])
        self.driver.copy_to_device_async(buffer.address, staging.address, len(data), self.stream)
        self.driver.synchronize(self.stream)
        self.driver.free_pinned(staging)
        return buffer

    def download(self, buffer: Buffer) -> Tensor:
        """A copy in host memory, when all is done."""
        staging = self.driver.allocate_pinned(buffer.num_bytes)
        self.driver.copy_to_host_async(staging.address, buffer.address, buffer.num_bytes, self.stream)
        self.driver.synchronize(self.stream)
        dtype = next(dtype for dtype, name in DTYPES.items() if name == buffer.dtype)
        tensor = torch.frombuffer(bytearray(staging.view[: buffer.num_bytes]), dtype=dtype).view(buffer.shape)
        self.driver.free_pinned(staging)
        return tensor

    def inputs(self, slots: Sequence[int], positions: Sequence[int]) -> StepInputs[Buffer]:
        """Everything but what a sampler reads is a buffer of nothing."""
        nothing = Buffer(0, (0,), "int32")
        names = [field.name for field in dataclasses.fields(StepInputs)]
        inputs = StepInputs(**dict.fromkeys(names, nothing))
        return dataclasses.replace(
            inputs,
            sample_slots=self.upload(torch.tensor(slots, dtype=torch.int32)),
            sample_positions=self.upload(torch.tensor(positions, dtype=torch.int32)),
        )

    def sample(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> SampledTokens:
        """One step of logits [rows, vocab]."""
        self.sampler.sample(self.upload(logits), self.inputs(slots, positions), len(slots))
        return self.result(len(slots))

    def result(self, num_rows: int) -> SampledTokens:
        """What the last step chose."""
        ids, logprobs, is_finite = self.download(self.sampler.packed)[:, :num_rows].contiguous()
        return SampledTokens(ids.tolist(), logprobs.view(torch.float32).tolist(), is_finite.bool().tolist())

    def run(self, logits: Tensor, rows: Sequence[SlotSampling], positions: Sequence[int]) -> SampledTokens:
        """Rows take slots in reverse order, so that row and slot differ."""
        slots = range(len(rows) - 1, -1, -1)
        for slot, row in zip(slots, rows, strict=True):
            self.sampler.reset(slot, row)
        return self.sample(logits, slots, positions)

    def flags(self, slot: int) -> dict[int, int]:
        """Token id -> flags of a slot, where there are any."""
        row = self.download(self.sampler._token_flags.rows(slot, slot + 1))[0]
        return {int(token_id): int(row[token_id]) for token_id in row.nonzero()}


def host_driver() -> HostDriver:
    driver = HostDriver()
    driver.attach_thread()
    return driver


@pytest.fixture(scope="module")
def rig() -> SamplerRig:
    return SamplerRig(host_driver(), interpreted_images())


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_mixed_batches_equal_the_plain_reference_row_by_row(rig: SamplerRig) -> None:
    random = Random(0)
    rows = every_kind(32, random)
    positions = [random.choice([3, 39, 40, 1000]) for _ in rows]
    logits = random_logits(32)
    result = rig.run(logits, rows, positions)
    num_near_ties = 0
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        values = logits[index].tolist()
        expected, margin = choose_row(values, row, position)
        if margin < 1e-4:
            num_near_ties += 1
            continue
        assert result.token_ids[index] == expected, (index, row, position)
        assert result.logprobs[index] == pytest.approx(log_softmax(values, expected), abs=1e-4)
    assert num_near_ties <= 1
    assert all(result.is_finite)


@pytest.mark.parametrize(("vocab_size", "vocab_limit"), [(4097, 4097), (8208, 8199)])
def test_any_vocabulary_size_gives_the_ids_of_the_torch_backend(vocab_size: int, vocab_limit: int) -> None:
    """Several tiles, odd sizes, searches that need passes over the row, ids beyond the limit that are never chosen."""
    random = Random(vocab_size)
    rows = [
        dataclasses.replace(row, top_k=random.choice([0, 0, 5, 500, 5000, vocab_limit, 2**40]))
        for row in every_kind(8, random)
    ]
    logits = random_logits(8, vocab_size)
    logits[:, vocab_limit:] = INF
    rig = SamplerRig(host_driver(), interpreted_images(), vocab_size, vocab_limit=vocab_limit)
    result = rig.run(logits, rows, [40] * 8)
    expected = run_in_torch(logits[:, :vocab_limit].contiguous(), rows, [40] * 8)
    assert result.token_ids == expected.token_ids.tolist()
    assert result.logprobs == pytest.approx(expected.logprobs.tolist(), abs=1e-4)
    assert all(result.is_finite)


def test_greedy_takes_the_lowest_id_of_a_tie_across_tiles() -> None:
    rig = SamplerRig(host_driver(), interpreted_images(), 9000)
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 4096, 4095]] = 1.0
    logits[1, 8999] = -0.0
    logits[2, :] = -INF
    logits[2, 5000] = -3.0
    rows = [sampling()] * 3
    assert rig.run(logits, rows, [0] * 3).token_ids == [4095, 0, 5000]


def test_ties_are_kept_by_every_filter(rig: SamplerRig) -> None:
    logits = torch.full((15, VOCAB_SIZE), -5.0)
    logits[:, 10:14] = 2.0
    filters = ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0})
    rows = [sampling(temperature=1.0, **filters[index % 3]) for index in range(15)]
    drawn = rig.run(logits, rows, [22 + index // 3 for index in range(15)]).token_ids
    assert [set(drawn[index::3]) for index in range(3)] == [{10, 11, 12, 13}] * 3


def test_more_ties_than_there_are_candidates() -> None:
    """No bracket of distances can hold few of them: all are kept, and nothing else."""
    rig = SamplerRig(host_driver(), interpreted_images(), 12_000)
    logits = torch.full((4, 12_000), -1.0)
    logits[:, 3000:9000] = 4.0
    rows = [
        sampling(temperature=1.0, top_k=7),
        sampling(temperature=1.0, top_p=0.3),
        sampling(temperature=1.0, top_k=3, top_p=0.5),
        sampling(temperature=1.0, top_k=7000, top_p=0.5),
    ]
    drawn = rig.run(logits, rows, [9] * 4).token_ids
    assert all(3000 <= token_id < 9000 for token_id in drawn)
    assert drawn == run_in_torch(logits, rows, [9] * 4).token_ids.tolist()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_extreme_parameters_give_the_ids_of_the_torch_backend(rig: SamplerRig, scale: float) -> None:
    rows = [
        sampling(temperature=temperature, repetition_penalty=penalty, seen_ids=SEEN_THIRD, **filters)
        for temperature in (1e-3, 1.0, 1e30)
        for penalty, filters in (
            (1e-38, {"top_p": 1e-9, "min_p": 1.0}),
            (1e38, {"top_k": 5, "top_p": 0.999999}),
            (5e-324, {"top_k": 5, "top_p": 0.999999}),
            (1.0, {"top_p": 1e-9}),
        )
    ]
    logits = random_logits(12, seed=1) * scale
    result = rig.run(logits, rows, [5] * 12)
    expected = run_in_torch(logits, rows, [5] * 12)
    assert result.token_ids == expected.token_ids.tolist()
    assert all(result.is_finite)


def test_non_finite_logits_are_flagged_and_stay_in_their_row(rig: SamplerRig) -> None:
    bad = [[NAN], [NAN] * VOCAB_SIZE, [-INF] * VOCAB_SIZE, [INF], [INF, NAN]]
    good = every_kind(5, Random(3))
    logits = random_logits(5, seed=2)
    clean = rig.run(logits, good, [50] * 5)
    poison = random_logits(5, seed=3)
    for row, values in zip(poison, bad, strict=True):
        row[: len(values)] = torch.tensor(values)
    for neighbour in (sampling(), sampling(temperature=1.0, top_k=4, top_p=0.5, repetition_penalty=1.3)):
        mixed = torch.stack((logits, poison), 1).view(10, -1)
        result = rig.run(mixed, [row for one in good for row in (one, neighbour)], [50] * 10)
        assert result.is_finite == [True, False] * 5
        assert result.token_ids[1::2] == [0] * 5
        assert result.token_ids[::2] == clean.token_ids
        assert result.logprobs[::2] == clean.logprobs


def test_minus_infinities_and_a_mask_of_everything_are_no_fault(rig: SamplerRig) -> None:
    logits = torch.full((2, VOCAB_SIZE), -INF)
    logits[0, [7, 9]] = torch.tensor([1.0, 0.5])
    logits[1, 20] = 1.0
    rows = [
        sampling(temperature=1.0, top_k=30, top_p=0.99),
        sampling(temperature=1.0, min_position=10, stop_ids=tuple(range(VOCAB_SIZE))),
    ]
    result = rig.run(logits, rows, [3, 3])
    assert result.token_ids[0] in (7, 9)
    assert result.token_ids[1] == 0
    assert result.is_finite == [True, True]


def test_a_row_is_the_same_alone_and_in_a_batch(rig: SamplerRig) -> None:
    rows = every_kind(10, Random(5))
    logits = random_logits(10, seed=6)
    together = rig.run(logits, rows, [50] * 10)
    alone = [rig.run(logits[i : i + 1], [rows[i]], [50]) for i in range(10)]
    assert [one.token_ids[0] for one in alone] == together.token_ids
    assert [one.logprobs[0] for one in alone] == together.logprobs


def test_logprobs_are_given_to_rows_that_want_them(rig: SamplerRig) -> None:
    logits = random_logits(3, seed=4)
    rows = [sampling(logprobs=False), sampling(repetition_penalty=2.0, seen_ids=SEEN_THIRD), sampling(logprobs=False)]
    result = rig.run(logits, rows, [7] * 3)
    assert [math.isnan(value) for value in result.logprobs] == [True, False, True]
    # Of the model's own distribution, before the penalty.
    assert result.logprobs[1] == pytest.approx(log_softmax(logits[1].tolist(), result.token_ids[1]), abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
def test_noise_is_a_function_of_seed_and_position(rig: SamplerRig, seed: int) -> None:
    logits = torch.zeros(6, VOCAB_SIZE)
    positions = [0, 1, 2, 77, 2**30, 2**31 - 1]
    rows = [sampling(temperature=1.0, seed=seed)] * 6
    assert rig.run(logits, rows, positions).token_ids == run_in_torch(logits, rows, positions).token_ids.tolist()


def test_chosen_tokens_become_last_tokens_and_seen() -> None:
    rig = SamplerRig(host_driver(), interpreted_images(), max_rows=4)
    rig.sampler.reset(0, sampling(repetition_penalty=2.0, seen_ids=(0,), stop_ids=(0, 7), min_position=9))
    rig.sampler.reset(1, sampling(stop_ids=(5,), min_position=9))
    rig.sampler.reset(2, sampling(repetition_penalty=2.0, seen_ids=(2, 2, 299)))
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[[0, 1, 2], [9, 7, 299]] = 4.0
    assert rig.sample(logits, [2, 0, 1], [30, 30, 30]).token_ids == [9, 7, 299]
    assert rig.download(rig.sampler.last_tokens).tolist() == [7, 299, 9, 0, 0]
    assert [rig.flags(slot) for slot in range(3)] == [
        {0: SEEN | STOP, 7: SEEN | STOP},
        {5: STOP},
        {2: SEEN, 9: SEEN, 299: SEEN},
    ]
    for slot in range(3):
        rig.sampler.reset(slot, sampling())
        assert rig.flags(slot) == {}


def test_flags_are_cleared_only_where_there_may_be_some() -> None:
    driver = host_driver()
    rig = SamplerRig(driver, interpreted_images(), max_rows=2)
    fills = driver.calls["fill_async"]
    rig.sampler.reset(0, sampling(temperature=1.0))
    rig.sampler.reset(0, sampling(repetition_penalty=1.1))
    assert driver.calls["fill_async"] == fills
    rig.sampler.reset(0, sampling())
    assert driver.calls["fill_async"] == fills + 1


def test_a_long_prompt_is_flagged_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ops.cuda.sampler.MAX_UPLOAD_IDS", 600)
    monkeypatch.setattr("server.ops.cuda.sampler.UPLOAD_RING_BYTES", 4000)
    rig = SamplerRig(host_driver(), interpreted_images(), 3000, max_rows=2)
    seen_ids = tuple(Random(0).choices(range(3000), k=2500))
    rig.sampler.reset(1, sampling(repetition_penalty=1.5, seen_ids=seen_ids, stop_ids=(1,)))
    assert {token_id for token_id, flags in rig.flags(1).items() if flags & SEEN} == set(seen_ids)
    assert rig.flags(0) == rig.flags(2) == {}


def test_padding_rows_are_harmless_whatever_their_slot_holds() -> None:
    rig = SamplerRig(host_driver(), interpreted_images(), max_rows=5)
    rows = every_kind(2, Random(8))
    logits = torch.cat([random_logits(4, seed=9), torch.full((1, VOCAB_SIZE), NAN)])
    expected = rig.run(logits[:2], rows, [50] * 2).token_ids
    scratch, flags = as_tensor(rig.sampler._params)[5], as_tensor(rig.sampler._token_flags)[5]
    random = Random(9)
    generator = torch.Generator().manual_seed(9)
    for _ in range(5):
        scratch.copy_(torch.tensor([random.randrange(-(2**31), 2**31) for _ in range(PARAM_WORDS)]))
        flags.random_(0, 4, generator=generator)
        for slot, row in zip((1, 0), rows, strict=True):
            rig.sampler.reset(slot, row)
        result = rig.sample(logits, [1, 0, 5, 5, 5], [50] * 2 + [0] * 3)
        assert result.token_ids[:2] == expected
        assert all(0 <= token_id < VOCAB_SIZE for token_id in result.token_ids)


def test_the_launches_are_the_same_whatever_the_parameters_are(rig: SamplerRig) -> None:
    """So a recorded step can be replayed for other requests."""
    driver = rig.driver
    assert isinstance(driver, HostDriver)
    rows = every_kind(6, Random(11))
    logits = random_logits(6, seed=12)
    expected = rig.run(logits, rows, [50] * 6).token_ids
    for slot in range(6):
        rig.sampler.reset(slot, sampling())
    buffer, inputs = rig.upload(logits), rig.inputs(range(5, -1, -1), [50] * 6)
    launches = driver.calls["launch_async"]
    driver.begin_capture(rig.stream)
    rig.sampler.sample(buffer, inputs, 6)
    graph = driver.end_capture(rig.stream)
    assert driver.calls["launch_async"] == launches + 4
    driver.launch_graph_async(graph, rig.stream)
    assert rig.result(6).token_ids == logits.argmax(-1).tolist()
    for slot, row in zip(range(5, -1, -1), rows, strict=True):
        rig.sampler.reset(slot, row)
    driver.launch_graph_async(graph, rig.stream)
    assert rig.result(6).token_ids == expected


def test_no_samples_launch_nothing(rig: SamplerRig) -> None:
    driver = rig.driver
    assert isinstance(driver, HostDriver)
    calls = driver.calls["launch_async"]
    rig.sampler.sample(Buffer(0, (0, VOCAB_SIZE), "float32"), rig.inputs([0], [0]), 0)
    assert driver.calls["launch_async"] == calls


def test_sampler_takes_from_the_arena_what_it_announced(rig: SamplerRig) -> None:
    with pytest.raises(AssertionError, match="the arena ends before"):
        rig.arena.take(BufferSpec((1,), "uint8"))


def test_hints_of_the_torch_backend_are_not_needed(rig: SamplerRig) -> None:
    rows = [sampling(), sampling(temperature=1.0, seed=9)]
    logits = random_logits(2, seed=13)
    assert rig.run(logits, rows, [7, 7]).token_ids == run_in_torch(logits, rows, [7, 7], EVERYTHING).token_ids.tolist()


class SlowDriver(HostDriver):
    """Events are done only when someone waited for them."""

    def __init__(self) -> None:
        super().__init__()
        self.attach_thread()
        self.under_way: set[int] = set()
        self.waited: list[int] = []

    def record(self, event, stream):
        super().record(event, stream)
        assert event not in self.under_way, "the event is still needed"
        self.under_way.add(event)

    def is_done(self, event):
        return event not in self.under_way

    def wait(self, event):
        self.waited.append(event)
        self.under_way.discard(event)


@pytest.mark.parametrize("max_pieces", [3, 100])
def test_ring_waits_for_the_oldest_copy_only_when_there_is_no_room(max_pieces: int) -> None:
    driver = SlowDriver()
    ring = UploadRing(driver, driver.create_stream(), 100, max_pieces)
    dest = driver.allocate(100)
    random = Random(max_pieces)
    for _ in range(500):
        data = random.randbytes(random.randrange(1, 101))
        num_waits = len(driver.waited)
        before = [piece for piece in ring._pieces if piece.event in driver.under_way]
        ring.send(dest, data)
        assert bytes(as_tensor(Buffer(dest, (len(data),), "uint8")).tolist()) == data
        newest = ring._pieces[-1]
        is_in_the_way = any(piece.begin < newest.end and newest.begin < piece.end for piece in before)
        assert (len(driver.waited) > num_waits) == (is_in_the_way or len(before) == max_pieces)
        under_way = sorted((piece.begin, piece.end) for piece in ring._pieces)
        assert all(first[1] <= second[0] for first, second in pairwise(under_way))
        assert under_way[-1][1] <= 100
        assert len(under_way) <= max_pieces
        if random.random() < 0.3:
            driver.under_way.discard(ring._pieces[0].event)
    assert driver.calls["create_event"] <= max_pieces + 1
    assert driver.waited


def test_a_piece_larger_than_the_ring_is_refused() -> None:
    driver = host_driver()
    ring = UploadRing(driver, driver.create_stream(), 100, 4)
    with pytest.raises(AssertionError, match="101 bytes through a ring of 100"):
        ring.send(driver.allocate(200), bytes(101))
