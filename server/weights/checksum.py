"""The checksum of a tensor: what it is, and numpy's way to compute it. The GPU's way is server/kernels/checksum.py.

A tensor's bytes, row-major as stored and padded with zeros to whole little-endian words of 32 bits, are w[0], w[1], ..

    checksum = sum of w[i] * weight(i), modulo 2^64
    weight(i) = (x ^ (x >> 32)) * FINAL_FACTOR | 1 with x = i * INDEX_FACTOR, modulo 2^64

It depends on the source tensor alone: neither on where its pieces lie nor on their order, and since it is linear in the
words, a piece may begin or end inside of one. A single changed word is always found, as weights are odd; what
exchanges or damages several stays hidden with a probability of about 2^-32. It is no protection against malice.
"""

import numpy as np

# Multipliers of good spectral quality (L'Ecuyer 1999), below 2^63 so that signed arithmetic can hold them.
INDEX_FACTOR = 3935559000370003845
FINAL_FACTOR = 6364136223846793005

_MASK = (1 << 64) - 1
_WORD_BYTES = 4
_BLOCK_WORDS = 1 << 14  # its arrays of 64-bit numbers stay in a core's cache
_STEPS = np.arange(_BLOCK_WORDS, dtype=np.uint64) * np.uint64(INDEX_FACTOR)


def partial_sum(data: bytes | bytearray | memoryview, first_byte: int) -> int:
    """What `data`, the bytes of a tensor from its byte `first_byte` on, adds to the tensor's checksum. 0 .. 2^64 - 1.

    The caller adds up the pieces modulo 2^64, in any order. Releases the interpreter's lock most of the time.
    """
    view = memoryview(data).cast("B")
    ahead = first_byte % _WORD_BYTES
    behind = -(ahead + len(view)) % _WORD_BYTES
    words = np.frombuffer(bytes(ahead) + bytes(view) + bytes(behind) if ahead or behind else view, dtype="<u4")
    first_word = first_byte // _WORD_BYTES
    total = 0
    for begin in range(0, len(words), _BLOCK_WORDS):
        block = words[begin : begin + _BLOCK_WORDS]
        weights = _STEPS[: len(block)] + np.uint64((first_word + begin) * INDEX_FACTOR & _MASK)
        weights ^= weights >> np.uint64(32)
        weights *= np.uint64(FINAL_FACTOR)
        weights |= np.uint64(1)
        weights *= block
        total += int(weights.sum(dtype=np.uint64))
    return total & _MASK
