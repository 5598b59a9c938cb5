"""Whole steps by a table of GEMMs on a GPU, in which every kind of way occurs: as accurate as the torch backend."""

from functools import partial
from random import Random

import pytest

from server.engine.messages import SamplingParams
from server.kernels.manifest import built_folder, read_manifest
from server.kernels.tuning.cases import GemmCase
from server.ops.cuda.driver import GemmAlgorithm, GemmProblem
from server.ops.cuda.kernels import Kernels
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.cuda.sizes import GEMM_WORKSPACE
from tests.runner.cuda_steps import RecordingCudaOperations, compare, run_requests, tiny_weights
from tests.runner.tiny_engine import batch_limits
from tests.runner.tuned_tables import built_image, table_of_all_ways
from tests.tiny_models import Family

LIMITS = batch_limits(max_batched_tokens=64, max_num_requests=8, num_blocks=129)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_steps_of_every_size_are_as_accurate_as_the_torch_backend(device: str, dtype: str, family: Family) -> None:
    driver = NvidiaDriver.open()
    driver.prepare_gemms()
    manifest = read_manifest(built_folder())
    if manifest is None:
        pytest.skip(f"{built_folder()} is missing: run scripts/build-kernels")
    images = manifest.images(driver.facts.arch)
    kernels = Kernels(driver, driver.create_stream(), images)
    model = tiny_weights(family, dtype=dtype, num_heads=8, num_kv_heads=2, head_dim=64, num_layers=2, vocab_size=320)

    def algorithm(case: GemmCase, m: int) -> GemmAlgorithm:
        shape, room = case.shape, GEMM_WORKSPACE.num_bytes
        out_dtype = "float32" if shape.operation == "logits" else shape.dtype
        problem = GemmProblem(m, shape.n, shape.k, shape.dtype, out_dtype, shape.has_bias, room)
        return driver.search_gemms(problem, 64)[-1]

    image = partial(built_image, kernels, model.facts.dtype)
    table = table_of_all_ways(model.facts, driver.gemm_version(), image, algorithm)
    ops = RecordingCudaOperations(model, LIMITS, driver, images, table)
    random = Random(0)
    requests = [([random.randrange(320) for _ in range(length)], GREEDY) for length in (5, 1, 2, 33, 4, 70, 3, 9)]
    run = run_requests(model, ops, [requests[:1], requests[1:2], requests[2:5], requests], num_in_flight=2)
    compare(model, LIMITS, run, "cuda").assert_good()
