"""Whole steps of the cuda backend in host memory: no farther from fp32 than the torch backend, whatever is batched."""

from random import Random

import pytest

from server.engine.messages import SamplingParams
from tests.ops.host_driver import HostDriver
from tests.ops.host_kernels import host_images
from tests.runner.cuda_steps import RecordingCudaOperations, TinyWeights, compare, run_requests, tiny_weights
from tests.runner.tiny_engine import batch_limits

VOCAB_SIZE = 96
LIMITS = batch_limits(max_batched_tokens=24, max_num_requests=4, num_blocks=33)
# Between them: bias of q, k, v and of the output, norms of q and k, a tied head, scaled rotations; groups of 1 .. 8.
MODELS = {
    "qwen2": tiny_weights("qwen2", num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=VOCAB_SIZE),
    "qwen2.5-tied": tiny_weights("qwen2.5-tied", num_heads=3, num_kv_heads=3, head_dim=64, vocab_size=VOCAB_SIZE),
    "qwen3": tiny_weights("qwen3", num_heads=6, num_kv_heads=2, head_dim=128, vocab_size=VOCAB_SIZE),
    "llama3": tiny_weights("llama3", num_heads=8, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE),
    "llama3, biases": tiny_weights(
        "llama3", num_heads=7, num_kv_heads=1, head_dim=64, vocab_size=VOCAB_SIZE, attention_bias=True
    ),
}
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True)
DRAWN = SamplingParams(
    max_tokens=5,
    ignore_eos=True,
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    min_tokens=3,
    stop_token_ids=(5, 6),
    seed=7,
    logprobs=True,
)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


def build(model: TinyWeights) -> RecordingCudaOperations:
    return RecordingCudaOperations(model, LIMITS, HostDriver(), host_images())


@pytest.mark.parametrize("name", MODELS)
def test_ragged_batches_of_chunks_and_decodes(name: str) -> None:
    model = MODELS[name]
    ops = build(model)
    first = [(prompt_of(1), GREEDY), (prompt_of(9, 1), DRAWN), (prompt_of(37, 2), GREEDY)]
    then = [([*prompt_of(37, 2), 1], GREEDY), (prompt_of(20, 3), DRAWN)]
    run = run_requests(model, ops, [first, then], num_in_flight=2)
    assert any(plan.chunks[0].num_tokens == 1 and plan.chunks[-1].num_tokens > 1 for plan in run.plans)
    assert any(chunk.input_on_device for plan in run.plans for chunk in plan.chunks)
    assert any(chunk.start >= 24 and chunk.num_tokens > 1 for plan in run.plans for chunk in plan.chunks)
    assert ops.driver.calls["launch_graph_async"] > 0
    compare(model, LIMITS, run).assert_good()
