"""What a plan becomes in host memory, column by column, and the plans that are refused before anything is issued."""

from dataclasses import fields
from random import Random

import pytest
import torch

from server.engine.messages import SamplingParams
from server.ops.interface import ON_HOST, BatchLimits, StepInputs, StepSize, input_sizes
from server.ops.sampling import SamplingUse
from server.runner.input_batch import InputBatch, slot_sampling
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk

LIMITS = BatchLimits(64, 6, 256, 100, 8, max_mixed_tokens=64)
UNTOUCHED = -9
NOTHING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


def host_arrays() -> StepInputs[memoryview]:
    return StepInputs(
        *(
            memoryview(torch.full((size,), UNTOUCHED, dtype=torch.int32).numpy())
            for size in input_sizes(LIMITS).values()
        )
    )


def make_batch(samplings: dict[int, SamplingParams] | None = None) -> InputBatch:
    batch = InputBatch(LIMITS)
    for slot in range(LIMITS.max_num_requests):
        sampling = (samplings or {}).get(slot, SamplingParams(max_tokens=9, ignore_eos=True))
        batch.reset_slot(slot, slot_sampling(SlotReset(slot, slot, (1,), 10, sampling), (), 100))
    return batch


def chunk(slot: int, start: int, token_ids: tuple[int, ...] | None, *, samples: bool = True) -> TokenChunk:
    """In blocks 10 * slot + 1 and on; `token_ids` None: the token is on the device."""
    length = 1 if token_ids is None else len(token_ids)
    block_ids = tuple(10 * slot + 1 + block for block in range(-(-(start + length) // LIMITS.block_size)))
    return TokenChunk(slot, slot, start, length, token_ids or (), block_ids, samples=samples)


def plan_of(*chunks: TokenChunk) -> StepPlan:
    return StepPlan(1, (), chunks)


def expected_rows(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(id, slot to read from, position, pool row) of each token, one at a time."""
    rows = []
    for item in plan.chunks:
        for offset in range(item.num_tokens):
            position = item.start + offset
            row = item.block_ids[position // LIMITS.block_size] * LIMITS.block_size + position % LIMITS.block_size
            known = (item.token_ids[offset], ON_HOST) if item.token_ids else (0, item.slot)
            rows.append((*known, position, row))
    return rows


def found_rows(host: StepInputs[memoryview], first: int, end: int) -> list[tuple[int, int, int, int]]:
    columns = (host.token_ids, host.token_slots, host.positions, host.kv_rows)
    return list(zip(*(column[first:end].tolist() for column in columns), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_are_flattened_and_padded(seed: int) -> None:
    random = Random(seed)
    batch = make_batch({2: SamplingParams(max_tokens=1, temperature=1.0)})
    hosts = [host_arrays(), host_arrays()]
    for step in range(6):  # both host buffers hold what earlier steps left
        host = hosts[step % 2]
        slots = random.sample(range(LIMITS.max_num_requests), random.randint(1, LIMITS.max_num_requests))
        num_decodes = random.randint(0, len(slots))
        chunks = [
            chunk(
                slot,
                random.randrange(75),
                random.choice([None, (random.randrange(100),)])
                if index < num_decodes
                else tuple(random.randrange(100) for _ in range(random.randint(2, 5))),
                samples=random.random() < 0.7,
            )
            for index, slot in enumerate(slots)
        ]
        plan = plan_of(*chunks)
        size = StepSize(40, 6, 6, 6) if random.random() < 0.7 else None
        shape = batch.fill(plan, host, size)
        num_chunks, num_tokens = len(chunks), plan.num_tokens
        assert host.header.tolist() == [num_decodes, num_chunks, num_tokens, shape.table_columns]
        assert found_rows(host, 0, num_tokens) == expected_rows(plan)
        if size is not None:
            assert found_rows(host, num_tokens, 40) == [(0, ON_HOST, 0, 0)] * (40 - num_tokens)
        assert host.slots[:num_chunks].tolist() == slots
        assert host.context_lens[:num_chunks].tolist() == [item.start + item.num_tokens for item in chunks]
        starts = [sum(item.num_tokens for item in chunks[:index]) for index in range(num_chunks + 1)]
        assert host.query_starts[: num_chunks + 1].tolist() == starts
        assert shape.table_rows == max(slots) + 1
        for item in chunks:
            begin = item.slot * shape.table_columns
            assert tuple(host.block_tables[begin : begin + len(item.block_ids)]) == item.block_ids
        samples = [(end - 1, item) for end, item in zip(starts[1:], chunks, strict=True) if item.samples]
        count = len(samples)
        assert shape.num_samples == count
        assert host.sample_rows[:count].tolist() == [row for row, _ in samples]
        assert host.sample_slots[:count].tolist() == [item.slot for _, item in samples]
        assert host.sample_positions[:count].tolist() == [item.start + item.num_tokens for _, item in samples]
        drawn = [index for index, (_, item) in enumerate(samples) if item.slot == 2]
        assert host.random_samples[: shape.num_random].tolist() == drawn
        if size is not None:
            assert host.sample_slots[count:6].tolist() == [LIMITS.max_num_requests] * (6 - count)
            assert host.sample_rows[count:6].tolist() == [0] * (6 - count)
        assert shape.size == (size or StepSize(num_tokens, num_decodes, num_chunks - num_decodes, count))
        assert (shape.starts, shape.lengths) == ([c.start for c in chunks], [c.num_tokens for c in chunks])
        assert shape.reads_last_tokens == any(item.input_on_device for item in chunks)


def test_nobodys_step_is_padding_alone() -> None:
    host = host_arrays()
    shape = make_batch().fill_padding(host, StepSize(5, 3, 3, 3))
    assert host.header.tolist() == [0, 0, 0, 0]
    assert found_rows(host, 0, 6) == [(0, ON_HOST, 0, 0)] * 5 + [(UNTOUCHED,) * 4]
    assert host.sample_slots[:4].tolist() == [LIMITS.max_num_requests] * 3 + [UNTOUCHED]
    assert (shape.num_chunks, shape.num_samples, shape.table_rows, shape.sampling) == (0, 0, 0, NOTHING)


def test_nothing_is_written_behind_a_step() -> None:
    host = host_arrays()
    make_batch().fill(plan_of(chunk(0, 3, None), chunk(1, 0, (7, 8, 9))), host)
    num_written = {field.name: sum(n != UNTOUCHED for n in getattr(host, field.name)) for field in fields(StepInputs)}
    assert num_written == {
        "header": 4,
        **dict.fromkeys(("token_ids", "token_slots", "positions", "kv_rows"), 4),
        "query_starts": 3,
        **dict.fromkeys(("context_lens", "slots", "sample_rows", "sample_slots", "sample_positions"), 2),
        "random_samples": 0,
        "block_tables": 2,
    }


def test_steps_of_the_sampler_are_those_of_the_rows_that_sample() -> None:
    batch = make_batch(
        {
            0: SamplingParams(max_tokens=9, temperature=1.0, top_k=5, logprobs=True),
            1: SamplingParams(max_tokens=9, repetition_penalty=1.5, min_p=0.1, top_p=0.5),  # greedy: the last two rest
            2: SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(3,)),
            3: SamplingParams(max_tokens=9, temperature=1.0, min_p=0.1),
        }
    )
    host = host_arrays()

    def use(*chunks: TokenChunk) -> SamplingUse:
        return batch.fill(plan_of(*chunks), host).sampling

    assert use(chunk(4, 3, None), chunk(0, 3, None, samples=False)) == NOTHING
    assert use(chunk(0, 3, None)) == SamplingUse(False, False, True, False, True)
    assert use(chunk(0, 3, None), chunk(1, 3, None)) == SamplingUse(True, False, True, False, True)
    assert use(chunk(2, 13, None), chunk(3, 40, None)) == SamplingUse(False, True, False, True, False)
    assert use(chunk(2, 14, None)) == NOTHING  # position 15 = 10 prompt tokens and min_tokens: no longer early


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((), "0 chunks in a step"),
        (tuple(chunk(slot % 6, slot, None) for slot in range(7)), "7 chunks in a step"),
        ((chunk(0, 0, (1,) * 65),), "65 tokens in a step"),
        ((chunk(0, 0, None), chunk(0, 5, None)), "two chunks of one slot"),
        ((chunk(6, 0, None),), "slot 6 of 6 in a step"),
        ((TokenChunk(-1, 0, 0, 1, (5,), (3,), samples=True),), "slot -1 in a step"),
        ((TokenChunk(0, 0, -1, 1, (5,), (3,), samples=True),), "a chunk at position -1"),
        ((TokenChunk(0, 0, 0, 0, (), (3,), samples=True),), "a chunk of 0 tokens"),
        ((TokenChunk(0, 0, 0, 1, (5, 6), (3,), samples=True),), "2 ids for a chunk of one token"),
        ((TokenChunk(0, 0, 0, 3, (5, 6), (3,), samples=True),), "2 ids for 3 tokens of slot 0"),
        ((chunk(1, 0, (5, 6)), chunk(0, 3, None)), "0 ids for 1 tokens of slot 0 behind the decodes"),
        (
            (TokenChunk(2, 2, 16, 1, (), (3, 4), samples=True),),
            "positions 16 .. 16 of slot 2 are beyond its table of 2",
        ),
        ((TokenChunk(2, 2, 0, 1, (), (), samples=True),), "positions 0 .. 0 of slot 2 are beyond its table of 0"),
        ((TokenChunk(2, 2, 9, 8, (1,) * 8, (3, 4), samples=True),), "positions 9 .. 16 of slot 2 are beyond its table"),
        ((TokenChunk(2, 2, 0, 1, (1,), tuple(range(33)), samples=True),), "33 blocks of a request, a table has 32"),
        ((TokenChunk(2, 2, 0, 1, (1,), (100,), samples=True),), "block 100 of slot 2, the pool has 100"),
    ],
)
def test_a_plan_that_leads_beyond_arrays_or_tables_is_refused(chunks: tuple[TokenChunk, ...], message: str) -> None:
    batch = make_batch()
    with pytest.raises(AssertionError, match=message):
        batch.fill(plan_of(*chunks), host_arrays())
