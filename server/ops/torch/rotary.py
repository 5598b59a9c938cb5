"""Rotary position embedding in fp32 (Su et al., 2021), pairing element i with i + head_dim / 2 as Llama does."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """cosines, and sines with the sign of the half they are applied to; fp32 [tokens, 1, 1, head_dim]."""

    cosines: Tensor
    signed_sines: Tensor


def rotation_at(positions: Tensor, inverse_frequencies: Tensor) -> Rotation:
    """Rotations by positions [tokens] times inverse_frequencies fp32 [head_dim / 2]."""
    angles = (positions.float().unsqueeze(1) * inverse_frequencies).view(-1, 1, 1, inverse_frequencies.shape[0])
    sines = angles.sin()
    return Rotation(angles.cos().repeat(1, 1, 1, 2), torch.cat((-sines, sines), dim=-1))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """heads fp32 [tokens, kv_heads, heads of a group, head_dim], each turned by its token's rotation."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * rotation.cosines, swapped, rotation.signed_sines)
