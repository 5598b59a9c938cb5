"""The engine loop: read sockets, schedule, submit, read results one step late, send.

Owns the order of these five and nothing else: policy is the scheduler's, tensors are the runner's, bytes the peers'.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Protocol

import msgspec

from server.engine.messages import Abort, Outputs, Submit, TokenOutput
from server.engine.peers import Peer, Peers
from server.launch.board import MAX_EXECUTING, Board, StopMode
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.05
PREPARE_AFTER_S = 0.1  # of idleness: whoever sends one request after the other should not wait for preparations


class PendingStep(Protocol):
    """A submitted step whose results are not read yet."""

    def is_done(self) -> bool: ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """What the loop needs of a model runner."""

    @property
    def graph_size(self) -> int: ...

    @property
    def num_graphs(self) -> int: ...

    @property
    def num_graphs_wanted(self) -> int: ...

    def submit(self, plan: StepPlan) -> PendingStep: ...

    def prepare(self) -> bool:
        """Do a piece of work that later steps will be glad of; False if there is none left."""
        ...


class EngineLoop:
    """Runs until the service stops: a drain ends with the last web worker's connection or at the drain limit."""

    def __init__(self, peers: Peers, scheduler: Scheduler, runner: Runner, board: Board, drain_limit_s: float) -> None:
        self._peers = peers
        self._scheduler = scheduler
        self._runner = runner
        self._board = board
        self._drain_limit_s = drain_limit_s
        self._owners: dict[int, Peer] = {}
        self._arrivals: dict[int, float] = {}  # request id -> when it came, until its first step
        self._queue_ms: dict[int, float] = {}  # request id -> its wait, until its first output
        self._in_flight: deque[PendingStep] = deque()
        self._idle_since = time.monotonic()

    def run(self) -> None:
        """Loop until the board says stop. Exceptions of the runner are the caller's: the engine is dead then."""
        try:
            while not self._is_stopping():
                self.turn()
        finally:
            self._peers.close()

    def turn(self) -> None:
        """One iteration. At most one step is in flight while the next is scheduled and submitted."""
        self._read_messages(0.0 if self._has_work() or self._prepare() else IDLE_POLL_S)
        plan = self._scheduler.schedule()
        if plan is not None:
            self._submit(plan)
        # A result is read as soon as it is there, at the latest when the next step has been submitted.
        while self._in_flight and (plan is None or len(self._in_flight) > 1 or self._in_flight[0].is_done()):
            self._deliver(self._in_flight.popleft().wait())
        self._peers.flush()
        self._abort_lost()
        self._write_board()

    def _has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    def _prepare(self) -> bool:
        """Whether a preparation was made: then the next one may follow at once, if nobody wants anything."""
        return time.monotonic() - self._idle_since >= PREPARE_AFTER_S and self._runner.prepare()

    def _read_messages(self, timeout_s: float) -> None:
        for peer, message in self._peers.poll(timeout_s):
            if isinstance(message, Submit):
                self._add(peer, message)
            else:
                self._abort(peer, message)
        self._abort_lost()

    def _add(self, peer: Peer, submit: Submit) -> None:
        if submit.request_id in self._owners:
            refusal: TokenOutput | None = _refusal(submit.request_id, "this request id is running already")
        else:
            refusal = self._scheduler.add(submit)
        if refusal is not None:
            self._peers.send(peer, Outputs(self._board.step, [refusal]))
            return
        self._owners[submit.request_id] = peer
        self._arrivals[submit.request_id] = time.monotonic()
        peer.request_ids.add(submit.request_id)

    def _abort(self, peer: Peer, abort: Abort) -> None:
        if abort.request_id in peer.request_ids:  # a peer speaks for its own requests only
            self._forget(abort.request_id)
            self._scheduler.abort(abort.request_id)

    def _abort_lost(self) -> None:
        for peer in self._peers.take_lost():
            for request_id in tuple(peer.request_ids):
                self._forget(request_id)
                self._scheduler.abort(request_id)

    def _forget(self, request_id: int) -> None:
        self._owners.pop(request_id).request_ids.discard(request_id)
        self._arrivals.pop(request_id, None)
        self._queue_ms.pop(request_id, None)

    def _submit(self, plan: StepPlan) -> None:
        board = self._board
        request_ids = [chunk.request_id for chunk in plan.chunks[:MAX_EXECUTING]]
        board.executing[: len(request_ids)] = request_ids
        board.num_executing = len(request_ids)
        self._note_starts(plan)
        board.step = plan.step
        try:
            self._in_flight.append(self._runner.submit(plan))
        finally:
            board.graph_size = self._runner.graph_size
        board.engine_beat = time.monotonic()

    def _note_starts(self, plan: StepPlan) -> None:
        """A request gets its slot in its first step, and again after a preemption, which is no wait of the queue's."""
        for reset in plan.resets:
            if (arrival := self._arrivals.pop(reset.request_id, None)) is not None:
                self._queue_ms[reset.request_id] = (time.monotonic() - arrival) * 1e3

    def _deliver(self, result: StepResult) -> None:
        self._board.engine_beat = time.monotonic()
        for peer, items in self._by_peer(self._scheduler.update(result)):
            self._peers.send(peer, Outputs(result.step, items))

    def _by_peer(self, outputs: Iterable[TokenOutput]) -> Iterable[tuple[Peer, list[TokenOutput]]]:
        groups: defaultdict[Peer, list[TokenOutput]] = defaultdict(list)
        owners, waits = self._owners, self._queue_ms
        for output in outputs:
            peer = owners.get(output.request_id)
            if peer is None:
                continue
            if waits and (queue_ms := waits.pop(output.request_id, None)) is not None:
                output = msgspec.structs.replace(output, queue_ms=queue_ms)
            groups[peer].append(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return groups.items()

    def _write_board(self) -> None:
        board, scheduler = self._board, self._scheduler
        now = time.monotonic()
        if self._has_work():
            self._idle_since = now
        else:
            board.num_executing = 0
            board.engine_beat = now  # idle is not stalled
        board.num_graphs = self._runner.num_graphs
        board.num_graphs_wanted = self._runner.num_graphs_wanted
        board.num_running = scheduler.num_running
        board.num_waiting = scheduler.num_waiting
        board.num_free_kv_blocks = scheduler.num_free_blocks
        board.num_preemptions = scheduler.num_preemptions
        board.prefix_query_tokens = scheduler.prefix_query_tokens
        board.prefix_hit_tokens = scheduler.prefix_hit_tokens
        board.num_prompt_tokens = scheduler.num_prompt_tokens
        board.num_generated_tokens = scheduler.num_generated_tokens

    def _is_stopping(self) -> bool:
        board = self._board
        if board.stop == StopMode.NONE:
            return False
        if board.stop == StopMode.QUICK or not len(self._peers):
            return True
        return bool(time.monotonic() - board.stop_at > self._drain_limit_s)


def _refusal(request_id: int, reason: str) -> TokenOutput:
    return TokenOutput(request_id, -1, float("nan"), "refused", reason)
