"""What a kernel's source file says about how it is to be compiled. Imported at build time only, without Triton."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Constant = int | float | bool | str

# A constant that the build sets by the architecture and no variant names: see early_launch.
EARLY = "EARLY"
MIN_EARLY_CAPABILITY = 90


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of constants, and the launch shape that suits it."""

    constants: Mapping[str, Constant]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel, for every dtype of the model and every variant.

    parameters: name -> type of each run-time argument in the order of the function's, "T" standing for the model's
    dtype ("*T": a pointer to it). aligned: name -> multiple that the address (bytes) or number is guaranteed to be of;
    pointers not named here are multiples of 16 bytes, numbers of 1. dtypes: those that "T" takes; none: no "T".
    The same name may not have two variants whose constants are equal.
    """

    name: str
    function: str
    parameters: Mapping[str, str]
    variants: tuple[Variant, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    aligned: Mapping[str, int] = field(default_factory=dict)
