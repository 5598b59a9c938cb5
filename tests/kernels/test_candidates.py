"""What scripts/tune-kernels is given to try: everything fits the device and the workspace, and is not too much."""

import importlib

import pytest

from server.cli.make_model import SHAPES
from server.kernels.candidates import Candidate, candidates
from server.kernels.catalog import variant_recipe
from server.kernels.spec import Variant
from server.kernels.tuning.cases import SIZES, GemmCase, cases_of
from server.models.facts import facts_from_config
from server.ops.cuda.sizes import GEMM_WORKSPACE
from server.ops.cuda.tiles import GEMM_OPERATIONS

QWEN = cases_of(facts_from_config(SHAPES["qwen2-7b"] | {"dtype": "bfloat16"}))
TINY = cases_of(facts_from_config(SHAPES["tiny-qwen2"] | {"dtype": "bfloat16"}))  # whose k is too short to be cut
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100")
MAX_CANDIDATES = 62  # of one size of a projection: a search takes minutes, not hours


def of(case: GemmCase, m: int, arch: str = "sm_90") -> list[Candidate]:
    shape = case.shape
    return candidates(shape.operation, m, shape.n, shape.k, has_bias=shape.has_bias, block=case.block, arch=arch)


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@pytest.mark.parametrize("case", [*QWEN, *TINY], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_each_size_has_some_candidates_and_none_twice(case: GemmCase, arch: str) -> None:
    for m in SIZES:
        found = of(case, m, arch)
        assert 0 < len(found) <= MAX_CANDIDATES
        keys = {(c.kernel, *c.constants.items(), c.num_warps, c.num_stages, c.num_splits) for c in found}
        assert len(keys) == len(found)


@pytest.mark.parametrize("case", QWEN, ids=str)
def test_constants_are_those_of_the_kernel_and_make_tiles_that_it_can_run(case: GemmCase) -> None:
    for m in SIZES:
        for candidate in of(case, m):
            constants = candidate.constants
            recipe = variant_recipe(candidate.kernel, "bfloat16", Variant(constants))
            function = getattr(importlib.import_module(f"server.kernels.{recipe.module}"), recipe.function)
            named = {*constants, *(parameter.name for parameter in recipe.parameters)}
            assert named == {*function.arg_names} - {"EARLY"}  # which the build sets
            for block, more in (("BLOCK_M", "MORE_M"), ("BLOCK_N", "MORE_N")):
                assert is_power_of_two(int(constants[block]) - int(constants[more]))
                assert is_power_of_two(int(constants[more]))
            assert constants["MASKS_K"] == (case.shape.k % int(constants["BLOCK_K"]) != 0)
            assert constants.get("HAS_BIAS", case.shape.has_bias) == case.shape.has_bias
            assert not (constants["BLOCK_M"] == 1 and constants["MORE_N"])


@pytest.mark.parametrize("case", QWEN, ids=str)
def test_only_sums_that_fit_the_workspace_are_split_and_no_split_is_empty(case: GemmCase) -> None:
    for m in SIZES:
        for candidate in of(case, m):
            if candidate.kernel != "linear_split":
                assert candidate.num_splits == 1
                continue
            assert 4 * candidate.num_splits * m * case.shape.n <= GEMM_WORKSPACE.num_bytes
            assert candidate.num_splits <= -(-case.shape.k // int(candidate.constants["BLOCK_K"]))


def test_kernels_are_those_that_the_operation_can_use() -> None:
    allowed = {
        "linear": {"linear", "linear_split"},
        "linear_add_norm": {"linear_split"},
        "gated_linear": {"gated_linear"},
        "logits": {"linear_fp32"},
    }
    for case in QWEN:
        assert {c.kernel for m in SIZES for c in of(case, m)} == allowed[case.shape.operation]


@pytest.mark.parametrize("operation", GEMM_OPERATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_a_bias_makes_impossible_is_left_out(operation: str, has_bias: bool) -> None:
    """Nothing adds a bias to gate and up, or to partial sums and a residual."""
    found = candidates(operation, 16, 512, 512, has_bias=has_bias, block=256, arch="sm_90")
    names = {candidate.kernel for candidate in found}
    if has_bias:
        assert names <= {"linear", "linear_split", "linear_fp32"}
        assert operation != "linear_add_norm" or names == {"linear"}
    assert bool(names) != (has_bias and operation == "gated_linear")


@pytest.mark.parametrize("k", [8, 72, 1000])
def test_any_shape_has_candidates_that_mask_the_end_of_k(k: int) -> None:
    for m in (1, 7, 100, 300):
        found = candidates("linear", m, 72, k, has_bias=True, block=0, arch="sm_90")
        assert found
        assert all(candidate.constants["MASKS_K"] for candidate in found)


def test_a_size_with_all_rows_in_one_tile_is_tried_where_it_fits() -> None:
    gate_up = next(case for case in QWEN if case.shape.operation == "gated_linear")
    for m in (16, 48, 96, 160, 192, 256):
        assert m in {int(candidate.constants["BLOCK_M"]) for candidate in of(gate_up, m)}
    one_wave = [c for c in of(gate_up, 128) if c.constants["BLOCK_N"] == 144 and c.constants["BLOCK_M"] == 128]
    assert one_wave, "288 rows of weights a program fill the 132 multiprocessors of an H200 once"
