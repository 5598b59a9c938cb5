"""Tables of GEMMs in which every kind of way occurs, for whole steps of tiny models."""

from collections.abc import Callable

from server.kernels.tuning.cases import GemmCase, cases_of
from server.models.facts import ModelFacts
from server.ops.cuda.buffer import BufferDType
from server.ops.cuda.driver import GemmAlgorithm, KernelImage
from server.ops.cuda.kernels import Kernels
from server.ops.cuda.tiles import GemmChoice, GemmRanges, GemmTable, Tile

KERNELS: dict[str, str] = {
    "linear": "linear_split",
    "gated_linear": "gated_linear",
    "linear_add_norm": "linear_split",
    "logits": "linear_fp32",
}


def built_image(kernels: Kernels, dtype: BufferDType, name: str, has_bias: bool) -> KernelImage:
    """The variant for any shape that every build has."""
    constants = {"HAS_BIAS": has_bias} if name in ("linear", "linear_fp32") else {}
    return kernels.get(name, dtype, **constants).image


def table_of_all_ways(
    facts: ModelFacts,
    version: int,
    image: Callable[[str, bool], KernelImage],
    algorithm: Callable[[GemmCase, int], GemmAlgorithm],
) -> GemmTable:
    """Fused and split kernels for 1 row, plain ones for 2, algorithms for up to 4; beyond, the library chooses.

    image: by name and whether there is a bias. algorithm: for so many rows.
    """

    def ranges(case: GemmCase) -> GemmRanges:
        name, shape = KERNELS[case.shape.operation], case.shape
        first: GemmChoice = Tile(image(name, False), 2 if "split" in name else 1)
        second: GemmChoice = first if shape.operation == "logits" else Tile(image("linear", shape.has_bias))
        return GemmRanges((1, 2, 4), (first, second, algorithm(case, 4)))

    return GemmTable(version, {case.shape: ranges(case) for case in cases_of(facts)})
