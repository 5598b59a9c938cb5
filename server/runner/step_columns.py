"""A plan by columns: a list per property of its chunks, because a loop over objects takes the host too long.

Knows plans. Does not know host arrays, sampling or devices.
"""

from dataclasses import dataclass

from server.ops.interface import BatchLimits, StepSize
from server.scheduler.plan import StepPlan, TokenChunk


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The chunks of a plan, of which the first `num_decodes` have one token each."""

    chunks: tuple[TokenChunk, ...]
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    block_ids: list[tuple[int, ...]]
    samples: list[bool]
    num_decodes: int
    size: StepSize

    @classmethod
    def of(cls, plan: StepPlan) -> "StepColumns":
        """Nothing is checked here."""
        chunks = plan.chunks
        lengths = [chunk.num_tokens for chunk in chunks]
        samples = [chunk.samples for chunk in chunks]
        num_tokens = sum(lengths)
        num_decodes = len(chunks) if num_tokens == len(chunks) else _count_decodes(lengths)
        return cls(
            chunks=chunks,
            slots=[chunk.slot for chunk in chunks],
            starts=[chunk.start for chunk in chunks],
            lengths=lengths,
            block_ids=[chunk.block_ids for chunk in chunks],
            samples=samples,
            num_decodes=num_decodes,
            size=StepSize(num_tokens, num_decodes, len(chunks) - num_decodes, samples.count(True)),
        )

    def check(self, limits: BatchLimits) -> None:
        """Assert what arrays and kernels rely on, but for the block tables, which are looked at where they are used."""
        slots, num_chunks = self.slots, len(self.chunks)
        assert 0 < num_chunks <= limits.max_num_requests, f"{num_chunks} chunks in a step"
        assert self.size.num_tokens <= limits.max_batched_tokens, f"{self.size.num_tokens} tokens in a step"
        assert min(self.lengths) > 0, f"a chunk of {min(self.lengths)} tokens"
        assert min(self.starts) >= 0, f"a chunk at position {min(self.starts)}"
        assert len(set(slots)) == num_chunks, f"two chunks of one slot among {slots}"
        assert min(slots) >= 0, f"slot {min(slots)} in a step"
        assert max(slots) < limits.max_num_requests, f"slot {max(slots)} of {limits.max_num_requests} in a step"


def _count_decodes(lengths: list[int]) -> int:
    """Leading chunks of one token: they can be attended together, whoever they belong to."""
    return next((index for index, length in enumerate(lengths) if length > 1), len(lengths))
