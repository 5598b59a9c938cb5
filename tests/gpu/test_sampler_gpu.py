# ruff: noqa: T201
"""The cuda backend's sampler on a GPU, at a real vocabulary's size: the torch backend's ids, independence, times."""

import time
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from server.kernels.manifest import built_folder, read_manifest
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.sampling import SlotSampling
from server.ops.torch.sampler import SampledRows, SlotTable, choose
from tests.ops.test_cuda_sampler import SamplerRig
from tests.ops.test_sampler import EVERYTHING, sampling

VOCAB_SIZE = 152_064
NUM_ROWS = 256
MAX_DIFFERENT = 0.001

MakeRig = Callable[[int], SamplerRig]


@pytest.fixture(scope="module")
def make_rig(device: str) -> MakeRig:
    torch.zeros(1, device=device)  # torch makes the primary context current first
    driver = NvidiaDriver.open()
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"{built_folder()} has no kernels: run scripts/build-kernels")
    images = manifest.images(driver.facts.arch)
    return lambda vocab_size: SamplerRig(driver, images, vocab_size, NUM_ROWS)


@pytest.fixture(scope="module")
def rig(make_rig: MakeRig) -> SamplerRig:
    return make_rig(VOCAB_SIZE)


def random_rows(count: int, vocab_size: int, random: Random) -> list[SlotSampling]:
    return [
        sampling(
            temperature=random.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0]),
            top_k=random.choice([0, 0, 1, 20, 50, 1000, 6000, 50_000]),
            top_p=random.choice([1.0, 1.0, 0.1, 0.8, 0.95, 0.999]),
            min_p=random.choice([0.0, 0.0, 0.05, 0.5]),
            repetition_penalty=random.choice([1.0, 1.0, 1.1, 0.8]),
            seed=random.getrandbits(64),
            min_position=random.choice([0, 4000]),
            seen_ids=tuple(random.choices(range(vocab_size), k=500)),
            stop_ids=tuple(random.sample(range(vocab_size), random.choice([0, 5]))),
        )
        for _ in range(count)
    ]


def device_logits(num_rows: int, vocab_size: int, seed: int, scale: float) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(num_rows, vocab_size, device="cuda", generator=generator) * scale


def reset(rig: SamplerRig, rows: Sequence[SlotSampling]) -> None:
    for slot, row in enumerate(rows):
        rig.sampler.reset(slot, row)


def as_buffer(logits: Tensor) -> Buffer:
    torch.cuda.synchronize()
    return Buffer(logits.data_ptr(), tuple(logits.shape), "float32", logits)


def choose_in_torch(logits: Tensor, rows: Sequence[SlotSampling], positions: Sequence[int]) -> SampledRows:
    device = logits.device
    table = SlotTable(len(rows), logits.shape[1], device)
    for slot, row in enumerate(rows):
        table.reset(slot, row)
    slots = torch.arange(len(rows), device=device)
    random_rows = torch.tensor([i for i, row in enumerate(rows) if row.is_random], dtype=torch.int64, device=device)
    params, places = table.params(slots), torch.tensor(positions, device=device)
    return choose(logits, table.token_flags, params, places, random_rows, EVERYTHING)


# 3: thousands of candidates at most; 0.01: all the vocabulary is likely, and thresholds are between near-equal logits.
@pytest.mark.parametrize("scale", [8.0, 3.0, 0.01])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 151_937])
def test_ids_are_those_of_the_torch_backend(make_rig: MakeRig, vocab_size: int, scale: float) -> None:
    rig = make_rig(vocab_size)
    num_different = num_rows = 0
    logprob_error = 0.0
    for step in range(8):
        random = Random(step)
        rows = random_rows(NUM_ROWS, vocab_size, random)
        positions = [random.randrange(8000) for _ in rows]
        logits = device_logits(NUM_ROWS, vocab_size, step, scale)
        reset(rig, rows)
        rig.sampler.sample(as_buffer(logits), rig.inputs(range(NUM_ROWS), positions), NUM_ROWS)
        result = rig.result(NUM_ROWS)
        expected = choose_in_torch(logits, rows, positions)
        ids, logprobs = expected.token_ids.tolist(), expected.logprobs.tolist()
        for index, row in enumerate(rows):
            num_rows += 1
            if result.token_ids[index] != ids[index]:
                num_different += 1
                print(f"step {step} row {index}: {result.token_ids[index]} instead of {ids[index]}, {row_text(row)}")
                assert row.is_random, "greedy ids are equal"
            else:
                logprob_error = max(logprob_error, abs(result.logprobs[index] - logprobs[index]))
        assert all(result.is_finite)
    print(f"{vocab_size} ids, scale {scale}: {num_different} of {num_rows} differ; logprobs {logprob_error:.1e}")
    assert num_different <= MAX_DIFFERENT * num_rows
    assert logprob_error < 1e-4


def row_text(row: SlotSampling) -> str:
    return f"T {row.temperature} top_k {row.top_k} top_p {row.top_p} min_p {row.min_p} r {row.repetition_penalty}"


def test_poisoned_neighbours_change_no_bit(rig: SamplerRig) -> None:
    rows = random_rows(64, VOCAB_SIZE, Random(1))
    logits = device_logits(64, VOCAB_SIZE, 1, 3.0)

    def run() -> tuple[list[int], list[float], list[bool]]:
        reset(rig, rows)
        rig.sampler.sample(as_buffer(logits), rig.inputs(range(64), [50] * 64), 64)
        result = rig.result(64)
        return result.token_ids, result.logprobs, result.is_finite

    clean_ids, clean_logprobs, _ = run()
    logits[::2] = float("nan")
    logits[2::4] = float("inf")
    ids, logprobs, is_finite = run()
    assert is_finite == [False, True] * 32
    assert ids[1::2] == clean_ids[1::2]
    assert logprobs[1::2] == clean_logprobs[1::2]


def test_recorded_step_serves_other_parameters(rig: SamplerRig) -> None:
    rows = random_rows(32, VOCAB_SIZE, Random(2))
    logits = device_logits(32, VOCAB_SIZE, 2, 3.0)
    buffer, inputs = as_buffer(logits), rig.inputs(range(32), [60] * 32)
    reset(rig, [sampling()] * 32)
    rig.driver.begin_capture(rig.stream)
    rig.sampler.sample(buffer, inputs, 32)
    graph = rig.driver.end_capture(rig.stream)
    rig.driver.launch_graph_async(graph, rig.stream)
    assert rig.result(32).token_ids == logits.argmax(-1).tolist()
    reset(rig, rows)
    rig.driver.launch_graph_async(graph, rig.stream)
    replayed = rig.result(32).token_ids
    rig.driver.destroy_graph(graph)
    reset(rig, rows)
    rig.sampler.sample(buffer, inputs, 32)
    assert rig.result(32).token_ids == replayed


def test_long_prompts_are_flagged_without_a_wait(rig: SamplerRig) -> None:
    seen_ids = tuple(Random(3).choices(range(VOCAB_SIZE), k=131_072))
    start = time.perf_counter()
    rig.sampler.reset(7, sampling(repetition_penalty=1.1, seen_ids=seen_ids, stop_ids=(5,)))
    print(f"reset of a slot with {len(seen_ids)} seen ids: {(time.perf_counter() - start) * 1e3:.2f} ms of the host")
    assert {token_id for token_id, flags in rig.flags(7).items() if flags & 1} == set(seen_ids)


KINDS = {
    "greedy": sampling(logprobs=False),
    "greedy, logprobs": sampling(),
    "drawn": sampling(temperature=1.0, logprobs=False),
    "penalty": sampling(temperature=1.0, repetition_penalty=1.1, seen_ids=(1, 2, 3), logprobs=False),
    "min_p 0.05": sampling(temperature=1.0, min_p=0.05, logprobs=False),
    "top_k 50": sampling(temperature=1.0, top_k=50, logprobs=False),
    "top_p 0.9": sampling(temperature=1.0, top_p=0.9, logprobs=False),
    "top_k 50, top_p 0.9": sampling(temperature=1.0, top_k=50, top_p=0.9, logprobs=False),
    "top_k 20000, top_p 0.9": sampling(temperature=1.0, top_k=20_000, top_p=0.9, logprobs=False),
}


@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_times(rig: SamplerRig, scale: float) -> None:
    """Printed: microseconds of a recorded step, behind each other in one stream."""
    logits = device_logits(NUM_ROWS, VOCAB_SIZE, 4, scale)
    print(f"\nlogits of standard deviation {scale}; us at 1, 32, 256 rows")
    for name, row in KINDS.items():
        reset(rig, [row] * NUM_ROWS)
        times = [graph_time_us(rig, as_buffer(logits[:count]), count) for count in (1, 32, NUM_ROWS)]
        print(f"{name:24}", *(f"{value:9.1f}" for value in times), flush=True)
        assert times[-1] < 20_000


def graph_time_us(rig: SamplerRig, logits: Buffer, count: int) -> float:
    inputs = rig.inputs(range(count), range(100, 100 + count))
    rig.driver.begin_capture(rig.stream)
    rig.sampler.sample(logits, inputs, count)
    graph = rig.driver.end_capture(rig.stream)
    for num_launches in (3, 50):
        rig.driver.synchronize(rig.stream)
        start = time.perf_counter()
        for _ in range(num_launches):
            rig.driver.launch_graph_async(graph, rig.stream)
        rig.driver.synchronize(rig.stream)
        elapsed = time.perf_counter() - start
    rig.driver.destroy_graph(graph)
    return elapsed / 50 * 1e6
