"""The batched sampler against the plain reference, row by row, with neighbours of every other kind in the batch."""

import dataclasses
import math
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from server.ops.sampling import SamplingUse, SlotSampling, bounded_penalty, bounded_temperature
from server.ops.torch.sampler import SampledRows, SlotTable, choose
from tests.ops.sampling_reference import choose_row, log_softmax

VOCAB_SIZE = 300
EVERYTHING = SamplingUse(penalty=True, min_tokens=True, top_k_or_top_p=True, min_p=True, logprobs=True)
NAN, INF = float("nan"), float("inf")
SEEN_THIRD = tuple(range(0, VOCAB_SIZE, 3))


def sampling(**changes: object) -> SlotSampling:
    """Greedy, but for `changes`; parameters are bounded as the runner does it."""
    plain = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0, 0, (), (), logprobs=True)
    row = dataclasses.replace(plain, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(
        row,
        temperature=bounded_temperature(row.temperature),
        repetition_penalty=bounded_penalty(row.repetition_penalty),
    )


def run(logits: Tensor, rows: list[SlotSampling], positions: list[int], use: SamplingUse = EVERYTHING) -> SampledRows:
    """Rows take slots in reverse order, so that row and slot differ."""
    table = SlotTable(len(rows), logits.shape[1], torch.device("cpu"))
    slots = torch.arange(len(rows) - 1, -1, -1)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        table.reset(slot, row)
    random_rows = torch.tensor([index for index, row in enumerate(rows) if row.is_random], dtype=torch.int64)
    flags = table.token_flags.index_select(0, slots)
    return choose(logits, flags, table.params(slots), torch.tensor(positions), random_rows, use)


def every_kind(count: int, random: Random) -> list[SlotSampling]:
    return [
        sampling(
            temperature=random.choice([0.0, 0.3, 1.0, 1.0, 5.0]),
            top_k=random.choice([0, 0, 1, 3, 50, 10_000]),
            top_p=random.choice([1.0, 1.0, 0.1, 0.7, 0.95]),
            min_p=random.choice([0.0, 0.0, 0.02, 0.5]),
            repetition_penalty=random.choice([1.0, 1.0, 1.3, 0.8]),
            seed=random.getrandbits(64),
            min_position=random.choice([0, 40]),
            seen_ids=tuple(random.sample(range(VOCAB_SIZE), 60)),
            stop_ids=tuple(random.sample(range(VOCAB_SIZE), random.choice([0, 5]))),
        )
        for _ in range(count)
    ]


def test_mixed_batches_equal_the_plain_reference_row_by_row() -> None:
    random = Random(0)
    generator = torch.Generator().manual_seed(0)
    num_near_ties = 0
    for _ in range(4):
        rows = every_kind(64, random)
        positions = [random.choice([3, 39, 40, 1000]) for _ in rows]
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
        result = run(logits, rows, positions)
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            values = logits[index].tolist()
            expected, margin = choose_row(values, row, position)
            if margin < 1e-4:
                num_near_ties += 1
                continue
            assert result.token_ids[index] == expected, (index, row, position)
            assert result.logprobs[index].item() == pytest.approx(log_softmax(values, expected), abs=1e-4)
    assert num_near_ties <= 2


def test_ties_are_kept_by_every_filter_and_won_by_the_lowest_id() -> None:
    logits = torch.full((4, 50), -5.0)
    logits[:, 10:14] = 2.0
    # Whatever a filter keeps of four equal logits, it keeps all four: over many positions all of them are drawn.
    rows = [
        sampling(temperature=1.0, top_k=1),
        sampling(temperature=1.0, top_p=0.01),
        sampling(temperature=1.0, min_p=1.0),
    ]
    for row in rows:
        drawn = {int(run(logits[:1], [row], [position]).token_ids[0]) for position in range(60)}
        assert drawn == {10, 11, 12, 13}
    assert run(logits[:1], [sampling()], [0]).token_ids[0] == 10


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    rows = [sampling(temperature=1.0, seed=position * 2**33 + 17) for position in range(4000)]
    result = run(logits, rows, list(range(4000)))
    frequencies = torch.bincount(result.token_ids, minlength=4) / 4000
    assert (frequencies - logits[0].softmax(-1)).abs().max() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-4, 1e-300, -0.0, 5e-324])
def test_near_zero_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.999]])
    row = sampling(temperature=temperature, seed=5)
    for position in range(20):
        result = run(logits, [row], [position])
        assert (int(result.token_ids[0]), bool(result.is_finite[0])) == (1, True)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e37])
@pytest.mark.parametrize("penalty", [1e-38, 1.0, 1e38, 1e308, 5e-324])
def test_extreme_parameters_give_an_id_that_exists_and_leave_neighbours_alone(
    temperature: float, scale: float, penalty: float
) -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    expected = int(logits[1].argmax())
    logits[0] *= scale
    wild = sampling(temperature=temperature, repetition_penalty=penalty, seen_ids=SEEN_THIRD, top_p=1e-9, min_p=1.0)
    result = run(logits, [wild, sampling()], [5, 5])
    assert 0 <= int(result.token_ids[0]) < VOCAB_SIZE
    assert result.is_finite.tolist() == [True, True]
    assert torch.isfinite(result.logprobs).all()
    assert result.token_ids[1] == expected
    # top_p and min_p leave only the largest penalised logits, however wild the numbers are.
    scores = [
        (logit / wild.repetition_penalty if logit > 0 else logit * wild.repetition_penalty)
        if i in SEEN_THIRD
        else logit
        for i, logit in enumerate(logits[0].tolist())
    ]
    bounded = [
        min(max(score, -1e30), 1e30) if i in SEEN_THIRD and penalty != 1 else score for i, score in enumerate(scores)
    ]
    if temperature <= 1:
        assert bounded[int(result.token_ids[0])] == pytest.approx(max(bounded), rel=1e-5)


@pytest.mark.parametrize("bad", [[NAN], [NAN] * VOCAB_SIZE, [-INF] * VOCAB_SIZE, [INF], [INF, NAN]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_flagged_and_stay_in_their_row(bad: list[float], temperature: float) -> None:
    random = Random(3)
    rows = [*every_kind(8, random), sampling(temperature=temperature, top_k=4, top_p=0.5), *every_kind(8, random)]
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    clean = run(logits, rows, [50] * len(rows))
    logits[8, : len(bad)] = torch.tensor(bad)
    result = run(logits, rows, [50] * len(rows))
    assert result.is_finite.tolist() == [index != 8 for index in range(len(rows))]
    assert result.token_ids[8] == 0
    others = [index for index in range(len(rows)) if index != 8]
    assert torch.equal(result.token_ids[others], clean.token_ids[others])
    assert torch.equal(result.logprobs[others], clean.logprobs[others])


def test_some_minus_infinities_are_no_fault() -> None:
    logits = torch.tensor([[-INF, 1.0, -INF, 0.5]])
    result = run(logits, [sampling(temperature=1.0, top_k=3)], [0])
    assert result.is_finite[0]
    assert int(result.token_ids[0]) in (1, 3)


def test_hints_only_skip_what_changes_nothing() -> None:
    """A greedy and a plainly drawn row: the same with all steps run and with all skipped."""
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    rows = [sampling(), sampling(temperature=1.0, seed=9)]
    nothing = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)
    assert torch.equal(run(logits, rows, [7, 7], nothing).token_ids, run(logits, rows, [7, 7]).token_ids)
    assert all(math.isnan(value) for value in run(logits, rows, [7, 7], nothing).logprobs.tolist())


def test_row_is_the_same_alone_and_in_a_batch_drawn_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = every_kind(20, Random(5))
    logits = torch.randn(20, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    together = run(logits, rows, [50] * 20).token_ids.tolist()
    monkeypatch.setattr("server.ops.torch.sampler.MAX_TILE_ENTRIES", 3 * VOCAB_SIZE)
    assert run(logits, rows, [50] * 20).token_ids.tolist() == together
    alone = [int(run(logits[i : i + 1], [rows[i]], [50]).token_ids[0]) for i in range(20)]
    assert alone == together


def test_position_and_seed_alone_decide_the_noise() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    drawn = [[int(run(logits, [sampling(temperature=1.0, seed=s)], [p]).token_ids[0]) for p in range(8)] for s in seeds]
    assert all(first != second for first, second in pairwise(drawn))
    assert drawn[2] == [int(run(logits, [sampling(temperature=3.0, seed=2**32)], [p]).token_ids[0]) for p in range(8)]


def test_recorded_tokens_become_last_tokens_and_seen() -> None:
    table = SlotTable(3, VOCAB_SIZE, torch.device("cpu"))
    for slot in range(3):
        table.reset(slot, sampling(repetition_penalty=2.0, seen_ids=(slot,), stop_ids=(slot, 7)))
    table.record(torch.tensor([2, 0]), torch.tensor([7, 9]), mark_seen=True)
    assert table.last_tokens.tolist() == [9, 0, 7]
    flags = {slot: {i: f for i, f in enumerate(table.token_flags[slot].tolist()) if f} for slot in range(3)}
    assert flags == {0: {0: 3, 7: 2, 9: 1}, 1: {1: 3, 7: 2}, 2: {2: 3, 7: 3}}
    table.reset(0, sampling())
    assert not table.token_flags[0].any()
