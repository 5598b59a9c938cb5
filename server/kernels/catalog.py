"""Every kernel of the folder, and what each is to be compiled to. Imports Triton: nothing that serves imports this."""

import importlib
from collections import Counter
from dataclasses import dataclass
from functools import cache

from server.errors import StartupError
from server.kernels.manifest import kernel_files
from server.kernels.spec import Constant, KernelSpec, Variant
from server.ops.cuda.driver import Parameter

TRITON_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
POINTER_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """One variant of a kernel for one dtype, not compiled yet. `dtype` None: no argument is of the model's dtype."""

    name: str
    source: str
    dtype: str | None
    constants: dict[str, Constant]
    parameters: tuple[Parameter, ...]
    num_warps: int
    num_stages: int

    @property
    def module(self) -> str:
        """Where the function is, below server.kernels."""
        return self.source.partition(":")[0]

    @property
    def function(self) -> str:
        """The kernel's name in the source, and of what is compiled from it."""
        return self.source.partition(":")[2]


def all_specs() -> tuple[KernelSpec, ...]:
    """The specs of every source file, in the order of file names. Raises StartupError if two have the same name."""
    specs = tuple(spec for specs in _specs_by_module().values() for spec in specs)
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise StartupError(f"kernels with the same name: {', '.join(twice)}")
    return specs


def expand(spec: KernelSpec) -> tuple[Recipe, ...]:
    """One recipe per dtype and variant, the preferred variant first."""
    uses_dtype = any(type_.endswith("T") for type_ in spec.parameters.values())
    dtypes: tuple[str | None, ...] = spec.dtypes if uses_dtype else (None,)
    return tuple(_recipe(spec, dtype, variant) for dtype in dtypes for variant in spec.variants)


def variant_recipe(name: str, dtype: str, variant: Variant) -> Recipe:
    """A variant that the kernel's spec need not list. Raises StartupError if there is no such kernel."""
    spec = next((spec for spec in all_specs() if spec.name == name and dtype in spec.dtypes), None)
    if spec is None:
        raise StartupError(f"no kernel is named {name} and takes {dtype}")
    return _recipe(spec, dtype, variant)


def _recipe(spec: KernelSpec, dtype: str | None, variant: Variant) -> Recipe:
    return Recipe(
        spec.name,
        f"{_module_of(spec)}:{spec.function}",
        dtype,
        dict(variant.constants),
        _parameters(spec, dtype),
        variant.num_warps,
        variant.num_stages,
    )


def _parameters(spec: KernelSpec, dtype: str | None) -> tuple[Parameter, ...]:
    unknown = spec.aligned.keys() - spec.parameters.keys()
    if unknown:
        raise StartupError(f"kernel {spec.name}: alignment of {', '.join(sorted(unknown))}, which it does not take")
    return tuple(
        Parameter(
            name,
            type_.replace("T", TRITON_DTYPES[dtype]) if dtype else type_,
            spec.aligned.get(name, POINTER_ALIGNMENT if type_.startswith("*") else 1),
        )
        for name, type_ in spec.parameters.items()
    )


@cache
def _specs_by_module() -> dict[str, tuple[KernelSpec, ...]]:
    return {
        path.stem: getattr(importlib.import_module(f"server.kernels.{path.stem}"), "SPECS", ())
        for path in kernel_files()
    }


def _module_of(spec: KernelSpec) -> str:
    return next(module for module, specs in _specs_by_module().items() if spec in specs)
