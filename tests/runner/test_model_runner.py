"""Plans become steps: tokens that stay on the device, slots that are given away, batches that are filled."""

from random import Random

import pytest
import torch

from server.engine.messages import SamplingParams
from server.ops.interface import StepSize
from server.ops.sampling import SamplingUse
from server.ops.torch.staging import Staging
from server.runner.input_batch import InputBatch, slot_sampling
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from tests.runner.tiny_engine import EOS_ID, TinyEngine, TinyModel, batch_limits


def random_samplings(count: int) -> list[SamplingParams]:
    random = Random(7)
    return [
        SamplingParams(
            max_tokens=30,
            temperature=random.choice([0.0, 0.5, 1.0]),
            top_k=random.choice([0, 1, 20]),
            top_p=random.choice([1.0, 0.8]),
            min_p=random.choice([0.0, 0.05]),
            repetition_penalty=random.choice([1.0, 1.2, 0.9]),
            seed=random.getrandbits(64),
            ignore_eos=True,
            logprobs=True,
        )
        for _ in range(count)
    ]


def run_all(model: TinyModel, **options: int) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    num_in_flight = options.pop("num_in_flight", 1)
    engine = TinyEngine(model, batch_limits(**options), num_in_flight=num_in_flight)
    for request_id, sampling in enumerate(random_samplings(12)):
        engine.add(request_id, range(request_id + 1, 3 * request_id + 5), sampling)
    engine.run()
    return engine.outputs, engine.logprobs


def test_pipelined_steps_give_the_same_tokens(qwen2: TinyModel) -> None:
    assert run_all(qwen2, num_in_flight=1)[0] == run_all(qwen2, num_in_flight=2)[0]


def test_drawn_tokens_do_not_depend_on_the_batch(qwen2: TinyModel) -> None:
    outputs, _ = run_all(qwen2)
    assert run_all(qwen2, max_num_requests=1)[0] == outputs
    assert run_all(qwen2, max_batched_tokens=8, num_blocks=20)[0] == outputs


def test_a_slot_forgets_its_former_request(qwen2: TinyModel) -> None:
    """The same request after one with every parameter set, in the same slot."""
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = TinyEngine(qwen2, batch_limits(max_num_requests=1))
    alone.add(0, [5, 6, 7], greedy)
    alone.run()
    engine = TinyEngine(qwen2, batch_limits(max_num_requests=1))
    wild = SamplingParams(
        max_tokens=20, temperature=2.0, top_k=3, repetition_penalty=3.0, min_tokens=20, stop_token_ids=(9,), seed=1
    )
    engine.add(1, [5, 6, 7, 8, 9], wild)
    engine.add(2, [5, 6, 7], greedy)
    engine.run()
    assert engine.outputs[2] == alone.outputs[0]


def test_repetition_penalty_counts_the_prompt_and_every_output(qwen2: TinyModel) -> None:
    engine = TinyEngine(qwen2, batch_limits(), num_in_flight=2)
    prompt = list(range(20))
    engine.add(0, prompt, SamplingParams(max_tokens=64, repetition_penalty=1e38, ignore_eos=True))
    engine.run()
    # Seen ids keep a logit of almost 0 or fall far below: nothing seen can win while an unseen logit is positive.
    assert len(set(engine.outputs[0]) | set(prompt)) == len(engine.outputs[0]) + len(prompt)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_back_the_end_until_then(qwen2: TinyModel, ignore_eos: bool) -> None:
    vocab_size = qwen2.facts.vocab_size
    sampling = SamplingParams(
        max_tokens=40, min_tokens=10, stop_token_ids=tuple(range(10, vocab_size + 50)), ignore_eos=ignore_eos
    )
    engine = TinyEngine(qwen2, batch_limits(), num_in_flight=2)
    engine.add(0, [30, 31, 32], sampling)
    engine.run()
    early, end = engine.outputs[0][:10], engine.outputs[0][-1]
    assert all(token_id < 10 and (ignore_eos or token_id != EOS_ID) for token_id in early)
    assert len(engine.outputs[0]) == 11
    assert end >= 10


def test_unused_sampling_steps_are_not_asked_for() -> None:
    limits = batch_limits()
    batch = InputBatch(limits)
    greedy = SlotReset(0, 0, (1,), 1, SamplingParams(max_tokens=1, top_k=5, top_p=0.5, min_p=0.1, min_tokens=1))
    batch.reset_slot(0, slot_sampling(greedy, (EOS_ID,), 100))
    host = Staging(limits, torch.device("cpu")).next_host()
    early = batch.fill(StepPlan(1, (), (TokenChunk(0, 0, 0, 1, (1,), (1,), samples=True),)), host)
    assert early.sampling == SamplingUse(False, min_tokens=True, top_k_or_top_p=False, min_p=False, logprobs=False)
    late = batch.fill(StepPlan(2, (), (TokenChunk(0, 0, 1, 1, (), (1,), samples=True),)), host)
    assert not late.sampling.min_tokens
    assert late.reads_last_tokens
    assert (late.num_samples, late.num_random, late.num_decodes) == (1, 0, 1)


def test_ragged_plan_is_flattened_as_the_fields_say() -> None:
    limits = batch_limits(max_batched_tokens=16, max_num_requests=3, block_size=8)
    batch = InputBatch(limits)
    for slot in range(3):
        reset = SlotReset(slot, slot, (1,), 1, SamplingParams(max_tokens=1, temperature=float(slot == 2)))
        batch.reset_slot(slot, slot_sampling(reset, (), 100))
    chunks = (
        TokenChunk(2, 2, 9, 1, (), (4, 7), samples=True),
        TokenChunk(0, 0, 6, 4, (50, 51, 52, 53), (2, 3), samples=False),
        TokenChunk(1, 1, 0, 3, (60, 61, 62), (5,), samples=True),
    )
    host = Staging(limits, torch.device("cpu")).next_host()
    shape = batch.fill(StepPlan(1, (), chunks), host)
    assert (shape.starts, shape.lengths, shape.num_decodes) == ([9, 6, 0], [1, 4, 3], 1)
    assert shape.size == StepSize(num_tokens=8, num_decodes=1, num_prefills=2, num_samples=2)
    assert (shape.table_rows, shape.table_columns) == (3, 8)
    assert host.header.tolist() == [1, 3, 8, 8]
    assert host.token_ids[1:8].tolist() == [50, 51, 52, 53, 60, 61, 62]
    assert host.token_slots[:8].tolist() == [2] + [-1] * 7
    assert host.positions[:8].tolist() == [9, 6, 7, 8, 9, 0, 1, 2]
    assert host.kv_rows[:8].tolist() == [57, 22, 23, 24, 25, 40, 41, 42]
    assert host.query_starts[:4].tolist() == [0, 1, 5, 8]
    assert host.context_lens[:3].tolist() == [10, 10, 3]
    assert host.slots[:3].tolist() == [2, 0, 1]
    assert [host.block_tables[8 * row : 8 * row + 2].tolist() for row in (0, 2)] == [[2, 3], [4, 7]]
    assert host.block_tables[8] == 5
    assert host.sample_rows[:2].tolist() == [0, 7]
    assert host.sample_slots[:2].tolist() == [2, 1]
    assert host.sample_positions[:2].tolist() == [10, 3]
    assert (shape.num_random, host.random_samples[0]) == (1, 0)
