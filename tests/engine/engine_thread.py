"""A whole engine in a thread of the test: the real loop, sockets and scheduler over the simulated runner."""

import queue
import socket
import threading

from server.engine.core import EngineLoop
from server.engine.peers import Peers
from server.kv.block_tables import BlockTables
from server.launch.board import Board, ModelState
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import StepPlan, StepResult
from server.scheduler.scheduler import Scheduler
from tests.scheduler.simulator import EOS_ID, SimulatedRunner

LIMITS = SchedulerLimits(
    max_model_len=2000, max_num_requests=8, max_batched_tokens=64, max_waiting_requests=64, max_waiting_tokens=4096
)
NUM_BLOCKS, BLOCK_SIZE = 2000, 4


class Killed(Exception):
    """Raised in the engine's thread instead of a signal."""


class _Pending:
    def __init__(self, result: StepResult, *, done_at_once: bool) -> None:
        self._result, self._done_at_once = result, done_at_once

    def is_done(self) -> bool:
        return self._done_at_once

    def wait(self) -> StepResult:
        return self._result


class ThreadRunner:
    """The simulated runner behind the loop's interface. Each step takes one permit, so tests decide how far it goes."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, *, pipelined: bool) -> None:
        self._simulated = SimulatedRunner(num_blocks, BLOCK_SIZE, limits)
        self._pipelined = pipelined
        self.permits: queue.SimpleQueue[Exception | None] | None = None
        self.plans: list[StepPlan] = []

    graph_size = num_graphs = num_graphs_wanted = 0

    def prepare(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> _Pending:
        self.plans.append(plan)
        if self.permits is not None:
            error = self.permits.get(timeout=10)
            if error is not None:
                raise error
        return _Pending(self._simulated.execute(plan), done_at_once=not self._pipelined)


class EngineThread:
    """Start with `start`; `kill` ends it without a word to anybody, as SIGKILL would."""

    def __init__(
        self,
        listener: socket.socket,
        board: Board,
        *,
        pipelined: bool = True,
        gated: bool = False,
        limits: SchedulerLimits = LIMITS,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.board = board
        self.tables = BlockTables(num_blocks, BLOCK_SIZE, prefix_cache=True)
        self.scheduler = Scheduler(self.tables, limits, {EOS_ID})
        self.runner = ThreadRunner(limits, num_blocks, pipelined=pipelined)
        if gated:
            self.runner.permits = queue.SimpleQueue()
        self.loop = EngineLoop(Peers(listener, pid=1), self.scheduler, self.runner, board, drain_limit_s=5)
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "EngineThread":
        self.board.model_state = ModelState.READY
        self.board.ready_at = 1.0
        self._thread.start()
        return self

    def permit(self, num_steps: int) -> None:
        """Let a gated engine run this many more steps."""
        assert self.runner.permits is not None
        for _ in range(num_steps):
            self.runner.permits.put(None)

    def open_gate(self) -> None:
        """Let a gated engine run freely."""
        permits, self.runner.permits = self.runner.permits, None
        assert permits is not None
        permits.put(None)

    def kill(self) -> None:
        self._killed.set()
        if self.runner.permits is not None:
            self.runner.permits.put(Killed())
        self.join()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        turn = self.loop.turn

        def turn_or_die() -> None:
            if self._killed.is_set():
                raise Killed
            turn()

        self.loop.turn = turn_or_die  # type: ignore[method-assign]
        try:
            self.loop.run()
        except Killed:
            self.board.model_state = ModelState.NONE
