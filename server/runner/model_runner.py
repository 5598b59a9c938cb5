"""Runs step plans on a backend. Submitting and waiting are separate, so the next step can be planned meanwhile.

Knows plans and the order of a step's operations. Does not know scheduling, tensors or devices.
"""

from typing import Generic

from server.models.decoder import Decoder
from server.models.facts import ModelFacts
from server.ops.interface import Activations, BufferT, Operations, PendingTokens
from server.runner.graphs import StepGraphs
from server.runner.input_batch import InputBatch, slot_sampling
from server.runner.step_columns import StepColumns
from server.scheduler.plan import StepPlan, StepResult


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
        num_samples = [chunk.samples for chunk in self._plan.chunks].count(True)
        token_ids = tokens.token_ids
        assert num_samples <= len(token_ids), f"{len(token_ids)} tokens for {num_samples} samples"
        # Padding rows come last: they are nobody's.
        return StepResult(
            self._plan.step,
            token_ids[:num_samples],
            tokens.logprobs[:num_samples],
            tokens.is_finite[:num_samples],
        )


class ModelRunner(Generic[BufferT]):
    """One model on one backend, and the only one there from its first step on: it remembers what host buffers hold.

    Steps run in the order of `submit`; a plan may refer to tokens not yet waited for.
    """

    def __init__(self, facts: ModelFacts, ops: Operations[BufferT], eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = facts.vocab_size
        self._eos_token_ids = eos_token_ids
        self._ops = ops
        self._decoder = Decoder(facts, ops)
        self._batch = InputBatch(ops.limits)
        self._graphs = StepGraphs(ops, self._run)

    @property
    def graph_size(self) -> int:
        """Token rows of the graph that the last step replayed; 0: its operations were issued one by one."""
        return self._graphs.replayed_size

    @property
    def num_graphs(self) -> int:
        """Graphs recorded so far."""
        return self._graphs.num_graphs

    @property
    def num_graphs_wanted(self) -> int:
        """Graphs when `prepare` has done all; 0 on a backend without graphs."""
        return len(self._graphs.sizes)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Issue the whole step, its tokens' way to the host included. Does not wait for a GPU; a CPU computes here."""
        ops = self._ops
        with ops.execution_context():
            for reset in plan.resets:
                sampling = slot_sampling(reset, self._eos_token_ids, self._vocab_size)
                self._batch.reset_slot(reset.slot, sampling)
                ops.reset_slot(reset.slot, sampling)
            columns = StepColumns.of(plan)
            size = self._graphs.padded_size(columns.size)
            self._graphs.replayed_size = 0
            shape = self._batch.fill(columns, ops.next_staging(), size)
            act = ops.begin_step(shape)
            if size is None:
                self._decoder.forward(act)
                if shape.num_samples:
                    ops.sample(act.logits)
            else:
                self._graphs.run(shape, act)
            return PendingStep(plan, ops.fetch_tokens())

    def prepare(self) -> bool:
        """Between steps: do a piece of work, of some milliseconds, that later steps save. False: none is left."""
        size = self._graphs.missing_size
        if size is None:
            return False
        with self._ops.execution_context():
            shape = self._batch.fill_padding(self._ops.next_staging(), size)
            act = self._ops.begin_step(shape)
            if self._graphs.has_run(size):
                self._graphs.record(shape)
            else:
                self._graphs.run(shape, act)
            self._ops.fetch_tokens()
        return True

    def _run(self, act: Activations[BufferT]) -> None:
        """What a graph holds."""
        self._decoder.forward(act)
        self._ops.sample(act.logits)
