"""Whole steps by a table of GEMMs, in host memory: every kind of way at once is as accurate as the torch backend."""

from collections.abc import Mapping

from server.engine.messages import SamplingParams
from server.kernels.tuning.cases import cases_of
from server.ops.cuda.driver import GemmAlgorithm
from server.ops.cuda.tiles import GemmChoice, GemmOperation, GemmRanges, GemmShape, GemmTable, Tile
from tests.ops.contract_kernels import adding_images, tile_image
from tests.ops.host_driver import GEMM_VERSION, HostDriver
from tests.ops.host_kernels import host_images
from tests.runner.cuda_steps import RecordingCudaOperations, TinyWeights, compare, run_requests, tiny_weights
from tests.runner.tiny_engine import batch_limits

LIMITS = batch_limits(max_batched_tokens=8, max_num_requests=4, num_blocks=9)
MODEL = tiny_weights("qwen2", num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64, vocab_size=64)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=True)
ALGORITHM = GemmAlgorithm(bytes([5]) * 64, 0)

# For steps of one token, and of two to four; larger ones are cuBLAS's.
KERNELS: Mapping[GemmOperation, str] = {
    "linear": "linear_split",
    "gated_linear": "gated_linear",
    "linear_add_norm": "linear_split",
    "logits": "linear_fp32",
}


def table_of(model: TinyWeights) -> GemmTable:
    dtype = model.facts.dtype

    def ranges(shape: GemmShape) -> GemmRanges:
        name = KERNELS[shape.operation]
        first: GemmChoice = Tile(tile_image(name, dtype, 4, 256), 2 if "split" in name else 1)
        plain: GemmChoice = Tile(tile_image("linear", dtype, 4, 256, has_bias=shape.has_bias))
        return GemmRanges((1, 2, 4), (first, ALGORITHM if shape.operation == "logits" else plain, ALGORITHM))

    return GemmTable(GEMM_VERSION, {case.shape: ranges(case.shape) for case in cases_of(model.facts)})


def build(model: TinyWeights) -> RecordingCudaOperations:
    images = [*adding_images(model.facts.dtype), *host_images()]
    return RecordingCudaOperations(model, LIMITS, HostDriver(), images, table_of(model))


def test_steps_of_every_size_are_as_accurate_as_the_torch_backend() -> None:
    ops = build(MODEL)
    requests = [([1, 2, 3, 4, 5], GREEDY), ([9], GREEDY), ([7, 8], GREEDY)]
    run = run_requests(MODEL, ops, [requests[:1], requests[1:]], num_in_flight=2)
    assert ALGORITHM in ops.driver.algorithms
    assert None in ops.driver.algorithms
    assert ops.driver.calls["launch_graph_async"] > 0, "ways are recorded as well"
    compare(MODEL, LIMITS, run).assert_good()
