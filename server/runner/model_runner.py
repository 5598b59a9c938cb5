"""Runs step plans on a backend. Submitting and waiting are separate, so the next step can be planned meanwhile.

Knows plans and the order of a step's operations. Does not know scheduling, tensors or devices.
"""

from typing import Generic

from server.models.decoder import Decoder
from server.models.facts import ModelFacts
from server.ops.interface import BufferT, Operations, PendingTokens
from server.runner.input_batch import InputBatch, slot_sampling
from server.scheduler.plan import SampledToken, StepPlan, StepResult


class PendingStep:
    """A submitted step. It holds no device memory that later steps use, so it may be waited for at any time."""

    def __init__(self, plan: StepPlan, tokens: PendingTokens) -> None:
        self._plan = plan
        self._tokens = tokens

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._tokens.is_done()

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host."""
        tokens = self._tokens.wait()
        sampled = (chunk for chunk in self._plan.chunks if chunk.samples)
        rows = zip(sampled, tokens.token_ids, tokens.logprobs, tokens.is_finite, strict=True)
        return StepResult(
            self._plan.step,
            tuple(
                SampledToken(chunk.request_id, chunk.slot, token_id, logprob, is_finite)
                for chunk, token_id, logprob, is_finite in rows
            ),
        )


class ModelRunner(Generic[BufferT]):
    """One model on one backend. Steps run in the order of `submit`; a plan may refer to tokens not yet waited for."""

    def __init__(self, facts: ModelFacts, ops: Operations[BufferT], eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = facts.vocab_size
        self._eos_token_ids = eos_token_ids
        self._ops = ops
        self._decoder = Decoder(facts, ops)
        self._batch = InputBatch(ops.limits)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Issue the whole step, its tokens' way to the host included. Does not wait for a GPU; a CPU computes here."""
        ops = self._ops
        with ops.execution_context():
            for reset in plan.resets:
                sampling = slot_sampling(reset, self._eos_token_ids, self._vocab_size)
                self._batch.reset_slot(reset.slot, sampling)
                ops.reset_slot(reset.slot, sampling)
            shape = self._batch.fill(plan, ops.next_staging())
            act = ops.begin_step(shape)
            self._decoder.forward(act)
            if shape.num_samples:
                ops.sample(act.logits)
            return PendingStep(plan, ops.fetch_tokens())
