"""What scripts/tune-kernels races and who wins, without a device."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from server.kernels.tile_files import TileRange
from server.kernels.tuning.cases import SIZES, cases_of
from server.kernels.tuning.choose import NUM_FINALISTS, Contender, Kind, Race, choose
from server.kernels.tuning.values import agree, as_floats, random_inputs, random_weights
from tests.kernels.tuning_rig import FACTS

QWEN2_7B = replace(
    FACTS,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
)

# Who wins


def contender(kind: Kind, name: str, rows: int = 8) -> Contender:
    range_ = TileRange(rows, kernel=name) if kind == "triton" else TileRange(rows, workspace_bytes=len(name))
    return Contender(kind, range_, None)


class Track:
    """A race with given times. `quick` differs from `careful` where it is given."""

    def __init__(self, times: dict[Contender, float | None], quick: dict[Contender, float] | None = None) -> None:
        self._times, self._quick = times, quick or {}
        self.wrong: set[Contender] = set()
        self.finalists: list[Contender] = []

    @property
    def race(self) -> Race:
        return Race(self._quick_us, self._careful_us, lambda contender: contender not in self.wrong)

    def _quick_us(self, contender: Contender) -> float | None:
        return self._quick.get(contender, self._times[contender])

    def _careful_us(self, contenders: Sequence[Contender]) -> list[float]:
        self.finalists = list(contenders)
        times = [self._times[contender] for contender in contenders]
        assert None not in times, "who cannot run is not in the final"
        return times  # type: ignore[return-value]


LIBRARY = contender("cublas", "")
ALGORITHMS = [contender("cublas_lt", "x" * number) for number in range(1, 6)]
KERNELS = [contender("triton", f"k{number}") for number in range(6)]


def run(times: dict[Contender, float | None], **more: Any) -> tuple[TileRange, Track]:
    track = Track({LIBRARY: 10.0} | times, **more)
    return choose(LIBRARY, list(times), track.race), track


def test_the_fastest_wins_and_the_best_of_each_kind_is_noted() -> None:
    times = dict(zip(ALGORITHMS, (9.0, 8.123, 11.0, 12.0, 13.0), strict=True))
    times |= dict(zip(KERNELS, (7.5, 7.25, 20.0, 8.0, 9.0, 10.0), strict=True))
    chosen, track = run(times)
    assert chosen.kernel == "k1"
    assert chosen.us == {"cublas": 10.0, "cublas_lt": 8.12, "triton": 7.25}
    assert chosen.max_rows == 8
    counts = [sum(c.kind == kind for c in track.finalists) for kind in ("cublas", "cublas_lt", "triton")]
    assert counts == [1, NUM_FINALISTS["cublas_lt"], NUM_FINALISTS["triton"]]


@pytest.mark.parametrize(("us", "wins"), [(9.79, True), (9.81, False), (10.5, False)])
def test_a_gain_that_may_be_noise_changes_nothing(us: float, wins: bool) -> None:
    chosen, _ = run({KERNELS[0]: us})
    assert (chosen.kernel == "k0") == wins
    assert chosen.us == {"cublas": 10.0, "triton": us}


def test_the_careful_race_decides() -> None:
    chosen, _ = run({KERNELS[0]: 9.0, KERNELS[1]: 8.0}, quick={KERNELS[0]: 1.0, KERNELS[1]: 2.0})
    assert chosen.kernel == "k1"


def test_who_cannot_run_or_is_wrong_is_replaced_by_the_next() -> None:
    times: dict[Contender, float | None] = {kernel: 5.0 + index for index, kernel in enumerate(KERNELS)}
    times[KERNELS[0]] = None
    track = Track({LIBRARY: 20.0} | times)
    track.wrong = {KERNELS[1]}
    chosen = choose(LIBRARY, KERNELS, track.race)
    assert chosen.kernel == "k2"
    assert track.finalists == [LIBRARY, *KERNELS[2:6]]


def algorithm(number: int) -> Contender:
    return Contender("cublas_lt", TileRange(8, algorithm=bytes([number]).hex() * 64), None)


def test_what_is_like_the_fastest_is_tried_and_what_is_like_that() -> None:
    everyone = {number: algorithm(number) for number in range(20)}
    times: dict[Contender, float | None] = {one: 9.0 - 0.5 * number for number, one in everyone.items()}
    times[everyone[4]] = None
    track = Track({LIBRARY: 10.0} | times)
    track.wrong = {everyone[3]}
    varied: list[int] = []

    def vary(contender: Contender) -> list[Contender]:
        number = next(number for number, one in everyone.items() if one is contender)
        varied.append(number)
        return [everyone[number + step] for step in (1, 2, 3)]

    chosen = choose(LIBRARY, [everyone[0], everyone[1]], replace(track.race, vary=vary))
    assert varied == [1, 2, 5], "who is wrong or cannot run is no place to go on from"
    assert chosen.algorithm == everyone[8].range.algorithm


def test_a_search_ends_where_nothing_is_faster() -> None:
    best, others = algorithm(0), [algorithm(number) for number in range(1, 5)]
    track = Track({LIBRARY: 10.0, best: 5.0} | dict.fromkeys(others, 6.0))
    varied: list[Contender] = []

    def vary(contender: Contender) -> list[Contender]:
        varied.append(contender)
        return others

    assert choose(LIBRARY, [best], replace(track.race, vary=vary)).algorithm == best.range.algorithm
    assert varied == [best]


def test_without_others_the_library_stays() -> None:
    chosen, _ = run({})
    assert (chosen.kernel, chosen.algorithm, chosen.us) == (None, None, {"cublas": 10.0})


# Numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_numbers_are_of_the_size_of_weights_and_activations(dtype: Any) -> None:
    for make, low, high in ((random_weights, 2**-7, 2**-5), (random_inputs, 0.5, 2.0)):
        numbers = as_floats(make(4000, dtype, Random(1)), dtype)
        assert len(numbers) == 4000
        assert all(low <= abs(number) < high for number in numbers)
        assert 0.4 < sum(number > 0 for number in numbers) / 4000 < 0.6
        assert len(set(numbers)) > 200


def test_results_agree_up_to_rounding_and_never_with_nan() -> None:
    expected = [1.0, -64.0, 0.01]
    assert agree([1.5, -64.5, -0.5], expected, "bfloat16")
    assert not agree([1.0, -62.0, 0.01], expected, "bfloat16")
    assert not agree([1.0, -64.0, float("nan")], expected, "bfloat16")
    assert not agree([1.0, -64.0], expected, "bfloat16")
    assert not agree([1.5, -64.0, 0.01], expected, "float32")
    assert as_floats(b"\x80\x3f\x00\xc0", "bfloat16").tolist() == [1.0, -2.0]  # type: ignore[attr-defined]


# What is raced


def test_the_projections_of_a_model_are_found() -> None:
    cases = cases_of(QWEN2_7B)
    assert [str(case) for case in cases] == [
        "linear 4608 x 3584 + bias",
        "linear_add_norm 3584 x 3584",
        "gated_linear 37888 x 3584",
        "linear_add_norm 3584 x 18944",
        "logits 152064 x 3584",
    ]
    assert [case.num_weights for case in cases] == [28] * 4 + [1]
    assert cases[2].block == 18944 // 4
    assert cases[0].sizes == SIZES
    assert max(cases[4].sizes) == 512
