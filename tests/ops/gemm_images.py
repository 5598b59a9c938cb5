"""Kernels of kernels/gemm.py in tiles that suit the interpreter, whatever the shape."""

from server.kernels.catalog import variant_recipe
from server.kernels.spec import Constant, Variant
from server.ops.cuda.driver import KernelImage
from tests.ops.host_kernels import host_image


def tile_constants(name: str, block_m: int = 2, block_n: int = 32, *, has_bias: bool = False) -> dict[str, Constant]:
    """Of a projection that takes any k."""
    constants: dict[str, Constant] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 32, "MORE_M": 0}
    constants |= {"MASKS_K": True, "WEIGHTS_FIRST": False}
    return constants | ({"HAS_BIAS": has_bias} if name in ("linear", "linear_fp32") else {})


def tile_image(name: str, dtype: str, block_m: int = 2, block_n: int = 32, *, has_bias: bool = False) -> KernelImage:
    """One variant for one dtype of the model."""
    return host_image(variant_recipe(name, dtype, Variant(tile_constants(name, block_m, block_n, has_bias=has_bias))))
