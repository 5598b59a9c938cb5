"""Which steps of the sampler each slot's request needs, and so which a batch needs.

Knows sampling parameters, which a plan tells only once. Does not know tensors or what the steps do.
"""

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from operator import or_

from server.ops.sampling import SamplingUse, SlotSampling

# Bits of a slot, which for a batch are or'ed: a loop per step of the sampler would take longer than all else.
_RANDOM, _PENALTY, _MIN_TOKENS, _TOP, _MIN_P, _LOGPROBS = (1 << bit for bit in range(6))


class SlotUses:
    """Of the requests that have the slots now."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        self._min_positions: dict[int, int] = {}

    def reset(self, slot: int, sampling: SlotSampling) -> None:
        """The slot is this request's from now on."""
        self._bits[slot] = _bits_of(sampling)
        self._min_positions[slot] = sampling.min_position

    def random_samples(self, slots: Sequence[int]) -> list[int]:
        """Indices of the samples that draw."""
        bits = self._bits
        return [index for index, slot in enumerate(slots) if bits[slot] & _RANDOM]

    def use(self, slots: Sequence[int], positions: Iterable[int]) -> tuple[SamplingUse, bool]:
        """Of samples for these slots at these positions; whether any of them draws."""
        bits = reduce(or_, set(map(self._bits.__getitem__, slots)), 0)
        if bits & _MIN_TOKENS and not self._is_any_early(slots, positions):
            bits &= ~_MIN_TOKENS
        return _use_of(bits), bool(bits & _RANDOM)

    def _is_any_early(self, slots: Sequence[int], positions: Iterable[int]) -> bool:
        return any(
            self._bits[slot] & _MIN_TOKENS and position < self._min_positions[slot]
            for slot, position in zip(slots, positions, strict=True)
        )


def _bits_of(sampling: SlotSampling) -> int:
    bits = _PENALTY if sampling.repetition_penalty != 1 else 0
    bits |= _MIN_TOKENS if sampling.stop_ids else 0
    bits |= _LOGPROBS if sampling.logprobs else 0
    if sampling.is_random:
        bits |= _RANDOM
        bits |= _TOP if sampling.top_k > 0 or sampling.top_p < 1 else 0
        bits |= _MIN_P if sampling.min_p > 0 else 0
    return bits


@cache
def _use_of(bits: int) -> SamplingUse:
    return SamplingUse(
        penalty=bool(bits & _PENALTY),
        min_tokens=bool(bits & _MIN_TOKENS),
        top_k_or_top_p=bool(bits & _TOP),
        min_p=bool(bits & _MIN_P),
        logprobs=bool(bits & _LOGPROBS),
    )
