"""Percentiles by nearest rank, and a steady state that holds neither the first round nor the last users' end."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load_figures import (
    Record,
    Window,
    closed_window,
    failures_of,
    figures_of,
    gaps_of,
    open_window,
    percentile,
    spread_ms,
    steady_figures,
)


def record(user: int, begin: float, end: float, num_tokens: int = 10, error: str = "", example: str = "") -> Record:
    return Record(user, begin, end, num_tokens=num_tokens, error=error, example=example)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_a_percentile_is_the_least_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    num_needed = share * len(ordered) - 1e-6
    assert sum(value <= found for value in ordered) >= num_needed
    assert sum(value < found for value in ordered) <= num_needed + 1


def test_a_spread_is_in_milliseconds_whatever_the_order() -> None:
    spread = spread_ms([0.003, 0.001, 0.002])
    assert spread is not None
    assert (spread.p50, spread.p95, spread.max) == (2.0, 3.0, 3.0)
    assert spread_ms([]) is None


def test_the_steady_state_begins_with_the_last_first_answer_and_ends_with_the_first_last_request() -> None:
    quick = [record(0, begin, begin + 1) for begin in range(6)]
    slow = [record(1, begin, begin + 2) for begin in (0, 2, 4)]
    assert closed_window(quick + slow) == Window(2, 4)


def test_too_few_rounds_have_no_steady_state() -> None:
    assert closed_window([]) is None
    assert closed_window([record(0, 0, 1), record(1, 0, 2)]) is None
    records = [record(0, 0, 1), record(0, 1.001, 2)]
    assert closed_window(records) == Window(1, 1.001)
    assert steady_figures(records, closed_window(records)) is None
    assert steady_figures(records, None) is None


def test_one_user_is_steady_after_the_first_answer() -> None:
    records = [record(0, 0, 3), record(0, 3, 4), record(0, 4, 5), record(0, 5, 6)]
    steady = steady_figures(records, closed_window(records))
    assert steady is not None
    assert steady.num_requests == 3
    assert steady.latency_ms.max == pytest.approx(1000)
    assert steady.tokens_per_s == pytest.approx(10)
    assert steady.requests_per_s == pytest.approx(1)


def test_steady_rates_count_of_a_request_what_lies_in_the_window() -> None:
    records = [record(0, 0, 4), record(0, 4, 8), record(0, 8, 12)]
    steady = steady_figures(records, Window(2, 9))  # which the first one's half and the last one's quarter lie in
    assert steady is not None
    assert steady.tokens_per_s == pytest.approx((5 + 10 + 2.5) / 7)
    assert steady.num_requests == 2


@given(st.integers(1, 8), st.integers(3, 6), st.floats(0.1, 10))
def test_where_all_requests_take_the_same_time_both_rates_agree(users: int, rounds: int, seconds: float) -> None:
    records = [
        record(user, number * seconds, (number + 1) * seconds) for user in range(users) for number in range(rounds)
    ]
    whole, steady = figures_of(records), steady_figures(records, closed_window(records))
    assert whole is not None
    assert steady is not None
    assert steady.tokens_per_s == pytest.approx(whole.tokens_per_s)
    assert steady.latency_ms.p99 == pytest.approx(whole.latency_ms.p99)


def test_the_second_half_of_the_arrivals_is_steady_in_an_open_loop() -> None:
    records = [record(user, user, user + 1) for user in range(10)]
    assert open_window(records) == Window(5, 9)
    assert open_window(records[:1]) is None


def test_gaps_are_those_within_a_stream() -> None:
    first, second = record(0, 0, 1), record(1, 0, 1)
    first.arrivals, second.arrivals = array("d", [1.0, 1.5, 1.5]), array("d", [7.0])
    assert list(gaps_of([first, second])) == [0.5, 0.0]
    figures = figures_of([first, second])
    assert figures is not None
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.max == 7000
    assert figures.itl_ms is not None
    assert figures.itl_ms.max == 500


def test_failed_requests_count_as_errors_only() -> None:
    records = [record(0, 0, 2), record(0, 2, 3, error="status 429", example="a"), record(1, 0, 1, error="timeout")]
    records.append(record(1, 1, 2, error="status 429", example="b"))
    figures = figures_of(records)
    assert figures is not None
    assert (figures.num_requests, figures.seconds) == (1, 3)
    failures = failures_of(records)
    assert {kind: one.count for kind, one in failures.items()} == {"status 429": 2, "timeout": 1}
    assert failures["status 429"].example == "a"
    assert figures_of(records[1:]) is None
