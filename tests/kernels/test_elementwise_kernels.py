"""Each elementwise kernel, run by the interpreter on poisoned memory, against the torch backend's operation in fp32."""

import pytest
import torch
from torch import Tensor

from server.ops.cuda.buffer import Buffer
from server.ops.cuda.kernels import Kernel, Kernels
from tests.kernels.torch_reference import EPS, assert_rounded_once, reference
from tests.ops.host_driver import HostDriver, allocate_buffer, as_tensor, to_device
from tests.ops.host_kernels import host_images

DTYPES = (torch.bfloat16, torch.float16)
NUM_TOKENS = 3


class Bench:
    """Kernels of one dtype on a host driver. Outputs are poisoned and have a guard row before and behind."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._driver = HostDriver()
        self._kernels = Kernels(self._driver, self._driver.create_stream(), host_images())
        self._guards: list[tuple[Tensor, Tensor]] = []

    def kernel(self, name: str) -> Kernel:
        return self._kernels.get(name, str(self.dtype).removeprefix("torch."))

    def device(self, tensor: Tensor) -> Buffer:
        return to_device(self._driver, tensor)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(self.dtype)

    def out(self, rows: int, width: int, dtype: torch.dtype | None = None) -> Buffer:
        name = str(dtype or self.dtype).removeprefix("torch.")
        whole = allocate_buffer(self._driver, (rows + 2, width), name)
        bits = as_tensor(whole).view(torch.uint8)
        bits.fill_(0xFF)  # NaN in every dtype
        self._guards.append((bits[0], bits[-1]))
        return whole.rows(1, rows + 1)

    def result(self, buffer: Buffer) -> Tensor:
        """Written in full, and nothing beside it."""
        for guards in self._guards:
            assert all(bool((guard == 0xFF).all()) for guard in guards), "a row beside the output was written"
        return as_tensor(buffer)


@pytest.fixture(params=DTYPES, ids=str)
def bench(request: pytest.FixtureRequest) -> Bench:
    torch.manual_seed(0)
    return Bench(request.param)


@pytest.mark.parametrize("hidden", [8, 1016, 1032, 2056])
def test_embed_takes_ids_from_the_host_and_from_slots(bench: Bench, hidden: int) -> None:
    table = bench.random(32, hidden)
    token_ids = torch.tensor([5, -7, 31, 0], dtype=torch.int32)  # not read where the slot holds the id
    slots = torch.tensor([-1, 2, -1, 0], dtype=torch.int32)
    last_tokens = torch.tensor([9, -7, 30], dtype=torch.int32)
    out = bench.out(4, hidden, torch.float32)
    inputs = [bench.device(array) for array in (token_ids, slots, last_tokens, table)]
    bench.kernel("embed")((4, 1, 1), *inputs, out, hidden)
    assert torch.equal(bench.result(out), table[[5, 30, 31, 9]].float())


@pytest.mark.parametrize("hidden", [8, 120, 4096, 4104, 8200])
def test_rms_norm_is_that_of_torch_rounded_once(bench: Bench, hidden: int) -> None:
    x, weight = torch.randn(NUM_TOKENS, hidden) * torch.tensor([[1.0], [1e-3], [300.0]]), bench.random(hidden)
    exact, out = torch.empty_like(x), bench.out(NUM_TOKENS, hidden)
    reference(hidden_size=hidden).rms_norm(x, weight.float(), exact)
    bench.kernel("rms_norm")((NUM_TOKENS, 1, 1), bench.device(x), bench.device(weight), out, hidden, EPS)
    assert_rounded_once(bench.result(out), exact)


@pytest.mark.parametrize("hidden", [8, 120, 4096, 4104, 8200])
def test_add_rms_norm_adds_in_fp32_and_norms_the_sum(bench: Bench, hidden: int) -> None:
    residual, delta, weight = torch.randn(NUM_TOKENS, hidden), bench.random(NUM_TOKENS, hidden), bench.random(hidden)
    summed, out = bench.out(NUM_TOKENS, hidden, torch.float32), bench.out(NUM_TOKENS, hidden)
    as_tensor(summed).copy_(residual)
    exact = torch.empty_like(residual)
    reference(hidden_size=hidden).add_rms_norm(residual, delta.float(), weight.float(), exact)
    inputs = bench.device(delta), bench.device(weight)
    bench.kernel("add_rms_norm")((NUM_TOKENS, 1, 1), summed, *inputs, out, hidden, EPS)
    assert torch.equal(bench.result(summed), residual)
    assert_rounded_once(bench.result(out), exact)


@pytest.mark.parametrize("num_programs", [1, 2, 7])
@pytest.mark.parametrize(("intermediate", "num_blocks"), [(8, 1), (24, 3), (2064, 2), (3080, 1)])
def test_gate_is_right_however_its_tiles_are_shared(
    bench: Bench, intermediate: int, num_blocks: int, num_programs: int
) -> None:
    gate_up = bench.random(NUM_TOKENS, 2 * intermediate, scale=4.0)
    gate_up[0, :8] = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 100.0, 1e3])
    out = bench.out(NUM_TOKENS, intermediate)
    exact = torch.empty(NUM_TOKENS, intermediate)
    reference(intermediate_size=intermediate, num_kv_heads=num_blocks).gate(gate_up.float(), exact)
    grid = (NUM_TOKENS, num_programs, 1)
    bench.kernel("gate")(grid, bench.device(gate_up), out, intermediate, intermediate // num_blocks)
    assert_rounded_once(bench.result(out), exact)


@pytest.mark.parametrize("width", [8, 1024, 1032])
def test_gather_rows_copies_the_named_rows(bench: Bench, width: int) -> None:
    x, rows = bench.random(6, width), torch.tensor([5, 0, 3, 3], dtype=torch.int32)
    x[1], x[2] = float("nan"), float("inf")
    out = bench.out(4, width)
    bench.kernel("gather_rows")((4, 1, 1), bench.device(x), bench.device(rows), out, width)
    assert torch.equal(bench.result(out), x[rows.long()])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_rows_that_are_not_finite_leave_their_neighbours_alone(bench: Bench, name: str) -> None:
    hidden = 120
    x, weight = torch.randn(3, hidden), bench.random(hidden)
    x[1] = float("nan")
    exact, out = torch.empty_like(x), bench.out(3, hidden)
    reference(hidden_size=hidden).rms_norm(x, weight.float(), exact)
    deltas = (bench.device(torch.zeros(3, hidden, dtype=bench.dtype)),) if name == "add_rms_norm" else ()
    bench.kernel(name)((3, 1, 1), bench.device(x), *deltas, bench.device(weight), out, hidden, EPS)
    found = bench.result(out)
    assert found[1].isnan().all()
    assert_rounded_once(found[[0, 2]], exact[[0, 2]])
