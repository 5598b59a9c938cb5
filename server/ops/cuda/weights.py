"""The mapped weight memory as buffers, by the names and offsets of weights/layout. Nothing is copied."""

from server.ops.cuda.buffer import Buffer
from server.weights.layout import WeightLayout


def weight_buffers(address: int, layout: WeightLayout, owner: object = None) -> dict[str, Buffer]:
    """Every tensor of the memory mapped at `address`; `owner` is kept alive by each."""
    return {spec.name: Buffer(address + spec.offset, spec.shape, spec.dtype, owner) for spec in layout.tensors}
