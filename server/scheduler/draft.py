"""A StepPlan in the making: what is left of its token budget, and the chunks that were granted from it so far.

Knows how a request's missing tokens become a chunk. Does not decide who gets one.
"""

from dataclasses import dataclass, field

from server.scheduler.plan import SlotReset, StepPlan, TokenChunk
from server.scheduler.request import Request


@dataclass(slots=True)
class PlanDraft:
    """`num_left` is what remains of the step's token budget."""

    num_left: int
    resets: list[SlotReset] = field(default_factory=list)
    chunks: list[TokenChunk] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)  # of the chunks that sample, in their order
    drained: list[Request] = field(default_factory=list)  # of these, the ones whose last token is planned now
    prefilled: list[Request] = field(default_factory=list)
    coming: set[bytes] = field(default_factory=set)  # digests of the full blocks of prompts that this plan writes

    def reset_slot(self, request: Request) -> None:
        """Give the request's slot its state before the step runs."""
        assert request.slot is not None
        self.resets.append(
            SlotReset(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
            )
        )

    def add_prefill(self, request: Request) -> None:
        """Compute as many of the request's missing tokens, all known, as the budget allows."""
        assert request.slot is not None
        start = request.num_computed
        num_tokens = min(request.num_missing, self.num_left)
        end = start + num_tokens
        samples = end == len(request.token_ids)
        self.chunks.append(
            TokenChunk(
                slot=request.slot,
                request_id=request.request_id,
                start=start,
                num_tokens=num_tokens,
                token_ids=tuple(request.token_ids[start:end]),
                block_ids=request.table.block_ids,
                samples=samples,
            )
        )
        request.num_computed = end
        if samples:
            self.sampling.append(request)
            request.num_in_flight += 1
            if end + 1 >= request.max_total_tokens:
                self.drained.append(request)
        self.prefilled.append(request)
        self.num_left -= num_tokens

    def finish(self, step: int) -> StepPlan:
        """The plan, as a value of its own."""
        return StepPlan(step=step, resets=tuple(self.resets), chunks=tuple(self.chunks))
