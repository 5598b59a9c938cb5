"""What a number of requests says: percentiles, rates, and which of them lie in the steady state.

Knows records of requests. Does not know how they were made or who shows the figures.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST_WINDOW = 0.9  # of a request: where all take the same time, a little less than one may be left


@dataclass(slots=True)
class Record:
    """One request of a load. Times in seconds of one clock; `arrivals` is empty unless it was streamed.

    `late_s`: by how much it was sent after `begin`, where that was a time set beforehand.
    """

    user: int
    begin: float
    end: float = 0.0
    late_s: float = 0.0
    num_tokens: int = 0
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    error: str = ""
    example: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds, by nearest rank."""

    p50: float
    p95: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True):
    """Of all good requests of a run, or of those in its steady state. Null: was not streamed.

    `itl_ms`: between two events of one stream; 0 where both came together. `itl_tail`: its P99 / its median.
    """

    num_requests: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    latency_ms: Spread
    ttft_ms: Spread | None
    itl_ms: Spread | None
    itl_tail: float | None


class Failures(msgspec.Struct, frozen=True):
    """All failures of one kind, and the text of the first."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run in which requests count, begin and end included."""

    begin: float
    end: float

    def holds_begin_of(self, record: Record) -> bool:
        """Whether it was sent in the window."""
        return self.begin <= record.begin <= self.end


def percentile(ordered: Sequence[float] | Floats, share: float) -> float:
    """The smallest value that at least this share of all values does not exceed (nearest rank)."""
    return float(ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)])


def spread_ms(seconds: Iterable[float] | Floats) -> Spread | None:
    """None without values."""
    values = np.sort(np.fromiter(seconds, np.float64)) * 1e3
    if not len(values):
        return None
    p50, p95, p99, most = (percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0))
    return Spread(p50, p95, p99, most)


def closed_window(records: Sequence[Record]) -> Window | None:
    """The steady state of a closed loop: from the moment at which every user has had an answer (good or not), until
    the first user sends its last request. What is sent in between runs, from its first to its last token, while all
    users are at work and none does so for the first time. None: there is no such moment.
    """
    by_user: dict[int, list[Record]] = {}
    for record in records:
        by_user.setdefault(record.user, []).append(record)
    if not by_user:
        return None
    begin = max(min(record.end for record in own) for own in by_user.values())
    end = min(max(record.begin for record in own) for own in by_user.values())
    return Window(begin, end) if begin <= end else None


def open_window(records: Sequence[Record]) -> Window | None:
    """The second half of an open loop's arrivals: slower than the whole where the server falls behind."""
    if len(records) < 2:
        return None
    begins = sorted(record.begin for record in records)
    return Window(begins[len(begins) // 2], begins[-1])


def figures_of(records: Sequence[Record]) -> Figures | None:
    """Of all good requests, from the first one's sending to the last one's end. None without any."""
    good = [record for record in records if not record.error]
    if not good:
        return None
    seconds = max(record.end for record in records) - min(record.begin for record in records)
    return _figures(good, seconds, sum(record.num_tokens for record in good), len(good))


def steady_figures(records: Sequence[Record], window: Window | None) -> Figures | None:
    """Latencies of the good requests that were sent in the window; rates of the window itself, to which every good
    request adds that share of its tokens by which its life lies in it. None: there is no window, or one that is
    shorter than a request.
    """
    if window is None:
        return None
    good = [record for record in records if not record.error]
    inside = [record for record in good if window.holds_begin_of(record)]
    if not inside or window.end - window.begin < _LEAST_WINDOW * median(one.end - one.begin for one in inside):
        return None
    shares = [_overlap(record, window) for record in good]
    num_tokens = sum(share * record.num_tokens for share, record in zip(shares, good, strict=True))
    return _figures(inside, window.end - window.begin, num_tokens, sum(shares))


def _overlap(record: Record, window: Window) -> float:
    """The share of a request's life that lies in the window."""
    common = min(record.end, window.end) - max(record.begin, window.begin)
    return max(0.0, common) / max(record.end - record.begin, 1e-9)


def _figures(records: Sequence[Record], seconds: float, num_tokens: float, num_requests: float) -> Figures:
    latency = spread_ms(record.end - record.begin for record in records)
    assert latency is not None, "a figure of no requests"
    streamed = [record for record in records if record.arrivals]
    itl = spread_ms(gaps_of(streamed))
    return Figures(
        num_requests=len(records),
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        requests_per_s=num_requests / seconds,
        latency_ms=latency,
        ttft_ms=spread_ms(record.arrivals[0] - record.begin for record in streamed),
        itl_ms=itl,
        itl_tail=itl.p99 / itl.p50 if itl and itl.p50 else None,
    )


def gaps_of(records: Sequence[Record]) -> Floats:
    """Seconds between two events of one stream, of all streams."""
    parts = [np.diff(np.frombuffer(record.arrivals, np.float64)) for record in records]
    return np.concatenate(parts) if parts else np.empty(0)


def failures_of(records: Iterable[Record]) -> dict[str, Failures]:
    """By kind, the most frequent first."""
    failed = [record for record in records if record.error]
    counts = Counter(record.error for record in failed)
    examples = {record.error: record.example for record in reversed(failed)}
    return {kind: Failures(count, examples[kind]) for kind, count in counts.most_common()}
