"""The rotation frequencies of a model, plain and with Llama 3's scaling. Knows numbers, not tensors.

Each intermediate is rounded to fp32 where transformers' fp32 tensors round it: at position 30,000 one unit in the last
place of a frequency is a rotation of 0.002.
"""

import math
import struct

from server.models.facts import ModelFacts, RopeScaling


def inverse_frequencies(facts: ModelFacts) -> tuple[float, ...]:
    """Radians per position of each pair (i, i + head_dim / 2): head_dim / 2 fp32 values."""
    exponents = (_fp32(2 * pair / facts.head_dim) for pair in range(facts.head_dim // 2))
    frequencies = tuple(_fp32(1 / _fp32(facts.rope_theta**exponent)) for exponent in exponents)
    if facts.rope_scaling is None:
        return frequencies
    return tuple(_scaled(frequency, facts.rope_scaling) for frequency in frequencies)


def _scaled(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = _fp32(_fp32(1 / frequency) * _fp32(2 * math.pi))
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return _fp32(frequency / scaling.factor)
    smooth = _fp32(
        _fp32(_fp32(_fp32(1 / wavelength) * scaling.original_max_position) - scaling.low_freq_factor)
        / (scaling.high_freq_factor - scaling.low_freq_factor)
    )
    stretched = _fp32(_fp32(_fp32(1 - smooth) * frequency) / scaling.factor)
    return _fp32(stretched + _fp32(smooth * frequency))


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
