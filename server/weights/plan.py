"""Everything about a load that follows from checkpoint and layout. Made once, in the master, and inherited by forks."""

from dataclasses import dataclass

from server.weights.checksum_file import read_checksums
from server.weights.copy_plan import Copy, copy_plan, split
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.spans import source_names

CHUNK_BYTES = 4 << 20  # of those tried on a machine with a GPU, the best


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`chunks` in file order; a chunk's number is its place there. `sources`: the tensors, in the order of their sums.

    `expected_sums`: what checksums.json says, if there is one.
    """

    checkpoint: Checkpoint
    layout: WeightLayout
    chunks: tuple[Copy, ...]
    sources: tuple[str, ...]
    expected_sums: tuple[int, ...] | None

    @classmethod
    def make(cls, checkpoint: Checkpoint, layout: WeightLayout, chunk_bytes: int = CHUNK_BYTES) -> "LoadPlan":
        """Raises StartupError when checksums.json is there and broken."""
        sources = source_names(layout)
        expected_sums = read_checksums(checkpoint.folder, sources)
        chunks = tuple(split(copy_plan(layout, checkpoint), chunk_bytes))
        return cls(checkpoint, layout, chunks, sources, expected_sums)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, without the padding between them."""
        return sum(spec.num_bytes for spec in self.layout.tensors)
