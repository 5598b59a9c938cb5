"""Which contender a table gets: a short race of all, a check of the fastest, a careful race of those, and a margin.

Knows microseconds and contenders. Does not know how either is come by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Literal

import msgspec

from server.kernels.tile_files import TileRange
from server.ops.cuda.tiles import GemmChoice

Kind = Literal["cublas", "cublas_lt", "triton"]

NUM_FINALISTS: dict[Kind, int] = {"cublas_lt": 3, "triton": 4}
MAX_CLIMBS = 3  # from an algorithm to one like it
MIN_GAIN = 0.02  # by which a contender must beat cuBLAS's own choice: less may be noise


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """One way to run a GEMM of `range.max_rows` rows: as a table says it, and as operations take it."""

    kind: Kind
    range: TileRange
    choice: GemmChoice


Timed = tuple[float, Contender]  # microseconds


@dataclass(frozen=True, slots=True)
class Race:
    """How contenders are measured (None: this one cannot be run), and which others are like one."""

    quick_us: Callable[[Contender], float | None]
    careful_us: Callable[[Sequence[Contender]], Sequence[float]]
    is_right: Callable[[Contender], bool]
    vary: Callable[[Contender], Sequence[Contender]] = lambda _: ()


def choose(library: Contender, others: Sequence[Contender], race: Race) -> TileRange:
    """The fastest of the finalists if it is worth it, else the library, with what was measured of each kind."""
    finalists = [library, *_finalists(others, race)]
    times = race.careful_us(finalists)
    best: dict[Kind, tuple[float, Contender]] = {}
    for us, contender in zip(times, finalists, strict=True):
        if contender.kind not in best or us < best[contender.kind][0]:
            best[contender.kind] = us, contender
    own_us = best["cublas"][0]
    fastest_us, fastest = min(best.values(), key=lambda pair: pair[0])
    winner = fastest if fastest_us < own_us * (1 - MIN_GAIN) else library
    measured: dict[str, float] = {kind: round(us, 2) for kind, (us, _) in best.items()}
    return msgspec.structs.replace(winner.range, us=measured)


def _finalists(others: Sequence[Contender], race: Race) -> list[Contender]:
    """The fastest of each kind that compute the right thing."""
    timed = _quick(others, race)
    timed += _climb(timed, race)
    is_right = cache(race.is_right)
    return [
        contender
        for kind, count in NUM_FINALISTS.items()
        for contender in islice(filter(is_right, _ranked(timed, kind)), count)
    ]


def _climb(timed: Sequence[Timed], race: Race) -> list[Timed]:
    """Algorithms that nobody thought of: those like the fastest, then those like the fastest of them."""
    known = {contender.range.algorithm for _, contender in timed}
    found: list[Timed] = []
    varied: Contender | None = None
    for _ in range(MAX_CLIMBS):
        best = next(filter(race.is_right, _ranked([*timed, *found], "cublas_lt")), None)
        if best is None or best is varied:
            break
        varied = best
        new = [contender for contender in race.vary(best) if contender.range.algorithm not in known]
        known |= {contender.range.algorithm for contender in new}
        found += _quick(new, race)
    return found


def _quick(contenders: Sequence[Contender], race: Race) -> list[Timed]:
    return [(us, contender) for contender in contenders if (us := race.quick_us(contender)) is not None]


def _ranked(timed: Sequence[Timed], kind: Kind) -> list[Contender]:
    return [contender for _, contender in sorted(timed, key=lambda pair: pair[0]) if contender.kind == kind]
