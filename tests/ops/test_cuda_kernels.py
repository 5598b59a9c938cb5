"""Choice of a kernel's variant, and what a launch refuses. The driver is a recorder: no kernel runs here."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Function, KernelImage, Parameter, Stream
from server.ops.cuda.kernels import Kernel, Kernels

STREAM = Stream(7)
PARAMETERS = (
    Parameter("x", "*bf16", 16),
    Parameter("rows", "*i32", 4),
    Parameter("hidden", "i32", 8),
    Parameter("eps", "fp32", 1),
)


class Recorder:
    """Keeps what is loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[KernelImage] = []
        self.launches: list[tuple[object, ...]] = []

    def load(self, image: KernelImage) -> Function:
        self.loaded.append(image)
        return self.loaded[-1]  # an image will do: nothing runs

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        self.launches.append((function, grid, list(values), stream))


def image(name: str, parameters: tuple[Parameter, ...], **constants: int | bool) -> KernelImage:
    return KernelImage(name, f"module:{name}", dict(constants), parameters, name, 4, 0, Path("none"))


def with_dtype(triton_dtype: str) -> tuple[Parameter, ...]:
    return (Parameter("x", f"*{triton_dtype}", 16),)


ALL_IMAGES = (
    image("attend", with_dtype("bf16"), HEAD_DIM=64, TILE=32),
    image("attend", with_dtype("bf16"), HEAD_DIM=64, TILE=64),
    image("attend", with_dtype("bf16"), HEAD_DIM=128, TILE=32),
    image("attend", with_dtype("fp16"), HEAD_DIM=64, TILE=32),
    image("mark", (Parameter("ids", "*i32", 4),)),
)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def kernel(recorder: Recorder) -> Kernel:
    return Kernels(recorder, STREAM, [image("norm", PARAMETERS)]).get("norm", "bfloat16")


X = Buffer(256, (2, 8), "bfloat16")
ROWS = Buffer(1028, (2,), "int32")


def test_the_first_variant_with_the_constants_is_loaded_once(recorder: Recorder) -> None:
    kernels = Kernels(recorder, STREAM, ALL_IMAGES)
    assert kernels.get("attend", "bfloat16", HEAD_DIM=64).image.constants == {"HEAD_DIM": 64, "TILE": 32}
    assert kernels.get("attend", "bfloat16", HEAD_DIM=64) is kernels.get("attend", "bfloat16", TILE=32)
    assert kernels.get("attend", "bfloat16", HEAD_DIM=64, TILE=64).image is ALL_IMAGES[1]
    assert kernels.get("attend", "float16", HEAD_DIM=64).image is ALL_IMAGES[3]
    assert kernels.get("mark").image is kernels.get("mark", "float16").image is ALL_IMAGES[4]
    assert len(recorder.loaded) == 4


@pytest.mark.parametrize(
    ("name", "dtype", "constants"),
    [
        ("attend", None, {"HEAD_DIM": 64}),
        ("attend", "float16", {"HEAD_DIM": 128}),
        ("attend", "bfloat16", {"HEAD_DIM": 96}),
        ("attend", "bfloat16", {"WIDTH": 64}),
    ],
)
def test_a_missing_variant_is_named_beside_those_there_are(
    recorder: Recorder, name: str, dtype: str | None, constants: dict[str, int]
) -> None:
    with pytest.raises(KeyError, match=rf"no kernel {name} for {dtype} .*float16 {{'HEAD_DIM': 64, 'TILE': 32}}"):
        Kernels(recorder, STREAM, ALL_IMAGES).get(name, dtype, **constants)
    assert recorder.loaded == []


def test_a_missing_kernel_is_named(recorder: Recorder) -> None:
    with pytest.raises(KeyError, match=r"no kernel gate .*none of that name"):
        Kernels(recorder, STREAM, ALL_IMAGES).get("gate")


def test_a_launch_passes_addresses_and_numbers_in_order(recorder: Recorder, kernel: Kernel) -> None:
    kernel((2, 1, 1), X, ROWS, 16, 1e-5)
    assert recorder.launches == [(kernel.image, (2, 1, 1), [256, 1028, 16, 1e-5], STREAM)]


def test_addresses_and_whole_numbers_do_for_pointers_and_floats(recorder: Recorder, kernel: Kernel) -> None:
    kernel((2, 1, 1), 512, 0, 16, 1)
    assert recorder.launches == [(kernel.image, (2, 1, 1), [512, 0, 16, 1], STREAM)]


@pytest.mark.parametrize("grid", [(0, 1, 1), (3, 0, 1)])
def test_a_grid_without_programs_launches_nothing(
    recorder: Recorder, kernel: Kernel, grid: tuple[int, int, int]
) -> None:
    kernel(grid, X, ROWS, 16, 1e-5)
    assert recorder.launches == []


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X, ROWS, 16), TypeError, r"norm takes 4 arguments \(x, rows, hidden, eps\), not 3"),
        ((X, ROWS, 16, 1e-5, 1), TypeError, "takes 4 arguments .* not 5"),
        ((Buffer(256, (2,), "float16"), ROWS, 16, 1e-5), TypeError, r"x is a Buffer of float16; \*bf16"),
        ((X, Buffer(256, (2,), "int64"), 16, 1e-5), TypeError, r"rows is a Buffer of int64; \*i32"),
        ((X, ROWS, X, 1e-5), TypeError, "hidden is a Buffer of bfloat16; i32"),
        ((X, ROWS, 16.0, 1e-5), TypeError, "hidden is 16.0; i32"),
        ((X, ROWS, 16, X), TypeError, "eps is a Buffer of bfloat16; fp32"),
        ((1.0, ROWS, 16, 1e-5), TypeError, r"x is 1.0; \*bf16"),
        ((X, ROWS, True, 1e-5), TypeError, "hidden is True; i32"),
        ((Buffer(264, (2,), "bfloat16"), ROWS, 16, 1e-5), ValueError, "x = 264 is no multiple of 16"),
        ((X, Buffer(1026, (2,), "int32"), 16, 1e-5), ValueError, "rows = 1026 is no multiple of 4"),
        ((X, ROWS, 12, 1e-5), ValueError, "hidden = 12 is no multiple of 8"),
        ((8, ROWS, 16, 1e-5), ValueError, "x = 8 is no multiple of 16"),
    ],
)
def test_arguments_that_the_code_does_not_take_are_refused(
    recorder: Recorder, kernel: Kernel, args: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kernel((2, 1, 1), *args)
    assert recorder.launches == []


def test_one_checked_argument_is_as_good_as_many(recorder: Recorder) -> None:
    kernel = Kernels(recorder, STREAM, [image("fill", (Parameter("n", "i32", 8), Parameter("v", "fp32", 1)))]).get(
        "fill"
    )
    kernel((1, 1, 1), 8, 0.5)
    with pytest.raises(ValueError, match="n = 9"):
        kernel((1, 1, 1), 9, 0.5)
    assert len(recorder.launches) == 1
