"""Small kernels with which the tests of the drivers launch something."""

from pathlib import Path

import triton
import triton.language as tl

from server.ops.cuda.driver import KernelImage, Parameter


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(out + offsets, _times(values, factor).to(out.dtype.element_ty), mask=offsets < n)


@triton.jit
def _times(values, factor):
    return values * factor


@triton.jit
def copy_scalars(ints, floats, number, wide, factor):
    tl.store(ints, number.to(tl.int64))
    tl.store(ints + 1, wide)
    tl.store(floats, factor)


@triton.jit
def count_up(counters, last, COUNT: tl.constexpr):
    for i in range(last):
        tl.atomic_add(counters + tl.arange(0, COUNT), 1)
        if i >= 100:
            tl.store(counters, 0)


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + rows * SIZE + columns), tl.load(b + rows * SIZE + columns))
    tl.store(out + rows * SIZE + columns, product)


@triton.jit
def peaks(x, out, SIZE: tl.constexpr):
    values = tl.load(x + tl.arange(0, SIZE))
    tl.store(out, tl.max(values, 0))
    tl.store(out + 1, tl.sum(tl.exp(values), 0))


@triton.jit
def add_as_stored(x, out):
    tl.store(out, tl.load(x) + tl.load(x))


@triton.jit
def load_without_other(x, out, n, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n))


def image(function: str, *, aligned: int = 1, constants: dict[str, int] | None = None, **types: str) -> KernelImage:
    """Of a kernel of this file; `types` in the order of its parameters."""
    parameters = tuple(Parameter(name, kind, aligned) for name, kind in types.items())
    source = f"tests.ops.driver_kernels:{function}"
    return KernelImage(function, source, dict(constants or {}), parameters, function, 4, 0, Path("not built"))


def scale_image(dtype: str = "fp32", *, aligned: int = 1) -> KernelImage:
    """out = x * factor, 16 numbers per program."""
    types = {"x": f"*{dtype}", "out": f"*{dtype}", "n": "i32", "factor": "fp32"}
    return image("scale", aligned=aligned, constants={"BLOCK": 16}, **types)
