"""Random weights of a model, written straight into safetensors files: many threads, the same bytes for the same seed.

Knows the tensors that a model's facts call for; does not know tokenizers or config files. A weight is one of 65,536
quantiles of a normal distribution, so that drawing one costs 16 random bits and a table look-up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from server.models.facts import DTYPE_BYTES, DType, ModelFacts
from server.weights.checksum import partial_sum
from server.weights.checksum_file import ChecksumCollector
from server.weights.layout import source_shapes, weight_layout
from server.weights.rounding import STORED_NAMES, from_float32
from server.weights.threads import for_each
from server.weights.writer import PlannedFile, create_file, plan_file, shard_name, write_fully, write_index

STD = 0.02  # with norms of 1 the logits have a standard deviation of STD * sqrt(hidden_size): about 1
PIECE_ELEMENTS = 1 << 17
_NUM_QUANTILES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """`num_elements` of a tensor from its byte `begin` on, at byte `offset` of its file.

    `key` makes its random numbers its own.
    """

    tensor_name: str
    key: tuple[int, int]
    begin: int
    offset: int
    num_elements: int


def write_random_weights(folder: Path, facts: ModelFacts, seed: int, max_shard_bytes: int) -> None:
    """Write all weights that `facts` call for, their index and their checksums.

    A file holds `max_shard_bytes` or a single tensor.
    """
    shards = _shards(facts, max_shard_bytes)
    plans = {shard_name(number, len(shards)): plan_file(shard) for number, shard in enumerate(shards)}
    table = _quantiles(facts.dtype)
    ones = from_float32(np.ones(PIECE_ELEMENTS, dtype=np.float32), facts.dtype)
    checksums = ChecksumCollector()
    for file_number, (file_name, plan) in enumerate(plans.items()):
        with create_file(folder / file_name, plan) as fd:

            def write(piece: _Piece, fd: int = fd) -> None:
                is_norm = piece.tensor_name.endswith("norm.weight")
                values = ones[: piece.num_elements] if is_norm else _draw(table, seed, piece)
                data = memoryview(values.tobytes())
                write_fully(fd, data, piece.offset)
                checksums.add(piece.tensor_name, partial_sum(data, piece.begin))

            for_each(write, _pieces(plan, file_number, DTYPE_BYTES[facts.dtype]))
    write_index(folder, plans)
    checksums.write(folder)


def _shards(facts: ModelFacts, max_shard_bytes: int) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in the order of the layout."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    num_bytes = 0
    for name, shape in source_shapes(weight_layout(facts)).items():
        tensor_bytes = int(np.prod(shape)) * DTYPE_BYTES[facts.dtype]
        if shards[-1] and num_bytes + tensor_bytes > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = (STORED_NAMES[facts.dtype], shape)
        num_bytes += tensor_bytes
    return shards


def _pieces(plan: PlannedFile, file_number: int, element_bytes: int) -> Iterator[_Piece]:
    for tensor in plan.tensors:
        num_elements = tensor.num_bytes // element_bytes
        for begin in range(0, num_elements, PIECE_ELEMENTS):
            begin_byte = begin * element_bytes
            offset = tensor.offset + begin_byte
            length = min(PIECE_ELEMENTS, num_elements - begin)
            yield _Piece(tensor.name, (file_number, offset), begin_byte, offset, length)


def _quantiles(dtype: DType) -> NDArray[np.generic]:
    normal = NormalDist(0.0, STD)
    values = [normal.inv_cdf((i + 0.5) / _NUM_QUANTILES) for i in range(_NUM_QUANTILES)]
    return from_float32(np.array(values, dtype=np.float32), dtype)


def _draw(table: NDArray[np.generic], seed: int, piece: _Piece) -> NDArray[np.generic]:
    source = np.random.SFC64(np.random.SeedSequence([seed, *piece.key]))
    bits = np.random.Generator(source).integers(0, 2**64 - 1, -(-piece.num_elements // 4), np.uint64, endpoint=True)
    return np.take(table, bits.view("<u2")[: piece.num_elements])
