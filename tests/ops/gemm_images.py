"""Kernels of kernels/gemm.py in tiles that suit the interpreter, whatever the shape."""

from server.kernels.catalog import all_specs, variant_recipe
from server.kernels.spec import Constant, Variant
from server.ops.cuda.driver import KernelImage
from tests.ops.host_kernels import host_image


def tile_constants(name: str, block_m: int = 2, block_n: int = 32, *, has_bias: bool = False) -> dict[str, Constant]:
    """Those of the variant that takes any shape, with other blocks."""
    variant = next(spec for spec in all_specs() if spec.name == name).variants[0]
    constants = dict(variant.constants) | {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 32}
    return constants | ({"HAS_BIAS": has_bias} if "HAS_BIAS" in constants else {})


def tile_image(name: str, dtype: str, block_m: int = 2, block_n: int = 32, *, has_bias: bool = False) -> KernelImage:
    """One variant for one dtype of the model."""
    return host_image(variant_recipe(name, dtype, Variant(tile_constants(name, block_m, block_n, has_bias=has_bias))))
