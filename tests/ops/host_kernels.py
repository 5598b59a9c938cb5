"""Every kernel of the server as an image that the host driver runs from its source: nothing is built."""

from functools import cache
from pathlib import Path

from server.kernels.catalog import all_recipes
from server.ops.cuda.driver import KernelImage


@cache
def host_images() -> tuple[KernelImage, ...]:
    """All dtypes and variants, in the order in which a build has them."""
    return tuple(recipe.image(Path("not built"), shared_bytes=0) for recipe in all_recipes())
