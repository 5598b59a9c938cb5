"""Projections by a table: each way of each operation gives the same result, and the table decides which one runs."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from server.models.facts import ModelFacts
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DriverError, GemmAlgorithm
from server.ops.cuda.gemms import Projections
from server.ops.cuda.kernels import Kernels
from server.ops.cuda.operations import GATE_TILE
from server.ops.cuda.tiles import NO_TABLE, GemmChoice, GemmOperation, GemmRanges, GemmShape, GemmTable, Tile
from server.ops.interface import Linear
from tests.ops.gemm_images import tile_image
from tests.ops.host_driver import GEMM_VERSION, HostDriver, allocate_buffer, as_tensor, to_device
from tests.ops.host_kernels import host_images

WIDTH, K = 48, 24
FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    vocab_size=WIDTH,
    hidden_size=WIDTH,
    intermediate_size=WIDTH,  # in two blocks of gate and up, one per KV head
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    max_position=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=False,
    tied_head=True,
    dtype="float16",
)
ALGORITHM = GemmAlgorithm(bytes([7]) * 64, 0)
OTHER_ALGORITHM = GemmAlgorithm(bytes([9]) * 64, 0)


class Bench:
    """Projections of one table on a host driver, and operands of m rows."""

    def __init__(self, dtype: torch.dtype, *entries: tuple[GemmShape, GemmRanges], version: int = GEMM_VERSION) -> None:
        self.dtype, self.name = dtype, str(dtype).removeprefix("torch.")
        self.driver = HostDriver()
        self.driver.prepare_gemms()
        self.stream = self.driver.create_stream()
        facts = replace(FACTS, dtype=self.name)
        self.kernels = Kernels(self.driver, self.stream, host_images())
        self.projections = Projections(
            self.driver,
            self.stream,
            self.kernels,
            facts,
            allocate_buffer(self.driver, (1 << 20,), "uint8"),
            GemmTable(version, dict(entries)),
            add_rms_norm=self._add_rms_norm,
            gate=self._gate,
        )
        self._eps, self._blocks = facts.rms_eps, facts.num_mlp_blocks

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape).to(dtype or self.dtype)

    def device(self, tensor: Tensor) -> Buffer:
        return to_device(self.driver, tensor)

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        return self.device(torch.full(shape, float("nan"), dtype=dtype or self.dtype))

    def run(self, operation: GemmOperation, m: int, *, has_bias: bool = False) -> None:
        """Once, and compared with fp64."""
        columns = 2 * WIDTH if operation == "gated_linear" else WIDTH
        x, weight, bias = self.random(m, K), self.random(columns, K), self.random(columns)
        exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        layer = Linear(self.device(weight), self.device(bias) if has_bias else None)
        tolerance = 2**-6 if self.dtype == torch.bfloat16 else 2**-9
        out = self.out(m, WIDTH, dtype=torch.float32 if operation == "logits" else None)
        if operation == "linear":
            self.projections.linear(self.device(x), layer, out)
        elif operation == "logits":
            self.projections.logits(self.device(x), layer.weight, out)
            tolerance = 1e-5
        elif operation == "gated_linear":
            self.projections.gated_linear(self.device(x), layer, self.out(m, columns), out)
            gate, up = exact.view(m, self._blocks, 2, -1).unbind(2)
            exact = (gate * gate.sigmoid() * up).reshape(m, WIDTH)
            tolerance *= 8  # gate and up may be rounded
        else:
            residual, norm_weight = torch.randn(m, WIDTH), self.random(WIDTH)
            summed = self.device(residual)
            arguments = (self.out(m, WIDTH), summed, self.device(norm_weight), out)
            self.projections.linear_add_norm(self.device(x), layer, *arguments)
            total = residual.double() + exact
            torch.testing.assert_close(as_tensor(summed).double(), total, rtol=tolerance, atol=tolerance)
            exact = total / (total.square().mean(-1, keepdim=True) + self._eps).sqrt() * norm_weight.double()
        torch.testing.assert_close(as_tensor(out).double(), exact, rtol=tolerance, atol=tolerance)

    def _add_rms_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer) -> None:
        kernel = self.kernels.get("add_rms_norm", self.name)
        kernel((out.shape[0], 1, 1), residual, delta, weight, out, WIDTH, self._eps)

    def _gate(self, gate_up: Buffer, out: Buffer) -> None:
        kernel = self.kernels.get("gate", self.name, BLOCK=GATE_TILE)
        kernel((out.shape[0], self._blocks, 1), gate_up, out, WIDTH, WIDTH // self._blocks)


def entry(
    operation: GemmOperation, dtype: str, *choices: GemmChoice, has_bias: bool = False
) -> tuple[GemmShape, GemmRanges]:
    """Ranges that end at 1, 3, 5 .. rows."""
    columns = 2 * WIDTH if operation == "gated_linear" else WIDTH
    max_rows = tuple(1 + 2 * index for index in range(len(choices)))
    return GemmShape(operation, dtype, columns, K, has_bias), GemmRanges(max_rows, choices)


WAYS: list[tuple[GemmOperation, str, int, bool]] = [
    ("linear", "linear", 1, False),
    ("linear", "linear", 1, True),
    ("linear", "linear_split", 3, False),
    ("linear", "linear_split", 3, True),
    ("gated_linear", "linear", 1, False),
    ("gated_linear", "linear", 1, True),
    ("gated_linear", "linear_split", 2, False),
    ("gated_linear", "gated_linear", 1, False),
    ("linear_add_norm", "linear", 1, False),
    ("linear_add_norm", "linear", 1, True),
    ("linear_add_norm", "linear_split", 4, False),
    ("logits", "linear_fp32", 1, False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("operation", "kernel", "num_splits", "has_bias"), WAYS)
def test_each_way_gives_the_operation(
    dtype: torch.dtype, operation: GemmOperation, kernel: str, num_splits: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    tile = Tile(tile_image(kernel, name, has_bias=has_bias), num_splits)
    bench = Bench(dtype, entry(operation, name, tile, tile, has_bias=has_bias))
    for m in (1, 3):
        bench.run(operation, m, has_bias=has_bias)
    assert bench.driver.calls["gemm_async"] == 0


@pytest.mark.parametrize("operation", ["linear", "gated_linear", "linear_add_norm", "logits"])
def test_without_a_table_the_library_chooses(operation: GemmOperation) -> None:
    bench = Bench(torch.float16)
    for m in (1, 2, 7):
        bench.run(operation, m)
    assert bench.driver.algorithms == [None] * 3
    assert bench.driver.calls["gemm_version"] == 0
    assert NO_TABLE.ranges == {}


@pytest.mark.parametrize("operation", ["linear", "gated_linear", "linear_add_norm", "logits"])
def test_the_number_of_rows_decides(operation: GemmOperation) -> None:
    bench = Bench(torch.float16, entry(operation, "float16", ALGORITHM, None, OTHER_ALGORITHM))
    for m in (1, 2, 3, 4, 5, 6, 20):
        bench.run(operation, m)
    assert bench.driver.algorithms == [ALGORITHM, None, None, OTHER_ALGORITHM, OTHER_ALGORITHM, None, None]


def test_a_bias_and_another_dtype_are_other_entries() -> None:
    bench = Bench(
        torch.float16,
        entry("linear", "float16", ALGORITHM, has_bias=True),
        entry("linear", "bfloat16", OTHER_ALGORITHM),
        entry("logits", "float16", OTHER_ALGORITHM),
    )
    bench.run("linear", 1)
    bench.run("linear", 1, has_bias=True)
    assert bench.driver.algorithms == [None, ALGORITHM]


def test_a_kernel_is_loaded_when_it_is_needed_first() -> None:
    tiles = [Tile(tile_image("linear", "float16", block_m)) for block_m in (1, 2)]
    bench = Bench(torch.float16, entry("linear", "float16", *tiles))
    assert bench.driver.calls["load"] == 0
    for m, num_loaded in ((2, 1), (3, 1), (1, 2), (2, 2)):
        bench.run("linear", m)
        assert bench.driver.calls["load"] == num_loaded


def test_a_kernel_that_has_not_run_cannot_be_recorded() -> None:
    bench = Bench(torch.float16, entry("linear", "float16", Tile(tile_image("linear", "float16"))))
    layer = Linear(bench.device(bench.random(WIDTH, K)), None)
    x, out = bench.device(bench.random(1, K)), bench.out(1, WIDTH)
    bench.driver.begin_capture(bench.stream)
    with pytest.raises(DriverError, match="load while this thread captures"):
        bench.projections.linear(x, layer, out)
    bench.driver.abandon_capture(bench.stream)
    bench.projections.linear(x, layer, out)
    bench.driver.begin_capture(bench.stream)
    bench.projections.linear(x, layer, out)
    bench.driver.end_capture(bench.stream)


def test_algorithms_of_another_version_are_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tile = Tile(tile_image("linear", "float16"))
    entries = (entry("linear", "float16", ALGORITHM, tile), entry("logits", "float16", ALGORITHM))
    bench = Bench(torch.float16, *entries, version=GEMM_VERSION - 1)
    bench.run("linear", 1)
    bench.run("logits", 1)
    assert bench.driver.algorithms == [None, None]
    bench.run("linear", 2)
    assert bench.driver.calls["gemm_async"] == 2, "what is no algorithm stays"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"2 tuned algorithms are of cuBLAS {GEMM_VERSION - 1}, and this is {GEMM_VERSION}" in caplog.text


def test_a_table_of_kernels_alone_asks_for_no_version() -> None:
    bench = Bench(torch.float16, entry("linear", "float16", Tile(tile_image("linear", "float16"))), version=0)
    bench.run("linear", 1)
    assert bench.driver.calls["gemm_version"] == 0


def test_partial_sums_that_do_not_fit_the_workspace_are_refused() -> None:
    tile = Tile(tile_image("linear_split", "float16"), 2000)
    bench = Bench(torch.float16, (GemmShape("linear", "float16", WIDTH, K, False), GemmRanges((8,), (tile,))))
    with pytest.raises(AssertionError, match="exceed the workspace"):
        bench.run("linear", 8)


def test_ranges_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(AssertionError):
        GemmRanges((4, 4), (None, None))
    with pytest.raises(AssertionError):
        GemmRanges((1, 4), (None,))
