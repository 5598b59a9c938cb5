"""A whole load, whoever does it: the missing chunks, then the sums, then the mark that the weights may be served.

Loader and model worker call the same function, so that one can finish what the other has begun.
"""

from collections.abc import Callable, Sequence

from server.errors import EngineDead, StartupError
from server.weights.checksum_file import CHECKSUM_FILE, format_sum
from server.weights.loader import load_missing
from server.weights.memory import WeightMemory, WritableMemory
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord
from server.weights.shard_index import name_some
from server.weights.spans import source_spans


def complete_load(
    plan: LoadPlan,
    memory: WritableMemory,
    record: LoadRecord,
    on_progress: Callable[[int], None],
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Load what is missing, verify all of it, mark the record complete. `on_loaded`: only the sums are left to do.

    Raises StartupError when the files are at fault (a read fails, a file has changed, a sum is not that of
    checksums.json), EngineDead when sums differ from those of an earlier load.
    """
    load_missing(plan, memory, record, on_progress)
    on_loaded()
    sums = _sums(plan, memory, record)
    if sums is not None:
        if plan.expected_sums is not None:
            _compare_with_file(plan, sums)
        if differing := _differing(plan, sums, record.sums):
            raise EngineDead(f"the weights were loaded again and differ from the first time: {name_some(differing)}")
        record.store_sums(sums)
    record.mark_complete()


def damaged_tensors(plan: LoadPlan, memory: WeightMemory, record: LoadRecord) -> list[str]:
    """The tensors that do not hold what they held when they were loaded.

    Host memory is not looked at: it can only be written through a writable mapping, which nobody has after the load,
    while a GPU's could be damaged by a kernel of the process that has just failed.
    """
    if record.sums is None or not memory.has_cheap_sums:
        return []
    return _differing(plan, memory.sums(source_spans(plan.layout), len(plan.sources)), record.sums)


def _sums(plan: LoadPlan, memory: WeightMemory, record: LoadRecord) -> Sequence[int] | None:
    """On the host they cost a second per 2 to 8 GB, which is paid only if there is something to compare them with."""
    if not memory.has_cheap_sums and plan.expected_sums is None and record.sums is None:
        return None
    return memory.sums(source_spans(plan.layout), len(plan.sources))


def _differing(plan: LoadPlan, found: Sequence[int] | None, expected: Sequence[int] | None) -> list[str]:
    if found is None or expected is None:
        return []
    rows = zip(plan.sources, found, expected, strict=True)
    return [name for name, found_sum, expected_sum in rows if found_sum != expected_sum]


def _compare_with_file(plan: LoadPlan, sums: Sequence[int]) -> None:
    assert plan.expected_sums is not None
    differing = _differing(plan, sums, plan.expected_sums)
    if differing:
        number = plan.sources.index(differing[0])
        raise StartupError(
            f"{plan.checkpoint.tensors[differing[0]].file}: tensor {differing[0]!r} has checksum "
            f"{format_sum(sums[number])}, {plan.checkpoint.folder / CHECKSUM_FILE} expects "
            f"{format_sum(plan.expected_sums[number])} ({len(differing)} of {len(sums)} tensors differ): the file is "
            f"damaged: get it again; if the weights were changed on purpose, remove {CHECKSUM_FILE}"
        )
