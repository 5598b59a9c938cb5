"""Triton's interpreter on raw addresses: no copies of arguments, every access checked, bf16 as exact as on a GPU.

The interpreter redefines triton.language around each launch and each call of a helper, which takes longer than the
kernel; here it is done once per process. Nothing can be compiled by Triton in that process afterwards.
"""

import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from server.kernels.spec import EARLY
from server.ops.cuda.arguments import PackedArguments
from server.ops.cuda.driver import KernelImage
from tests.ops.host_memory import BadAccess, HostMemory

program_order: Callable[[Iterable[tuple[int, ...]]], Iterable[tuple[int, ...]]] = iter  # tests may set another
_lock = threading.Lock()  # the interpreter has one grid index per process
_memory: HostMemory | None = None  # of the launch that runs


class HostFunction:
    """A kernel's interpreted source, bound to the constants of one image."""

    def __init__(self, image: KernelImage, function: Any) -> None:
        if not isinstance(function, interpreter.InterpretedFunction):
            raise TypeError(f"{image.source} was imported without TRITON_INTERPRET=1 in the environment")
        names = [parameter.name for parameter in image.parameters]
        constants = [name for name in function.arg_names if name in image.constants]
        expected = [name for name in function.arg_names if name not in image.constants and name != EARLY]
        if names != expected or len(constants) != len(image.constants):
            raise TypeError(f"{image.source} takes {function.arg_names}, not {names} and {list(image.constants)}")
        self.image = image
        self._function = function
        self._packed = PackedArguments(image.parameters)
        self._types = [tl.str_to_ty(parameter.type, None) for parameter in image.parameters]
        self._slots = list(zip(names, self._types, self._packed.offsets, strict=False))

    def pack(self, values: tuple[int | float, ...]) -> bytearray:
        """The bytes that the kernel would get. Raises struct.error as a launch on the GPU does."""
        self._packed.write(values)
        return bytearray(self._packed.raw)

    def run(self, grid: tuple[int, int, int], packed: bytearray, memory: HostMemory) -> None:
        """Run every program of the grid, one after the other. Raises BadAccess."""
        arguments: dict[str, Any] = dict(self.image.constants)
        for name, kind, offset in self._slots:
            value = np.frombuffer(packed, interpreter._get_np_dtype(kind), count=1, offset=offset)
            arguments[name] = tl.tensor(interpreter.TensorHandle(value, kind), kind)
        with _lock, _running(memory):
            program = self._function.rewrite()
            interpreter._patch_lang(self._function.fn)
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(*grid)
            for index in program_order(itertools.product(*map(range, grid))):
                builder.grid_idx = index
                program(**arguments)


@contextmanager
def _running(memory: HostMemory) -> Iterator[None]:
    global _memory
    _memory = memory
    try:
        # A device computes with NaN and infinity in silence.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    except InterpreterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, BadAccess):
            cause = cause.__cause__
        raise cause or error from error
    finally:
        _memory = None


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even, as the device rounds."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


class _PatchedBuilder(interpreter.InterpreterBuilder):
    """What is done differently; its methods replace the originals'."""

    def create_masked_load(self, ptrs, mask, other, *_hints, **_named_hints):
        _check(ptrs, mask, write=False)
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        # What is masked off and has no `other` is undefined on the device: poison here.
        filling = _undefined(ptrs.data.shape, dtype) if other is None else other.data
        return interpreter.TensorHandle(interpreter._interpreter.load(ptrs.data, mask.data, filling, dtype), kind)

    def create_masked_store(self, ptrs, value, mask, *_hints):
        _check(ptrs, mask, write=True)
        return interpreter._interpreter.store(ptrs.data, value.data, mask.data)

    def create_atomic_rmw(self, rmw_op, ptr, val, mask, sem, scope):
        _check(ptr, mask, write=True)
        return _original_atomic_rmw(self, rmw_op, ptr, val, mask, sem, scope)

    def cast_impl(self, src, dst_type):
        source, dest = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, dest) or source == dest:
            return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), dest)
        values = bf16_to_fp32(src.data) if source == tl.bfloat16 else src.data.astype(np.float32)
        data = fp32_to_bf16(values) if dest == tl.bfloat16 else values.astype(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, dest)

    def create_dot(self, a, b, d, *_precision):
        left, right = (
            bf16_to_fp32(operand.data) if operand.dtype.scalar == tl.bfloat16 else operand.data.astype(d.data.dtype)
            for operand in (a, b)
        )
        return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)

    def binary_op(self, lhs, rhs, op):
        _refuse_bf16(lhs)
        return _original_binary_op(self, lhs, rhs, op)

    def unary_op(self, arg, op):
        _refuse_bf16(arg)
        return _original_unary_op(self, arg, op)


_original_binary_op = interpreter.InterpreterBuilder.binary_op
_original_unary_op = interpreter.InterpreterBuilder.unary_op
_original_atomic_rmw = interpreter.InterpreterBuilder.create_atomic_rmw
_original_patch_lang = interpreter._patch_lang
_patched: set[frozenset[int]] = set()


def _refuse_bf16(operand: Any) -> None:
    # The interpreter would compute with the bits.
    if operand.dtype.scalar == tl.bfloat16:
        raise TypeError("arithmetic on bfloat16: convert to float32 first, as the device does")


def _check(ptrs: Any, mask: Any, *, write: bool) -> None:
    if _memory is None:
        return
    data, active = ptrs.data, mask.data
    addresses = data if active.all() else data[np.broadcast_to(active, data.shape)]
    _memory.check_many(addresses, max(1, ptrs.get_element_ty().primitive_bitwidth // 8), write=write)


def _undefined(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).max, dtype)


class _NothingToRestore:
    def restore(self) -> None: ...


def _patch_lang_once(function: Any) -> _NothingToRestore:
    modules = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if modules not in _patched:
        _original_patch_lang(function)
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())  # NumPy 2.4 refuses int() of one-element arrays
        _patched.add(modules)
    return _NothingToRestore()


# Triton makes types and shapes anew for each result, which takes longer than the arithmetic of small tensors.


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.tuple, tl.constexpr, str]:
    """Of a block type, of a tensor, number of elements, and the first as text."""
    plain = tl.tuple(list(sizes))
    constant = tl.tuple([tl.constexpr(size) for size in sizes])
    return plain, constant, tl.constexpr(math.prod(sizes)), str(plain)


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple(getattr(size, "value", size) for size in shape)
    self.element_ty = element_ty
    self.shape, _, numel, text = _shape(sizes)
    self.numel = numel.value
    self.name = f"<{text}, {element_ty}>"


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    _, self.shape, self.numel, _ = _shape(tuple(type.shape.values) if type.is_block() else ())


_block_types: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


def _block_type(element_ty: tl.dtype, sizes: tuple[int, ...]) -> tl.block_type:
    key = (element_ty.name, sizes)
    found = _block_types.get(key)
    if found is None:
        found = _block_types[key] = tl.block_type(element_ty, list(sizes))
    return found


def _spread(operand: tl.tensor, sizes: tuple[int, ...]) -> tl.tensor:
    handle, element_ty = operand.handle, operand.type.scalar
    data = np.broadcast_to(handle.data, sizes)
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), _block_type(element_ty, sizes))


def _broadcast_impl_value(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both operands in their common shape, by NumPy's rules, which are Triton's."""
    left, right = (tuple(operand.type.shape.values) if operand.type.is_block() else () for operand in (lhs, rhs))
    if left == right:
        return lhs, rhs
    sizes = np.broadcast_shapes(left, right) if left and right else left or right
    return (
        lhs if left == sizes else _spread(lhs, sizes),
        rhs if right == sizes else _spread(rhs, sizes),
    )


_original_cast = TritonSemantic.cast


def _cast(self: TritonSemantic, operand: tl.tensor, dst_ty: Any, *rounding: Any) -> tl.tensor:
    if getattr(dst_ty, "scalar", None) is operand.type.scalar:
        return operand
    return _original_cast(self, operand, dst_ty, *rounding)


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    function = getattr(member, "__wrapped__", member)  # without the check that _semantic is given

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


_original_np_dtype = interpreter._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def _get_np_dtype(kind: tl.dtype) -> np.dtype:
    scalar = kind.scalar
    if isinstance(scalar, tl.pointer_type):
        return np.dtype(np.uint64)
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = _original_np_dtype(scalar)
    return found


def _install() -> None:
    for name, member in vars(_PatchedBuilder).items():
        if callable(member):
            setattr(interpreter.InterpreterBuilder, name, member)
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._patch_attr = _patch_attr
    TritonSemantic.broadcast_impl_value = _broadcast_impl_value
    TritonSemantic.cast = _cast
    tl.core.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    # Compiled kernels do not look for overflow either; it makes each integer operation four.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


_install()
