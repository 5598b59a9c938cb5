"""What the source files of kernels say of themselves, held against the functions that they define."""

import importlib

import pytest

from server.errors import StartupError
from server.kernels import catalog
from server.kernels.catalog import Recipe, all_specs, expand
from server.kernels.manifest import capability_of
from server.kernels.spec import EARLY, KernelSpec, Variant
from server.ops.cuda.arguments import PackedArguments
from server.ops.cuda.driver import Parameter
from server.ops.cuda.kernels import _kind
from server.ops.cuda.support import HEAD_DIMS
from tests.ops.host_kernels import all_recipes


def the_spec(name: str) -> KernelSpec:
    return next(spec for spec in all_specs() if spec.name == name)


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: f"{recipe.name}-{recipe.dtype}")
def test_a_spec_lists_what_its_function_takes(recipe: Recipe) -> None:
    function = getattr(importlib.import_module(f"server.kernels.{recipe.module}"), recipe.function)
    names = [parameter.name for parameter in recipe.parameters]
    assert [name for name in function.arg_names if name not in recipe.constants and name != EARLY] == names
    assert recipe.constants.keys() <= set(function.arg_names)
    PackedArguments(recipe.parameters)
    for parameter in recipe.parameters:
        assert _kind(parameter) is not None
        assert parameter.alignment & (parameter.alignment - 1) == 0, "the compiler uses powers of two only"


def test_no_two_variants_of_a_kernel_have_the_same_constants() -> None:
    keys = [(recipe.name, recipe.dtype, tuple(sorted(recipe.constants.items()))) for recipe in all_recipes()]
    assert len(set(keys)) == len(keys)


def test_kernels_have_the_head_dims_that_a_backend_is_chosen_by() -> None:
    found: dict[str, set[object]] = {}
    for recipe in all_recipes():
        if "HEAD_DIM" in recipe.constants:
            found.setdefault(recipe.name, set()).add(recipe.constants["HEAD_DIM"])
    assert found
    assert all(head_dims == set(HEAD_DIMS) for head_dims in found.values()), found


def test_a_spec_becomes_one_recipe_per_dtype_and_variant() -> None:
    recipes = expand(the_spec("rotate_and_store"))
    assert [(r.dtype, r.constants["HEAD_DIM"], r.constants["HAS_NORM"]) for r in recipes] == [
        (dtype, head_dim, has_norm)
        for dtype in ("bfloat16", "float16")
        for head_dim in (64, 128)
        for has_norm in (False, True)
    ]
    assert recipes[0].source == "rotary:rotate_and_store"
    assert recipes[0].parameters[:2] == (Parameter("qkv", "*bf16", 16), Parameter("positions", "*i32", 4))
    assert recipes[-1].parameters[0] == Parameter("qkv", "*fp16", 16)
    assert recipes[0].parameters[-1] == Parameter("eps", "fp32", 1)


def test_an_alignment_of_an_unknown_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("k", "k", {"x": "*T"}, (Variant({}),), aligned={"y": 4})
    monkeypatch.setattr(catalog, "_specs_by_module", lambda: {"m": (spec,)})
    with pytest.raises(StartupError, match="kernel k: alignment of y"):
        expand(spec)


def test_two_kernels_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("k", "k", {}, (Variant({}),))
    monkeypatch.setattr(catalog, "_specs_by_module", lambda: {"a": (spec,), "b": (spec,)})
    with pytest.raises(StartupError, match="the same name: k"):
        all_specs()


def test_a_kernel_without_the_models_dtype_has_one_recipe_per_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("k", "k", {"x": "*i32", "n": "i32"}, (Variant({"B": 1}), Variant({"B": 2})))
    monkeypatch.setattr(catalog, "_specs_by_module", lambda: {"m": (spec,)})
    assert [(recipe.dtype, recipe.constants) for recipe in expand(spec)] == [(None, {"B": 1}), (None, {"B": 2})]


def test_architectures_are_ordered_by_their_number() -> None:
    assert [capability_of(arch) for arch in ("sm_80", "compute_80", "sm_120")] == [80, 80, 120]
