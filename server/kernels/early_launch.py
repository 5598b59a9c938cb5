"""Beginning before the kernel before has ended (programmatic dependent launch, sm_90 and newer).

A kernel with a constant EARLY waits here before its first access to memory, which an earlier kernel may still be
writing, or reading. The build sets EARLY, and refuses code that looks at memory first.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Until all kernels before have ended and what they wrote can be seen. Every program calls it, on all its paths:
    one that ended without would let the kernel behind it run beside the one before it."""
    if EARLY:
        gdc_wait()


@triton.jit
def launch_dependents(EARLY: tl.constexpr):
    """The kernel behind may begin once every program has called this or ended: it waits for the whole of this one, so
    the place decides only when its blocks take room. Small kernels call it at their top, after their own wait."""
    if EARLY:
        gdc_launch_dependents()
