"""Whatever arrives, ends and collides: each request gets its undisturbed tokens, one final event, no block is lost."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine.messages import SamplingParams, Submit
from server.scheduler.budget import SchedulerLimits
from tests.scheduler.simulator import STOP_ID, VOCAB_SIZE, SimulatedEngine, expected_outputs

# Prompts are cut from a few texts, so that prefixes are often shared; some end in ids of their own, a few
# in a broken one.
_TEXTS = [[2 + (i * step + step) % (VOCAB_SIZE - 3) for i in range(40)] for step in (1, 5, 7)]


@st.composite
def submits(draw: st.DrawFn, request_id: int) -> Submit:
    """A request that fits in 48 tokens; one in four goes on after an engine died."""
    text = draw(st.sampled_from(_TEXTS))
    prompt = text[: draw(st.integers(1, 24))] + draw(st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=3))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 3)),
        min_tokens=draw(st.sampled_from([0, 1, 4, 20])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (STOP_ID,), (STOP_ID, 9)])),
    )
    submit = Submit(request_id, prompt, len(prompt), sampling, draw(st.integers(-1, 1)))
    outputs, _ = expected_outputs(submit)
    if len(outputs) > 1 and draw(st.integers(0, 3)) == 0:
        num_delivered = draw(st.integers(1, len(outputs) - 1))
        return Submit(request_id, prompt + outputs[:num_delivered], len(prompt), sampling, submit.priority)
    return submit


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(0, 2),
        block_size=st.sampled_from([1, 2, 4]),
        num_spare_blocks=st.integers(1, 12),
        max_num_requests=st.integers(1, 8),
        max_batched_tokens=st.integers(1, 40),
        max_prefill_tokens=st.integers(0, 90),
        usual_share=st.sampled_from([0, 0.3, 1]),
        max_steps_behind=st.integers(0, 3),
        prefix_cache=st.booleans(),
    )
    def start(
        self,
        depth: int,
        block_size: int,
        num_spare_blocks: int,
        max_num_requests: int,
        max_batched_tokens: int,
        max_prefill_tokens: int,
        usual_share: float,
        max_steps_behind: int,
        prefix_cache: bool,
    ) -> None:
        usual = int(usual_share * max_batched_tokens)
        limits = SchedulerLimits(
            48, max_num_requests, max_batched_tokens, 1000, 1 << 20, max_prefill_tokens, usual, max_steps_behind
        )
        num_blocks = 48 // block_size + num_spare_blocks
        self.engine = SimulatedEngine(limits, num_blocks, block_size, depth, prefix_cache)
        self.num_requests = 0

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.num_requests += 1
            assert self.engine.add(data.draw(submits(self.num_requests))) is None

    @rule(num_turns=st.integers(1, 12))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.engine.turn()
            self.engine.scheduler.check_integrity()

    @rule()
    def read_early(self) -> None:
        self.engine.read()

    @precondition(lambda self: self.engine.live_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.live_ids)))

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


def _random_submit(rng: random.Random, request_id: int) -> Submit:
    prompt = rng.choice(_TEXTS)[: 1 + int(rng.random() * 6)]
    if rng.random() < 0.5:
        prompt.append(int(2 + rng.random() * (VOCAB_SIZE - 2)))
    sampling = SamplingParams(max_tokens=1 + int(rng.random() * 8), seed=int(rng.random() * 5), ignore_eos=True)
    return Submit(request_id, prompt, len(prompt), sampling, int(rng.random() * 2))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_no_block_is_lost_over_fifty_thousand_random_requests(depth: int) -> None:
    """Both depths together are the 10^5 requests with aborts and preemptions."""
    rng = random.Random(depth)
    limits = SchedulerLimits(16, 16, 64, 64, 1 << 20)
    engine = SimulatedEngine(limits, num_blocks=40, block_size=1, depth=depth)
    num_added = num_aborted = 0
    while num_added < 50_000:
        for _ in range(6):
            num_added += engine.add(_random_submit(rng, num_added)) is None
        if rng.random() < 0.7 and engine.live_ids:
            engine.abort(rng.choice(engine.live_ids))
            num_aborted += 1
        engine.turn()
        if num_added % 64 == 0:
            engine.scheduler.check_integrity()
    engine.run()
    assert num_aborted > 1000
    assert engine.scheduler.num_preemptions > 1000
    assert engine.scheduler.prefix_hit_tokens > 1000
