"""The simplest kernels with the arguments of kernels/gemm.py and of the norm that adds up partial sums."""

from pathlib import Path

import triton
import triton.language as tl

from server.ops.cuda.driver import KernelImage, Parameter

TYPES = {"bfloat16": "bf16", "float16": "fp16"}


@triton.jit
def _sums(x, weight, rows, columns, m, n, k, first, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N] of x[rows] @ weight[columns].T over k from first to end, one k at a time."""
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for i in range(first, end):
        left = tl.load(x + rows * k + i, mask=rows < m, other=0.0).to(tl.float32)
        right = tl.load(weight + columns * k + i, mask=columns < n, other=0.0).to(tl.float32)
        total += left[:, None] * right[None, :]
    return total


@triton.jit
def linear(x, weight, bias, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr):
    num_columns = tl.cdiv(n, BLOCK_N)
    rows = tl.program_id(0) // num_columns * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    total = _sums(x, weight, rows, columns, m, n, k, 0, k, BLOCK_M, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def linear_split(x, weight, partials, m, n, k, num_splits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    num_columns = tl.cdiv(n, BLOCK_N)
    rows = tl.program_id(0) // num_columns * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.cdiv(k, num_splits)
    first = tl.program_id(2) * width
    total = _sums(x, weight, rows, columns, m, n, k, first, tl.minimum(first + width, k), BLOCK_M, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    part = partials + tl.program_id(2) * m * n
    tl.store(part + rows[:, None] * n + columns[None, :], total, mask=inside)


@triton.jit
def gated_linear(x, weight, out, m, n, k, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    num_columns = tl.cdiv(n, BLOCK_N)
    rows = tl.program_id(0) // num_columns * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_rows = columns // block * 2 * block + columns % block
    gates = _sums(x, weight, rows, gate_rows, m, 2 * n, k, 0, k, BLOCK_M, BLOCK_N)
    ups = _sums(x, weight, rows, gate_rows + block, m, 2 * n, k, 0, k, BLOCK_M, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    gated = gates / (1.0 + tl.exp(-gates)) * ups
    tl.store(out + rows[:, None] * n + columns[None, :], gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def reduce_partials(partials, bias, out, m, n, num_splits, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = tl.program_id(0) * n + columns, columns < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(num_splits):
        total += tl.load(partials + part * m * n + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_partials(residual, partials, weight, out, num_tokens, hidden, num_splits, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    place, inside = tl.program_id(0) * hidden + columns, columns < hidden
    total = tl.load(residual + place, mask=inside, other=0.0)
    for part in range(num_splits):
        total += tl.load(partials + part * num_tokens * hidden + place, mask=inside, other=0.0)
    tl.store(residual + place, total, mask=inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(total * total, 0) / hidden + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (total * scale * weights).to(out.dtype.element_ty), mask=inside)


_SIZES = {"m": "i32", "n": "i32", "k": "i32"}
PARAMETERS: dict[str, dict[str, str]] = {
    "linear": {"x": "*T", "weight": "*T", "bias": "*T", "out": "*T", **_SIZES},
    "linear_fp32": {"x": "*T", "weight": "*T", "bias": "*T", "out": "*fp32", **_SIZES},
    "linear_split": {"x": "*T", "weight": "*T", "partials": "*fp32", **_SIZES, "num_splits": "i32"},
    "gated_linear": {"x": "*T", "weight": "*T", "out": "*T", **_SIZES, "block": "i32"},
    "reduce_partials": {
        **{"partials": "*fp32", "bias": "*T", "out": "*T"},
        **{"m": "i32", "n": "i32", "num_splits": "i32"},
    },
    "add_rms_norm_partials": {
        **{"residual": "*fp32", "partials": "*fp32", "weight": "*T", "out": "*T"},
        **{"num_tokens": "i32", "hidden": "i32", "num_splits": "i32", "eps": "fp32"},
    },
}


def contract_image(name: str, dtype: str, **constants: int | bool) -> KernelImage:
    """A kernel for one dtype of the model."""
    parameters = tuple(
        Parameter(parameter, kind.replace("T", TYPES[dtype]), 1) for parameter, kind in PARAMETERS[name].items()
    )
    function = name.removesuffix("_fp32")
    source = f"tests.ops.contract_kernels:{function}"
    return KernelImage(name, source, constants, parameters, function, 4, 0, Path("not built"))


def tile_image(name: str, dtype: str, block_m: int = 2, block_n: int = 32, *, has_bias: bool = False) -> KernelImage:
    """A projection."""
    constants: dict[str, int | bool] = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if name in ("linear", "linear_fp32"):
        constants["HAS_BIAS"] = has_bias
    return contract_image(name, dtype, **constants)


def adding_images(dtype: str) -> list[KernelImage]:
    """Those that add up partial sums."""
    reducing = [contract_image("reduce_partials", dtype, BLOCK=32, HAS_BIAS=has_bias) for has_bias in (False, True)]
    return [*reducing, contract_image("add_rms_norm_partials", dtype, BLOCK=128)]
