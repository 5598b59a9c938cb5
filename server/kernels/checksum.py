"""Checksums of tensors where they lie on the device, all in one launch. The definition is server/weights/checksum.py's.

A program adds up one span, a row of the table: unit of the memory at which it begins, number of units, number of the
first unit within its tensor, number of the tensor. Units are words of 32 bits in `sum_words`, halves of one in
`sum_halves`, which takes spans that begin anywhere. Sums are added atomically: integers have no order.
"""

import triton
import triton.language as tl

from server.kernels.spec import KernelSpec, Variant

INDEX_FACTOR = tl.constexpr(3935559000370003845)
FINAL_FACTOR = tl.constexpr(6364136223846793005)
SPAN_COLUMNS = tl.constexpr(4)


@triton.jit
def _weight(index):
    """index: int64, of words within the tensor."""
    mixed = (index * INDEX_FACTOR).to(tl.uint64, bitcast=True)
    mixed = mixed ^ (mixed >> 32)
    return (mixed.to(tl.int64, bitcast=True) * FINAL_FACTOR) | 1


@triton.jit
def _unsigned(words):
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def sum_words(memory, spans, sums, BLOCK: tl.constexpr):
    """Spans begin at multiples of 16 bytes of the memory and at whole words of their tensors."""
    row = spans + tl.program_id(0) * SPAN_COLUMNS
    begin = tl.multiple_of(tl.load(row), 4)
    num_words = tl.load(row + 1).to(tl.int32)
    index = tl.load(row + 2)
    offsets = tl.arange(0, BLOCK)
    num_whole = num_words // BLOCK * BLOCK
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for done in range(0, num_whole, BLOCK):
        words = tl.load(memory + begin + done + offsets)  # without a mask: 16 bytes at a time
        total += _unsigned(words) * _weight(index + done + offsets)
    rest = num_whole + offsets
    words = tl.load(memory + begin + rest, mask=rest < num_words, other=0)
    total += _unsigned(words) * _weight(index + rest)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total, axis=0))


@triton.jit
def sum_halves(memory, spans, sums, BLOCK: tl.constexpr):
    """Spans begin at multiples of 2 bytes of the memory and of their tensors."""
    row = spans + tl.program_id(0) * SPAN_COLUMNS
    begin = tl.load(row)
    num_halves = tl.load(row + 1).to(tl.int32)
    index = tl.load(row + 2)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for done in range(0, num_halves, BLOCK):
        offsets = done + tl.arange(0, BLOCK)
        place = begin + offsets
        words = _unsigned(tl.load(memory + (place >> 1), mask=offsets < num_halves, other=0))
        half = (words >> (16 * (place & 1))) & 0xFFFF
        of_tensor = index + offsets
        total += (half << (16 * (of_tensor & 1))) * _weight(of_tensor >> 1)
    tl.atomic_add(sums + tl.load(row + 3), tl.sum(total, axis=0))


_PARAMETERS = {"memory": "*i32", "spans": "*i64", "sums": "*i64"}

SPECS = (
    KernelSpec("sum_words", "sum_words", _PARAMETERS, (Variant({"BLOCK": 4096}, num_warps=8),), dtypes=()),
    KernelSpec("sum_halves", "sum_halves", _PARAMETERS, (Variant({"BLOCK": 1024}),), dtypes=()),
)
