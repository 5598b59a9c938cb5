"""Who computes what in the next step. Pure Python: knows token counts, blocks and slots, no tensors, sockets or clocks.

There is no prefill mode and no decode mode: a step closes part of every gap between known and computed tokens,
decodes first, then prompts in chunks, by rank (priority, then arrival). How many tokens of prompts go along with how
many decodes is TokenBudget's choice. When KV runs out, the running request of the last rank gives its blocks back and
is computed again later.

The caller may plan step N+1 before it has read step N: a token then is in flight, planned with but not known.

NOTE: blocks and slots are returned the moment a request ends, is preempted or has its last token planned, although
planned steps may still write there. That is safe because the device runs plans in the order in which schedule() made
them, so a later plan's owner writes after them. Hence the two duties of the caller: submit every plan, in order, and
hand every result to update(), in order.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection

from server.engine.messages import FinishReason, Submit, TokenOutput
from server.kv.block_tables import BlockTables
from server.scheduler.budget import SchedulerLimits, TokenBudget
from server.scheduler.draft import PlanDraft
from server.scheduler.plan import StepPlan, StepResult, TokenChunk
from server.scheduler.request import Request, Status
from server.scheduler.waiting import WaitingQueue, by_rank

_NAN = float("nan")


class Scheduler:
    """schedule() and update() alternate; add() and abort() may come at any time between them."""

    def __init__(self, tables: BlockTables, limits: SchedulerLimits, eos_token_ids: Collection[int]) -> None:
        self._tables = tables
        self._limits = limits
        self._budget = TokenBudget(limits)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[int, Request] = {}  # all that have not finished
        self._waiting = WaitingQueue(limits.max_waiting_requests, limits.max_waiting_tokens)
        self._running: list[Request] = []  # by rank
        self._free_slots = list(range(limits.max_num_requests))  # a heap: low slots first
        self._planned: deque[tuple[int, list[Request]]] = deque()  # steps not read yet, with their sampling requests
        self._num_steps = 0
        self._num_arrivals = 0
        # Totals since the start. A request counts in the prefix figures and prompt tokens when it is first admitted.
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request still waits for its final event."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot: new or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that are being computed or whose last results are to come."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self._tables.num_free

    def add(self, submit: Submit) -> TokenOutput | None:
        """Queue a request; its refusal, if it can never be served ("refused") or not now ("overloaded")."""
        assert submit.request_id not in self._requests, f"request {submit.request_id} is already here"
        error = self._why_never(submit)
        if error is not None:
            return TokenOutput(submit.request_id, -1, _NAN, "refused", error)
        error = self._waiting.why_full(submit.num_prompt_tokens, len(self._free_slots))
        if error is not None:
            return TokenOutput(submit.request_id, -1, _NAN, "overloaded", error)
        request = Request.from_submit(submit, self._num_arrivals, self._eos_token_ids)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)
        return None

    def _why_never(self, submit: Submit) -> str | None:
        num_prompt, max_tokens = submit.num_prompt_tokens, submit.sampling.max_tokens
        num_total = num_prompt + max_tokens
        if not 0 < num_prompt <= len(submit.token_ids):
            return f"the prompt has {num_prompt} tokens, at least 1 is needed"
        if len(submit.token_ids) >= num_total:
            return (
                f"max_tokens is {max_tokens} and {len(submit.token_ids) - num_prompt} tokens are there: nothing to do"
            )
        if num_total > self._limits.max_model_len:
            return (
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} make {num_total}, "
                f"the limit is {self._limits.max_model_len} tokens"
            )
        num_blocks = self._tables.num_blocks_for(num_total - 1)  # the last token is never computed
        if num_blocks > self._tables.num_leasable:
            return (
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} need {num_blocks} KV blocks, "
                f"the pool has {self._tables.num_leasable}"
            )
        return None

    def abort(self, request_id: int) -> None:
        """End a request without a final event, at once. Unknown ids are ignored: it may just have finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if no request can go on before a result is read."""
        draft = PlanDraft(self._limits.max_batched_tokens)
        prefilling = self._plan_decodes(draft)
        num_behind = sum([request.num_missing for request in prefilling]) + self._waiting.num_tokens
        draft.num_left = self._budget.for_prefills(len(draft.chunks), num_behind)
        self._plan_prefills(draft, prefilling)
        if not draft.chunks:
            return None
        self._settle(draft)
        self._num_steps += 1
        self._planned.append((self._num_steps, draft.sampling))
        return draft.finish(self._num_steps)

    def _plan_decodes(self, draft: PlanDraft) -> list[Request]:
        """Plan all requests that miss one token; those that miss more are returned, by rank."""
        prefilling: list[Request] = []
        running, most = self._running, draft.num_left
        chunks, sampling = draft.chunks, draft.sampling
        for request in running:  # preemption shortens the list, behind this request only
            # Written out, as this runs for each request and step: a property or a call is a tenth of the loop.
            token_ids, start, table = request.token_ids, request.num_computed, request.table
            num_known = len(token_ids)
            if num_known + request.num_in_flight > start + 1:
                prefilling.append(request)
            elif start < table.num_positions or self._make_room(request):
                known = (token_ids[start],) if start < num_known else ()  # (): the id is still on the device
                slot = request.slot
                assert slot is not None
                chunks.append(TokenChunk(slot, request.request_id, start, 1, known, table.block_ids, True))
                sampling.append(request)
                request.num_computed = start + 1
                request.num_in_flight += 1
                if start + 2 >= request.max_total_tokens:
                    draft.drained.append(request)
                if len(chunks) == most:
                    break
        return prefilling

    def _make_room(self, request: Request) -> bool:
        """Give the request a block for its next position; False if it had to be preempted itself."""
        while not self._tables.try_extend(request.table):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        self._waiting.add(request)
        self.num_preemptions += 1

    def _plan_prefills(self, draft: PlanDraft, prefilling: list[Request]) -> None:
        # None of these was preempted for a decode meanwhile: victims rank behind the request that needs their blocks,
        # and so behind all that were passed before it.
        for request in prefilling:
            self._admit(draft, before=request)
            if not draft.num_left:
                return
            self._add_prefill(draft, request)
        self._admit(draft, before=None)

    def _admit(self, draft: PlanDraft, before: Request | None) -> None:
        """Start waiting requests in order, as long as budget, slots and blocks last and they outrank `before`."""
        while draft.num_left and self._free_slots:
            request = self._waiting.first()
            if request is None or (before is not None and before.rank < request.rank):
                return
            # A preempted request's tokens in flight are part of what it must compute again: wait for their ids.
            if request.num_in_flight or self._should_wait(draft, request) or not self._try_start(request):
                return
            draft.reset_slot(request)
            self._add_prefill(draft, request)

    def _add_prefill(self, draft: PlanDraft, request: Request) -> None:
        draft.add_prefill(request)
        draft.coming.update(self._tables.not_offered(request.table, request.num_computed))

    def _should_wait(self, draft: PlanDraft, request: Request) -> bool:
        """Whether this very plan computes at least half of what the request lacks: the next one finds it there."""
        if not draft.coming:
            return False
        num_found, num_coming = self._tables.look_up(request.table, request.token_ids, draft.coming)
        return num_coming > 0 and 2 * num_coming >= len(request.token_ids) - num_found

    def _try_start(self, request: Request) -> bool:
        # A spare block for each running request: without it the newcomer would soon be preempted for their growth.
        num_cached = self._tables.try_open(request.table, request.token_ids, num_spare=len(self._running))
        if num_cached is None:
            return False
        self._waiting.remove(request)
        request.slot = heapq.heappop(self._free_slots)
        request.status = Status.RUNNING
        request.num_computed = num_cached
        insort(self._running, request, key=by_rank)
        if request.num_cached_tokens is None:
            self._count_admission(request, num_cached)
        return True

    def _count_admission(self, request: Request, num_cached: int) -> None:
        request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
        self.prefix_query_tokens += request.num_prompt_tokens
        self.prefix_hit_tokens += request.num_cached_tokens
        self.num_prompt_tokens += request.num_prompt_tokens

    def _settle(self, draft: PlanDraft) -> None:
        """Offer the prompts of this plan to later plans; let go of requests whose last token is planned."""
        for request in draft.prefilled:
            self._tables.offer(request.table, request.token_ids, request.num_computed)
        for request in draft.drained:
            self._running.remove(request)
            self._release(request)
            request.status = Status.DRAINING

    def update(self, result: StepResult) -> list[TokenOutput]:
        """Take the results of the oldest step not read yet; one output for each request that is still alive."""
        step, requests = self._planned.popleft()
        assert step == result.step, f"result of step {result.step}, expected that of step {step}"
        outputs: list[TokenOutput] = []
        num_generated, finished, running, offer = 0, Status.FINISHED, Status.RUNNING, self._tables.offer
        columns = zip(requests, result.token_ids, result.logprobs, result.is_finite, strict=True)
        for request, token_id, logprob, is_finite in columns:
            request.num_in_flight -= 1
            if request.status is finished:
                continue
            if not is_finite:
                outputs.append(self._fail(request))
                continue
            # Written out, as in _plan_decodes.
            token_ids = request.token_ids
            token_ids.append(token_id)
            num_known = len(token_ids)
            finish_reason: FinishReason | None = None
            if num_known >= request.max_total_tokens or token_id in request.end_ids:
                finish_reason = self._finish_if_ended(request)
            if num_known >= request.table.next_offer and request.status is running:
                offer(request.table, token_ids, request.num_offerable)
            if request.has_output:
                outputs.append(TokenOutput(request.request_id, token_id, logprob, finish_reason))
            else:
                request.has_output = True
                num_cached = request.num_cached_tokens or 0
                outputs.append(TokenOutput(request.request_id, token_id, logprob, finish_reason, "", num_cached))
            num_generated += 1
        self.num_generated_tokens += num_generated
        return outputs

    def _finish_if_ended(self, request: Request) -> FinishReason | None:
        finish_reason = request.why_ended()
        if finish_reason is not None:
            self._finish(request)
        return finish_reason

    def _fail(self, request: Request) -> TokenOutput:
        self._finish(request)
        self._tables.distrust(request.table)
        error = f"the logits after {len(request.token_ids)} tokens were not finite"
        return TokenOutput(request.request_id, -1, _NAN, "error", error)

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        request.status = Status.FINISHED

    def _release(self, request: Request) -> None:
        """Return slot and blocks of a running request; what it has offered stays for others to find."""
        assert request.slot is not None
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        self._tables.close(request.table)

    def check_integrity(self) -> None:
        """Assert that requests, slots, queues and blocks agree. For tests and idle moments."""
        running = self._running
        assert running == sorted(running, key=by_rank), "running requests are out of order"
        assert all(request.status is Status.RUNNING and request.num_missing > 0 for request in running)
        slots = [request.slot for request in running if request.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self._limits.max_num_requests)), "a slot was lost"
        statuses = [request.status for request in self._requests.values()]
        assert statuses.count(Status.RUNNING) == len(running)
        assert statuses.count(Status.WAITING) == len(self._waiting)
        assert Status.FINISHED not in statuses, "a finished request was not forgotten"
        for request in self._requests.values():
            if request.status is not Status.RUNNING:
                assert request.slot is None, "a request that does not run has a slot"
                assert not request.table.block_ids, "a request that does not run has blocks"
            if request.status is Status.WAITING:
                assert request.num_computed == 0, "a waiting request counts positions as computed"
        self._waiting.check_integrity()
        self._tables.check_integrity([request.table for request in running])
