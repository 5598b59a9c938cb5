"""A checkpoint's weights in host memory, loaded by the server's own loader."""

from pathlib import Path

from server.weights.fill import complete_load
from server.weights.folder import HubAccess
from server.weights.index import Checkpoint, open_checkpoint
from server.weights.layout import WeightLayout, weight_layout
from server.weights.memory import HostMemory, HostStore
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord

HUB = HubAccess(cache=Path("/nonexistent"), is_offline=True)


def open_folder(folder: Path) -> tuple[Checkpoint, WeightLayout]:
    """The verified checkpoint and its layout."""
    checkpoint = open_checkpoint(str(folder), "main", HUB)
    return checkpoint, weight_layout(checkpoint.facts)


def new_record(plan: LoadPlan) -> LoadRecord:
    """Nothing has arrived."""
    return LoadRecord(len(plan.chunks), len(plan.sources))


def load_on_host(checkpoint: Checkpoint, layout: WeightLayout) -> HostMemory:
    """All weights."""
    plan = LoadPlan.make(checkpoint, layout)
    memory = HostStore().private_memory(layout.total_bytes)
    complete_load(plan, memory, new_record(plan), lambda _: None)
    return memory
