"""Whole steps by a table of GEMMs, in host memory: every kind of way at once is as accurate as the torch backend."""

from functools import partial

from server.engine.messages import SamplingParams
from server.ops.cuda.driver import GemmAlgorithm
from server.ops.cuda.kernels import Kernels
from tests.ops.gemm_images import tile_image
from tests.ops.host_driver import GEMM_VERSION, HostDriver
from tests.ops.host_kernels import host_images
from tests.runner.cuda_steps import RecordingCudaOperations, compare, run_requests, tiny_weights
from tests.runner.tiny_engine import batch_limits
from tests.runner.tuned_tables import built_image, table_of_all_ways

LIMITS = batch_limits(max_batched_tokens=8, max_num_requests=4, num_blocks=9)
MODEL = tiny_weights("qwen2", num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64, vocab_size=64)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=True)
ALGORITHM = GemmAlgorithm(bytes([5]) * 64, 0)


def test_steps_of_every_size_are_as_accurate_as_the_torch_backend() -> None:
    table = table_of_all_ways(
        MODEL.facts,
        GEMM_VERSION,
        lambda name, has_bias: tile_image(name, MODEL.facts.dtype, 4, 64, has_bias=has_bias),
        lambda case, m: ALGORITHM,
    )
    ops = RecordingCudaOperations(MODEL, LIMITS, HostDriver(), host_images(), table)
    requests = [([1, 2, 3, 4, 5], GREEDY), ([9], GREEDY), ([7, 8], GREEDY)]
    run = run_requests(MODEL, ops, [requests[:1], requests[1:]], num_in_flight=2)
    assert ALGORITHM in ops.driver.algorithms
    assert None in ops.driver.algorithms
    assert ops.driver.calls["launch_graph_async"] > 0, "ways are recorded as well"
    compare(MODEL, LIMITS, run).assert_good()


def test_every_way_has_a_kernel_in_every_build() -> None:
    """On which the same test on a GPU relies."""
    driver = HostDriver()
    kernels = Kernels(driver, driver.create_stream(), host_images())
    image = partial(built_image, kernels, MODEL.facts.dtype)
    assert table_of_all_ways(MODEL.facts, GEMM_VERSION, image, lambda case, m: ALGORITHM).ranges
