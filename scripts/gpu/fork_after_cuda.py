"""Reproduce why a CUDA warm-up before fork is of no use: needs a GPU and torch. Prints what parent and child get."""

import ctypes
import os
import sys
from collections.abc import Callable


def in_child(action: Callable[[], str]) -> str:
    """Run `action` in a forked child and return its one line, or the exception's."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        try:
            line = action()
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        os.write(write_fd, line.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = pipe.read()
    os.wait()
    return line


def with_torch() -> None:
    """The article's warm-up: a tensor on the GPU in the parent, then one in the child."""
    import torch

    def use() -> str:
        return f"works: {torch.ones(2, device='cuda').sum().item()}"

    print(f"torch   parent  {use()}")
    print(f"torch   child   {in_child(use)}")


def with_driver() -> None:
    """The same with the raw driver API: primary context in the parent, a memory query in the child."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()

    def use() -> str:
        code = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return "works: cuMemGetInfo 0" if code == 0 else f"cuMemGetInfo returns error {code}"

    def make_context() -> int:
        return (
            cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or cuda.cuCtxSetCurrent(context)
        )

    def start_again() -> str:
        return f"cuInit + context again returns error {make_context()}"

    if code := make_context():
        sys.exit(f"no CUDA here: error {code}")
    print(f"driver  parent  {use()}")
    print(f"driver  child   {in_child(use)}")
    print(f"driver  child   {in_child(start_again)}")


if __name__ == "__main__":
    if in_child(lambda: "ok") != "ok":
        sys.exit("fork does not work here")
    if os.fork() == 0:  # each part in a process of its own: what one initialises, the other must not see
        with_driver()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    with_torch()
