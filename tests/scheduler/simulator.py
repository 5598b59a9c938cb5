"""A runner without a model: runs step plans on a pool of plain integers and checks every promise that a plan makes.

The "KV" of a position is a hash of all tokens up to it, and the next token is a function of that hash, the seed and the
position. So a wrong block, a stale prefix hit or a reordered write shows as a wrong cell before it is read.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.engine.messages import FinishReason, SamplingParams, Submit, TokenOutput
from server.kv.block_tables import BlockTables
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import SlotReset, StepPlan, StepResult, TokenChunk
from server.scheduler.scheduler import Scheduler

VOCAB_SIZE = 32
EOS_ID = 0
STOP_ID = 1
BROKEN_ID = 31  # a token whose KV is not finite, and that of everything after it
ROOT = 0
NOT_FINITE = -1
UNWRITTEN = -2
_MASK = (1 << 61) - 1


def extend(cell: int, token_id: int) -> int:
    """The KV cell after `cell` for one more token."""
    if cell == NOT_FINITE or token_id == BROKEN_ID:
        return NOT_FINITE
    return (cell * 6364136223846793005 + token_id * 2654435761 + 1442695040888963407) & _MASK


def has_finite_logits(cell: int) -> bool:
    """Whether a token can be sampled after `cell`: rarely not, although its KV is sound."""
    return cell != NOT_FINITE and cell % 61 != 0


def sample(cell: int, seed: int, num_outputs: int, sampling: SamplingParams) -> int:
    """The next token after `cell`, never the end before min_tokens, never the broken one."""
    first = 2 if num_outputs < sampling.min_tokens else 0
    return first + ((cell ^ seed * 7919) >> 7) % (VOCAB_SIZE - 1 - first)


def expected_outputs(submit: Submit) -> tuple[list[int], FinishReason]:
    """What a request yields when nothing disturbs it."""
    sampling = submit.sampling
    cell = ROOT
    for token_id in submit.token_ids:
        cell = extend(cell, token_id)
    outputs: list[int] = []
    num_outputs = len(submit.token_ids) - submit.num_prompt_tokens
    while True:
        if not has_finite_logits(cell):
            return outputs, "error"
        token_id = sample(cell, sampling.seed, num_outputs, sampling)
        outputs.append(token_id)
        num_outputs += 1
        cell = extend(cell, token_id)
        if num_outputs > sampling.min_tokens:
            if token_id == EOS_ID and not sampling.ignore_eos:
                return outputs, "eos"
            if token_id in sampling.stop_token_ids:
                return outputs, "stop_token"
        if num_outputs == sampling.max_tokens:
            return outputs, "length"


@dataclass
class Slot:
    """What the device knows of a request: the cells of all its tokens, and the last token that it sampled itself."""

    request_id: int
    num_prompt_tokens: int
    sampling: SamplingParams
    cells: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def append(self, token_id: int) -> None:
        self.cells.append(extend(self.cells[-1] if self.cells else ROOT, token_id))
        self.token_ids.append(token_id)


class SimulatedRunner:
    """Runs plans in the order in which they are submitted, as a device does."""

    def __init__(self, num_blocks: int, block_size: int, limits: SchedulerLimits) -> None:
        self._blocks = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self._limits = limits
        self._slots: dict[int, Slot] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan, run it, return what it sampled."""
        self._check_length(plan)
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks)
        prefills = itertools.dropwhile(lambda chunk: chunk.num_tokens == 1, plan.chunks)
        assert not any(chunk.input_on_device for chunk in prefills), "a decode comes after a prefill"
        for reset in plan.resets:
            self._reset(reset)
        # Reads see what earlier plans wrote, never what another chunk of this one writes.
        for chunk in plan.chunks:
            self._check_reads(chunk)
        for chunk in plan.chunks:
            self._write(chunk)
        samples = [self._sample(chunk) for chunk in plan.chunks if chunk.samples]
        ids, finite = [token_id for token_id, _ in samples], [is_finite for _, is_finite in samples]
        return StepResult(plan.step, ids, [-0.5] * len(samples), finite)

    def _check_length(self, plan: StepPlan) -> None:
        is_new = {reset.slot for reset in plan.resets}
        decodes = [
            chunk for chunk in plan.chunks if chunk.samples and chunk.num_tokens == 1 and chunk.slot not in is_new
        ]
        limits = self._limits
        most = limits.max_batched_tokens if decodes else max(limits.max_batched_tokens, limits.max_prefill_tokens)
        assert 0 < plan.num_tokens <= most, f"a step of {plan.num_tokens} tokens with {len(decodes)} decodes"

    def _reset(self, reset: SlotReset) -> None:
        assert 0 <= reset.slot < self._limits.max_num_requests
        slot = Slot(reset.request_id, reset.num_prompt_tokens, reset.sampling)
        for token_id in reset.token_ids:
            slot.append(token_id)
        self._slots[reset.slot] = slot

    def _slot_of(self, chunk: TokenChunk) -> Slot:
        slot = self._slots[chunk.slot]
        assert slot.request_id == chunk.request_id, "the slot was not reset for this request"
        return slot

    def _check_reads(self, chunk: TokenChunk) -> None:
        slot, size = self._slot_of(chunk), self._block_size
        end = chunk.start + chunk.num_tokens
        assert end <= len(chunk.block_ids) * size, "the block table is too short"
        assert 0 not in chunk.block_ids, "scratch was leased"
        assert chunk.samples == (end == len(slot.token_ids))
        if chunk.input_on_device:
            assert (chunk.num_tokens, chunk.samples) == (1, True)
        else:
            assert chunk.token_ids == tuple(slot.token_ids[chunk.start : end])
        stored: list[int] = []
        for block_id in chunk.block_ids[: -(-chunk.start // size)]:
            stored += self._blocks[block_id]
        assert stored[: chunk.start] == slot.cells[: chunk.start], "the KV of an earlier position is wrong"

    def _write(self, chunk: TokenChunk) -> None:
        cells, size = self._slot_of(chunk).cells, self._block_size
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            self._blocks[chunk.block_ids[position // size]][position % size] = cells[position]

    def _sample(self, chunk: TokenChunk) -> tuple[int, bool]:
        slot = self._slot_of(chunk)
        is_finite = has_finite_logits(slot.cells[-1])
        num_outputs = len(slot.token_ids) - slot.num_prompt_tokens
        token_id = sample(slot.cells[-1], slot.sampling.seed, num_outputs, slot.sampling) if is_finite else 5
        slot.append(token_id)
        return token_id, is_finite


class SimulatedEngine:
    """The engine loop with `depth` steps in flight while the next is scheduled, and the web side's bookkeeping."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        block_size: int = 4,
        depth: int = 1,
        prefix_cache: bool = True,
    ) -> None:
        self.tables = BlockTables(num_blocks, block_size, prefix_cache)
        self.scheduler = Scheduler(self.tables, limits, {EOS_ID})
        self.runner = SimulatedRunner(num_blocks, block_size, limits)
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[TokenOutput]] = {}  # request id -> all outputs
        self._depth = depth
        self._submits: dict[int, Submit] = {}  # without a final event yet
        self._in_flight: deque[StepResult] = deque()

    @property
    def live_ids(self) -> list[int]:
        """Requests that wait for their final event."""
        return list(self._submits)

    def add(self, submit: Submit) -> TokenOutput | None:
        """Add a request; a refusal leaves no trace."""
        refusal = self.scheduler.add(submit)
        if refusal is None:
            self._submits[submit.request_id] = submit
            self.outputs[submit.request_id] = []
        return refusal

    def abort(self, request_id: int) -> None:
        """Abort; from now on the request must be silent."""
        self.scheduler.abort(request_id)
        self._submits.pop(request_id, None)

    def turn(self) -> StepPlan | None:
        """Schedule, execute, and take the results that are due."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self._in_flight.append(self.runner.execute(plan))
        elif not self._in_flight:
            assert not self.scheduler.has_work, "nothing to compute, nothing in flight, yet requests wait"
        while self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            self.read()
        return plan

    def read(self) -> None:
        """Take the results of the oldest step in flight, if there is one, before they are due."""
        if self._in_flight:
            self._take(self.scheduler.update(self._in_flight.popleft()))

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            submit = self._submits[output.request_id]  # KeyError: an output after the final event or an abort
            received = self.outputs[output.request_id]
            received.append(output)
            if output.finish_reason is not None:
                del self._submits[output.request_id]
                token_ids = [item.token_id for item in received if item.token_id >= 0]
                assert (token_ids, output.finish_reason) == expected_outputs(submit)

    def run(self) -> None:
        """Turn until every request has ended and every result is taken."""
        while self.scheduler.has_work or self._in_flight:
            self.turn()
            self.scheduler.check_integrity()
        assert not self._submits
        assert self.tables.num_held == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def token_ids(self, request_id: int) -> list[int]:
        """What a request has received so far."""
        return [output.token_id for output in self.outputs[request_id]]
