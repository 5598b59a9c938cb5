"""That a kernel looks at memory only after its wait for those before it: what makes it safe to begin early."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.kernels.catalog import Recipe
from server.kernels.cubin import waits_first
from server.kernels.spec import EARLY
from tests.ops.host_kernels import all_recipes

ROOT = Path(__file__).parents[2]
# As Triton 3.6 writes it.
PTX = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry scale(
	.param .u64 .ptr .global .align 1 scale_param_0,
	.param .u32 scale_param_1
)
.reqntid 128
{
	.reg .b32 	%r<14>;
$L__func_begin0:
	.loc	1 9 0                           // embed.py:9:0
	ld.param.b64 	%rd1, [scale_param_0];
	// begin inline asm
	BEFORE
	// end inline asm
	// begin inline asm
	WAIT // dummy %r2
	// end inline asm
	mov.u32 	%r1, %tid.x;
	ld.global.b32 { %r3 }, [ %rd1 + 0 ];
	@%p1 bra 	$L__BB0_2;
	st.global.b32 [ %rd1 + 0 ], { %r3 };
$L__BB0_2:
	ret;
}
"""
WAIT = "griddepcontrol.wait;"


def ptx(before: str = "", wait: str = WAIT) -> str:
    return PTX.replace("BEFORE", before).replace("WAIT", wait)


@pytest.mark.parametrize(
    "before",
    [
        "",
        "mov.u32 %r0, %ctaid.x;",
        "$L__tmp0:",
        "// ld.global, st.global",
        "{ .reg .pred p; }",
        "@%p9 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 256;",
        "ld.shared.b32 %r2, [global_smem];",
    ],
)
def test_a_kernel_may_compute_before_it_waits(before: str) -> None:
    assert waits_first(ptx(before))


@pytest.mark.parametrize("wait", ["", "griddepcontrol.launch_dependents;"])
def test_a_kernel_without_wait_is_known_as_such(wait: str) -> None:
    assert not waits_first(ptx(wait=wait))


def test_a_wait_in_a_comment_is_none() -> None:
    with pytest.raises(ValueError, match="comes too late"):
        waits_first(ptx(wait="// griddepcontrol.wait;"))


@pytest.mark.parametrize(
    "access",
    [
        "ld.global.b32 { %r9 }, [ %rd1 + 0 ];",
        "ld.global.L1::evict_last.v4.b32 {%r9,%r8,%r7,%r6}, [%rd1];",
        "ld.b32 %r9, [%rd1];",
        "ldu.global.b32 %r9, [%rd1];",
        "st.global.b32 [%rd1], %r9;",
        "mov.u32 %r9, 0x0; ld.global.b32 {%r9}, [%rd1];",
        "{ ld.global.b32 %r9, [%rd1]; }",
        "$L__BB0_9: st.shared.b32 [%r9], %r8;",
        "atom.global.gpu.acq_rel.add.u32 %r9, [%rd1], 1;",
        "red.global.add.u32 [%rd1], 1;",
        "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10;",
        "cp.async.bulk.tensor.2d.shared::cluster.global [%r9], [%rd1];",
        "prefetch.global.L2 [%rd1];",
        "griddepcontrol.launch_dependents;",
    ],
)
def test_an_access_before_the_wait_is_refused(access: str) -> None:
    with pytest.raises(ValueError, match="comes too late"):
        waits_first(ptx(access))


@pytest.mark.parametrize(
    ("before", "wait"),
    [
        ("bra $L__BB0_2;", WAIT),
        ("@%p1 bra $L__BB0_2;", WAIT),
        ("@!%p1 ret;", WAIT),
        ("@%p1 ld.global.b32 %r9, [%rd1];", WAIT),
        ("call.uni foo, ();", WAIT),
        ("", f"@%p1 {WAIT}"),
    ],
)
def test_a_wait_that_a_thread_may_miss_is_refused(before: str, wait: str) -> None:
    with pytest.raises(ValueError, match="comes after a branch"):
        waits_first(ptx(before, wait))


@pytest.mark.parametrize("recipe", {recipe.source: recipe for recipe in all_recipes()}.values(), ids=lambda r: r.name)
def test_a_kernel_that_can_begin_early_waits_in_its_first_statement(recipe: Recipe) -> None:
    module = importlib.import_module(f"server.kernels.{recipe.module}")
    if EARLY not in getattr(module, recipe.function).arg_names:
        return
    tree = ast.parse(Path(str(module.__file__)).read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == recipe.function)
    _docstring, first, second, *_ = map(ast.unparse, function.body)
    assert (first, second) == (f"wait_for_predecessor({EARLY})", f"launch_dependents({EARLY})")


def test_every_kernel_beside_the_gemms_can_begin_early() -> None:
    modules = {recipe.module for recipe in all_recipes() if EARLY in _arg_names(recipe)}
    assert modules >= {"attention", "embed", "gate", "gather", "norm", "partials", "rotary", "sample"}


def _arg_names(recipe: Recipe) -> list[str]:
    return list(getattr(importlib.import_module(f"server.kernels.{recipe.module}"), recipe.function).arg_names)


COMPILE = """
from dataclasses import replace
from server.errors import StartupError
from server.kernels import compiler, gather
from server.kernels.catalog import all_specs, expand

recipe = next(r for spec in all_specs() if spec.name == "gather_rows" for r in expand(spec))
for arch in ("sm_80", "sm_90", "compute_80"):
    print(compiler.compile_recipe(recipe, arch).waits)
sums = next(r for spec in all_specs() if spec.name == "sum_halves" for r in expand(spec))
print(compiler.compile_recipe(sums, "sm_90").waits)


def compile_changed(judge):
    compiler.waits_first = judge
    try:
        compiler.compile_recipe(recipe, "sm_90")
    except StartupError as error:
        print(error)


def refuse(ptx):
    raise ValueError("too late")


compile_changed(refuse)
compile_changed(lambda ptx: False)
"""


@pytest.mark.slow
def test_the_build_marks_what_waits_and_refuses_what_does_so_too_late() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert lines[:4] == ["False", "True", "False", "False"]
    assert lines[4].endswith("for sm_90 must not begin early: too late")
    assert lines[5].endswith("for sm_90 takes EARLY, but never waits for the kernels before it")
