"""Greedy ids equal transformers' and logits agree, however requests are batched, chunked, preempted or cached."""

from random import Random

import pytest
import torch

from server.engine.messages import SamplingParams
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.runner.tiny_engine import GREEDY, TinyEngine, TinyModel, assert_as_reference, batch_limits


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_ragged_batch_of_prompts_and_decodes(model: TinyModel, num_in_flight: int) -> None:
    prompts = prompts_of([1, 2, 7, 8, 9, 40, 75])
    engine = TinyEngine(model, batch_limits(max_batched_tokens=32), num_in_flight=num_in_flight)
    for request_id, prompt in enumerate(prompts):
        engine.add(request_id, prompt)
    engine.run()
    assert any(plan.chunks[0].num_tokens == 1 and plan.chunks[-1].num_tokens > 1 for plan in engine.plans)
    assert (num_in_flight == 2) == any(chunk.input_on_device for plan in engine.plans for chunk in plan.chunks)
    for request_id, prompt in enumerate(prompts):
        assert len(engine.outputs[request_id]) == 64
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


def test_chunked_prefill_at_every_chunk_size(model: TinyModel) -> None:
    (prompt,) = prompts_of([27], seed=1)
    for chunk_size in range(1, len(prompt) + 1):
        engine = TinyEngine(model, batch_limits(max_batched_tokens=chunk_size, max_num_requests=1))
        engine.add(0, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        engine.run()
        assert engine.plans[0].num_tokens == chunk_size
        assert_as_reference(model, prompt, engine.outputs[0], engine.logits[0])


def test_preempted_requests_are_resumed_as_if_nothing_happened(model: TinyModel) -> None:
    prompts = prompts_of([30, 20, 25, 10], seed=2)
    engine = TinyEngine(model, batch_limits(num_blocks=1 + 20), prefix_cache=False, num_in_flight=2)
    for request_id, prompt in enumerate(prompts):
        engine.add(request_id, prompt)
    engine.run()
    assert engine.scheduler.num_preemptions > 2
    for request_id, prompt in enumerate(prompts):
        assert len(engine.outputs[request_id]) == 64
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


def test_prefix_hits_read_what_others_computed(model: TinyModel) -> None:
    shared, *tails = prompts_of([48, 1, 5, 16], seed=3)
    prompts = [shared + tail for tail in tails] + [shared]
    engine = TinyEngine(model, batch_limits())
    engine.add(0, prompts[0])
    engine.run()
    for request_id, prompt in enumerate(prompts[1:], start=1):
        engine.add(request_id, prompt)
    engine.run()
    assert engine.scheduler.prefix_hit_tokens >= 3 * 40
    for request_id, prompt in enumerate(prompts):
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


def test_chunk_longer_than_an_attention_tile(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ops.torch.attention.MAX_QUERY_ROWS", 16)
    monkeypatch.setattr("server.ops.torch.attention.MAX_GATHERED_TOKENS", 100)
    prompts = prompts_of([50, 33, 16, 5], seed=4)
    engine = TinyEngine(model, batch_limits())
    for request_id, prompt in enumerate(prompts):
        engine.add(request_id, prompt)
    engine.run()
    for request_id, prompt in enumerate(prompts):
        assert_as_reference(model, prompt, engine.outputs[request_id], engine.logits[request_id])


def test_blocks_may_lie_anywhere_and_the_last_token_of_a_prompt_may_come_alone(model: TinyModel) -> None:
    (prompt,) = prompts_of([17], seed=5)
    engine = TinyEngine(model, batch_limits())
    reset = SlotReset(5, 9, tuple(prompt), len(prompt), GREEDY)
    block_ids = (77, 3, 128)
    head = TokenChunk(5, 9, 0, 16, tuple(prompt[:16]), block_ids[:2], samples=False)
    tail = TokenChunk(5, 9, 16, 1, tuple(prompt[16:]), block_ids, samples=True)
    assert engine.runner.submit(StepPlan(1, (reset,), (head,))).wait().token_ids == []
    result = engine.runner.submit(StepPlan(2, (), (tail,))).wait()
    assert result.is_finite == [True]
    assert_as_reference(model, prompt, result.token_ids, engine.ops.recorded[0])


def test_logprobs_are_of_the_models_own_distribution(qwen2: TinyModel) -> None:
    (prompt,) = prompts_of([12], seed=6)
    engine = TinyEngine(qwen2, batch_limits())
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.7, repetition_penalty=1.3, logprobs=True)
    engine.add(0, prompt, sampling)
    engine.run()
    expected = qwen2.reference_logits([*prompt, *engine.outputs[0]])[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(engine.outputs[0]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(engine.logprobs[0]), chosen, rtol=1e-4, atol=1e-4)
