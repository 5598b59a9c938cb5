"""How fast a checkpoint gets onto the GPU: load_rate.py FOLDER [THREADS]. Prints seconds of each part and GB/s.

The time before `context` is Python's own. Run it twice: the first reads the files into the page cache.
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from server.ops.cuda.nvidia import NvidiaDriver  # noqa: E402
from server.weights.device_memory import DeviceMemory, DeviceStore, built_sum_kernels  # noqa: E402
from server.weights.folder import HubAccess  # noqa: E402
from server.weights.index import open_checkpoint  # noqa: E402
from server.weights.layout import weight_layout  # noqa: E402
from server.weights.loader import load_missing  # noqa: E402
from server.weights.plan import LoadPlan  # noqa: E402
from server.weights.record import LoadRecord  # noqa: E402
from server.weights.spans import source_spans  # noqa: E402


class Clock:
    """Prints what has passed since the last time."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def show(self, what: str, num_bytes: int = 0) -> None:
        """One line."""
        now = time.perf_counter()
        rate = f"  {num_bytes / (now - self._last) / 1e9:8.1f} GB/s" if num_bytes else ""
        print(f"{what:24} {now - self._last:8.4f} s{rate}")
        self._last = time.perf_counter()


def sums(memory: DeviceMemory, plan: LoadPlan) -> list[int] | None:
    """All checksums."""
    return memory.sums(source_spans(plan.layout), len(plan.sources))


def main(folder: str, num_threads: int) -> None:
    """Load, sum up, map again."""
    clock = Clock()
    checkpoint = open_checkpoint(folder, "main", HubAccess.from_environment(os.environ))
    plan = LoadPlan.make(checkpoint, weight_layout(checkpoint.facts))
    record = LoadRecord(len(plan.chunks), len(plan.sources))
    clock.show(f"plan, {len(plan.chunks)} chunks")
    driver = NvidiaDriver.open()
    clock.show("context")
    store = DeviceStore(driver, built_sum_kernels(driver))
    clock.show("manifest")
    num_bytes, loaded = plan.layout.total_bytes, plan.num_bytes
    fd = store.create(num_bytes)
    memory = store.map_writable(fd, num_bytes)
    clock.show("allocate and map")
    load_missing(plan, memory, record, lambda _: None, num_threads)
    clock.show(f"load, {num_threads or memory.num_threads} threads", loaded)
    found = sums(memory, plan)
    clock.show("sums", loaded)
    memory.close()
    clock.show("unmap")
    mapped = store.map_read_only(fd, num_bytes)
    clock.show("map read-only")
    assert sums(mapped, plan) == found
    clock.show("sums again", loaded)
    if found is not None and plan.expected_sums is not None:
        print("sums equal checksums.json:", tuple(found) == plan.expected_sums)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
