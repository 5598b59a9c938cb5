"""Every kernel of the server as an image that the host driver runs from its source: nothing is built."""

from functools import cache
from pathlib import Path

from server.kernels.catalog import Recipe, all_specs, expand
from server.ops.cuda.driver import KernelImage


def all_recipes() -> tuple[Recipe, ...]:
    """Everything that a complete build of one architecture holds."""
    return tuple(recipe for spec in all_specs() for recipe in expand(spec))


def host_image(recipe: Recipe) -> KernelImage:
    """What a recipe would become."""
    return KernelImage(
        recipe.name,
        recipe.source,
        recipe.constants,
        recipe.parameters,
        recipe.function,
        recipe.num_warps,
        shared_bytes=0,
        path=Path("not built"),
    )


@cache
def host_images() -> tuple[KernelImage, ...]:
    """All dtypes and variants, in the order in which a build has them."""
    return tuple(map(host_image, all_recipes()))
