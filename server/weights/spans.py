"""Where the bytes of each source tensor lie in the weight memory: the pieces that its checksum is added up from.

Knows the layout; does not know files or how sums are computed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from server.weights.layout import TensorSpec, WeightLayout, source_shapes


class Span(NamedTuple):
    """`num_bytes` of source tensor number `tensor` from its byte `source_offset` on, at byte `offset` of the memory."""

    tensor: int
    source_offset: int
    offset: int
    num_bytes: int


def source_names(layout: WeightLayout) -> tuple[str, ...]:
    """The source tensors in the order of their numbers."""
    return tuple(source_shapes(layout))


def source_spans(layout: WeightLayout) -> tuple[Span, ...]:
    """Every byte of every source tensor once."""
    numbers = {name: number for number, name in enumerate(source_names(layout))}
    return tuple(span for spec in layout.tensors for span in _spans(spec, numbers))


def _spans(spec: TensorSpec, numbers: dict[str, int]) -> Iterator[Span]:
    row_bytes = spec.row_bytes
    for segment in spec.segments:
        yield Span(
            numbers[segment.source],
            segment.source_row * row_bytes,
            spec.offset + segment.dest_row * row_bytes,
            segment.num_rows * row_bytes,
        )
