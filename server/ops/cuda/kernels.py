"""Kernels by name, loaded once, and launched with checked arguments. Knows no Triton and no particular kernel."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter, mod
from typing import Any

from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import Driver, Function, KernelImage, Parameter, Stream

Grid = tuple[int, int, int]
Argument = Buffer | int | float

# Signedness is the kernel's own matter.
_POINTED: dict[str, BufferDType] = {
    "*bf16": "bfloat16",
    "*fp16": "float16",
    "*fp32": "float32",
    "*i32": "int32",
    "*u32": "int32",
    "*i64": "int64",
    "*u64": "int64",
    "*i8": "uint8",
    "*u8": "uint8",
}
_MODEL_DTYPES: dict[str, BufferDType] = {"*bf16": "bfloat16", "*fp16": "float16"}


class Kernels:
    """Those of one device. All launches go to one stream."""

    def __init__(self, driver: Driver, stream: Stream, images: Iterable[KernelImage]) -> None:
        self._driver, self._stream = driver, stream
        self._images: dict[str, list[KernelImage]] = {}
        for image in images:
            self._images.setdefault(image.name, []).append(image)
        self._loaded: dict[int, Kernel] = {}

    def get(self, name: str, dtype: BufferDType | None = None, **constants: int | float | bool | str) -> "Kernel":
        """The first variant of a kernel that has these constants, loaded. `dtype`: the model's, if it takes any.

        Raises KeyError, which says what there is instead.
        """
        candidates = self._images.get(name, [])
        for image in candidates:
            if _dtype_of(image) in (None, dtype) and constants.items() <= image.constants.items():
                return self.load(image)
        there = [f"{_dtype_of(image)} {image.constants}" for image in candidates]
        raise KeyError(f"no kernel {name} for {dtype} {constants}; there is {', '.join(there) or 'none of that name'}")

    def load(self, image: KernelImage) -> "Kernel":
        """This very image, loaded once."""
        if id(image) not in self._loaded:
            self._loaded[id(image)] = Kernel(self._driver, self._stream, image)
        return self._loaded[id(image)]


class Kernel:
    """A loaded kernel, bound to its stream."""

    __slots__ = ("_aligned", "_alignments", "_function", "_kinds", "_launch", "_stream", "image")

    def __init__(self, driver: Driver, stream: Stream, image: KernelImage) -> None:
        self.image = image
        self._function: Function = driver.load(image)
        self._launch = driver.launch_async
        self._stream = stream
        self._kinds: list[object] = [_kind(parameter) for parameter in image.parameters]
        checked = [index for index, parameter in enumerate(image.parameters) if parameter.alignment > 1]
        self._aligned = _getter(checked)
        self._alignments = [image.parameters[index].alignment for index in checked]

    def __call__(self, grid: Grid, *args: Argument) -> None:
        """Launch it, arguments in the order of its parameters; a grid without programs launches nothing.

        A pointer is given by a Buffer of its type, or as an address. Raises TypeError or ValueError, and launches
        nothing, if the compiled code does not take these arguments.
        """
        # A step has hundreds of launches: the usual case is a few comparisons in C, the rest is told apart below.
        values: list[int | float] = [arg.address if isinstance(arg, Buffer) else arg for arg in args]
        if [arg.dtype if isinstance(arg, Buffer) else type(arg) for arg in args] != self._kinds:
            self._check_kinds(args)
        if any(map(mod, self._aligned(values), self._alignments)):
            self._refuse_alignment(values)
        if 0 not in grid:
            self._launch(self._function, grid, values, self._stream)

    def _check_kinds(self, args: tuple[Argument, ...]) -> None:
        parameters = self.image.parameters
        if len(args) != len(parameters):
            names = ", ".join(parameter.name for parameter in parameters)
            raise TypeError(f"kernel {self.image.name} takes {len(parameters)} arguments ({names}), not {len(args)}")
        for parameter, kind, arg in zip(parameters, self._kinds, args, strict=True):
            found = arg.dtype if isinstance(arg, Buffer) else type(arg)
            is_address = parameter.type.startswith("*") and found is int
            if found != kind and not is_address and not (kind is float and found is int):
                described = f"a Buffer of {found}" if isinstance(arg, Buffer) else repr(arg)
                raise TypeError(
                    f"kernel {self.image.name}: {parameter.name} is {described}; {parameter.type} is what it takes"
                )

    def _refuse_alignment(self, values: Sequence[int | float]) -> None:
        for parameter, value in zip(self.image.parameters, values, strict=True):
            if value % parameter.alignment:
                raise ValueError(
                    f"kernel {self.image.name}: {parameter.name} = {value} is no multiple of {parameter.alignment}, "
                    "which its code assumes"
                )


def _kind(parameter: Parameter) -> object:
    if parameter.type.startswith("*"):
        return _POINTED[parameter.type]
    return float if parameter.type.startswith("fp") else int


def _dtype_of(image: KernelImage) -> BufferDType | None:
    """The model's dtype that an image was compiled for: the only half-precision type among its pointers."""
    return next((_MODEL_DTYPES[p.type] for p in image.parameters if p.type in _MODEL_DTYPES), None)


def _getter(indices: Sequence[int]) -> Callable[[list[int | float]], tuple[Any, ...]]:
    """Picks these values as a tuple; itemgetter alone gives no tuple for fewer than two."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)
