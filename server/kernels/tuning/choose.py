"""Which contender a table gets: a short race of all, a check of the fastest, a careful race of those, and a margin.

Knows microseconds and contenders. Does not know how either is come by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from server.kernels.tile_files import TileRange
from server.ops.cuda.tiles import GemmChoice

Kind = Literal["cublas", "cublas_lt", "triton"]

NUM_FINALISTS: dict[Kind, int] = {"cublas_lt": 3, "triton": 4}
MIN_GAIN = 0.02  # by which a contender must beat cuBLAS's own choice: less may be noise


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """One way to run a GEMM of `range.max_rows` rows: as a table says it, and as operations take it."""

    kind: Kind
    range: TileRange
    choice: GemmChoice


@dataclass(frozen=True, slots=True)
class Race:
    """How contenders are measured. None: this one cannot be run."""

    quick_us: Callable[[Contender], float | None]
    careful_us: Callable[[Sequence[Contender]], Sequence[float]]
    is_right: Callable[[Contender], bool]


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
    timed = [(us, contender) for contender in others if (us := race.quick_us(contender)) is not None]
    finalists: list[Contender] = []
    for kind, count in NUM_FINALISTS.items():
        ranked = (contender for _, contender in sorted(timed, key=lambda pair: pair[0]) if contender.kind == kind)
        chosen = 0
        for contender in ranked:
            if chosen == count:
                break
            if race.is_right(contender):
                finalists.append(contender)
                chosen += 1
    return finalists
