"""One recipe to one compiled kernel, by Triton's compiler, and the proof that launches will fit it.

Needs no GPU and no C compiler. Knows nothing of folders and manifests.
"""

import importlib
import re
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from server.errors import StartupError
from server.kernels.catalog import Recipe
from server.kernels.cubin import CompiledEntry, ParameterLayout, read_cubin, read_ptx, waits_first
from server.kernels.manifest import PORTABLE_ARCH, capability_of
from server.kernels.spec import EARLY, MIN_EARLY_CAPABILITY
from server.ops.cuda.arguments import NUM_SCRATCH_POINTERS, PackedArguments
from server.ops.cuda.driver import Parameter

WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A cubin, or PTX, and the shared memory that a launch must ask for.

    `waits`: its first access to memory comes after a wait for all kernels before it.
    """

    data: bytes
    shared_bytes: int
    waits: bool


def compile_recipe(recipe: Recipe, arch: str) -> CompiledKernel:
    """Compile for "sm_90" or the like, or to PTX for "compute_80".

    Raises StartupError if the source does not compile, differs from its spec, or is not what launches expect.
    """
    source = _source(recipe, arch)
    options = {"num_warps": recipe.num_warps, "num_stages": recipe.num_stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability_of(arch), WARP_SIZE), options=options)
    except Exception as error:
        raise StartupError(f"{_title(recipe, arch)} cannot be compiled: {error}") from error
    text = compiled.asm["ptx"]
    is_portable = arch == PORTABLE_ARCH
    data, entry = (text.encode(), read_ptx(text)) if is_portable else _with_entry(compiled.asm["cubin"])
    kernel = CompiledKernel(data, compiled.metadata.shared, _waits(recipe, arch, source, text))
    _check_entry(recipe, arch, entry)
    _check_launch(recipe, arch, compiled.metadata)
    return kernel


def expected_layout(parameters: tuple[Parameter, ...]) -> ParameterLayout:
    """Where the host puts the arguments of a launch, Triton's scratch pointers included."""
    sizes = [_num_bytes(parameter.type) for parameter in parameters] + [8] * NUM_SCRATCH_POINTERS
    return tuple(zip(PackedArguments(parameters).offsets, sizes, strict=True))


def _source(recipe: Recipe, arch: str) -> ASTSource:
    function = getattr(importlib.import_module(f"server.kernels.{recipe.module}"), recipe.function)
    names = list(function.arg_names)
    parameters = {parameter.name: parameter for parameter in recipe.parameters}
    run_time = [name for name in names if name not in recipe.constants and name != EARLY]
    early = {EARLY: capability_of(arch) >= MIN_EARLY_CAPABILITY} if EARLY in names else {}
    if run_time != list(parameters) or not recipe.constants.keys() <= set(names):
        raise StartupError(
            f"kernel {recipe.name}: its spec has parameters {', '.join(parameters)} and constants "
            f"{', '.join(recipe.constants)}; {recipe.source} takes {', '.join(names)}"
        )
    return ASTSource(
        fn=function,
        signature={name: parameters[name].type if name in parameters else "constexpr" for name in names},
        constexprs=recipe.constants | early,
        attrs={
            (names.index(parameter.name),): [["tt.divisibility", parameter.alignment]]
            for parameter in recipe.parameters
            if parameter.alignment > 1
        },
    )


def _with_entry(cubin: bytes) -> tuple[bytes, CompiledEntry]:
    return cubin, read_cubin(cubin)


def _is_early(source: ASTSource) -> bool:
    names = source.fn.arg_names
    return EARLY in names and bool(source.constants[(names.index(EARLY),)])


def _waits(recipe: Recipe, arch: str, source: ASTSource, ptx: str) -> bool:
    """Judged by what was compiled, not by what was written."""
    try:
        waits = waits_first(ptx)
    except ValueError as error:
        raise StartupError(f"{_title(recipe, arch)} must not begin early: {error}") from error
    if _is_early(source) and not waits:
        raise StartupError(f"{_title(recipe, arch)} takes {EARLY}, but never waits for the kernels before it")
    return waits


def _check_entry(recipe: Recipe, arch: str, entry: CompiledEntry) -> None:
    expected = expected_layout(recipe.parameters)
    if (entry.name, entry.layout) != (recipe.function, expected):
        raise StartupError(
            f"{_title(recipe, arch)}: the compiled file has {entry.name} with parameters (offset, bytes) "
            f"{entry.layout}; {recipe.function} with {expected} was expected"
        )


def _check_launch(recipe: Recipe, arch: str, metadata: object) -> None:
    """Launches pass null scratch pointers, one block per cluster and the recipe's warps."""
    expected = {"num_warps": recipe.num_warps, "num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0}
    found = {name: getattr(metadata, name) for name in expected}
    if found != expected:
        raise StartupError(f"{_title(recipe, arch)} needs a launch with {found}; {expected} is what it would get")


def _num_bytes(type_: str) -> int:
    if type_.startswith("*"):
        return 8
    bits = re.search(r"\d+$", type_)
    assert bits, type_
    return int(bits.group()) // 8


def _title(recipe: Recipe, arch: str) -> str:
    return f"kernel {recipe.name} ({recipe.dtype}, {recipe.constants}) for {arch}"
