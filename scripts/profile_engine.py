#!/usr/bin/env python3
"""Host time of the engine loop's turns over a runner that computes nothing: scheduling, results, messages, the board.

Left out: the runner (scripts/profile_submit.py) and the other side of the sockets.
In a steady state a request ends and another begins in about each step, at 128 + 128 tokens; "decodes" has none of that.

    scripts/profile_engine.py [--steps 400] [--profile CASE]
"""

import argparse
import cProfile
import gc
import pstats
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.engine.core import EngineLoop
from server.engine.messages import Outputs, SamplingParams, Submit, encode_frame, take_frames
from server.engine.peers import Peers
from server.kv.block_tables import BlockTables
from server.launch.board import Board
from server.launch.garbage import resume_collector
from server.ops.interface import SampledTokens
from server.runner.model_runner import PendingStep
from server.scheduler.budget import SchedulerLimits
from server.scheduler.plan import StepPlan
from server.scheduler.scheduler import Scheduler

LIMITS = SchedulerLimits(32768, 256, 512, 4096, 1 << 22, 2048, 192, 64)
NUM_BLOCKS, BLOCK_SIZE = 1 << 14, 16
NUM_PROMPT, NUM_OUTPUTS = 128, 128
WARM_UP_STEPS = 50


class Ids:
    """Tokens that are there at once."""

    def __init__(self, count: int, token_id: int) -> None:
        self._tokens = SampledTokens([token_id] * count, [-0.5] * count, [True] * count)

    def is_done(self) -> bool:
        """Not before the next step has been submitted, as on a device that is always busy."""
        return False

    def wait(self) -> SampledTokens:
        return self._tokens


class NullRunner:
    """Answers each plan with the same token for everybody."""

    graph_size = num_graphs = num_graphs_wanted = 0

    def prepare(self) -> bool:
        return False

    def submit(self, plan: StepPlan) -> PendingStep:
        return PendingStep(plan, Ids(len(plan.chunks), plan.step % 1000))


class Web:
    """The other ends: they submit requests and replace those that have ended."""

    def __init__(self, path: str, num_peers: int, num_outputs: int) -> None:
        self._sockets = [socket.socket(socket.AF_UNIX) for _ in range(num_peers)]
        self._inboxes = [bytearray() for _ in range(num_peers)]
        self._num_outputs = num_outputs
        self._num_sent = 0
        for sock in self._sockets:
            sock.connect(path)
            sock.setblocking(False)

    def submit(self, peer: int, num_outputs: int | None = None) -> None:
        self._num_sent += 1
        ids = [(self._num_sent * 7919 + i * i) % 50000 for i in range(NUM_PROMPT)]
        sampling = SamplingParams(max_tokens=num_outputs or self._num_outputs, ignore_eos=True)
        self._sockets[peer].send(encode_frame(Submit(self._num_sent, ids, NUM_PROMPT, sampling)))

    def start(self, num_requests: int) -> Iterator[None]:
        """One request after the other, spread over their outputs if they end at all, so that not all do so together."""
        for index in range(num_requests):
            shortest = self._num_outputs * (index + 1) // num_requests
            self.submit(index % len(self._sockets), shortest if self._num_outputs == NUM_OUTPUTS else None)
            yield

    def read(self, *, replace: bool) -> None:
        for peer, sock in enumerate(self._sockets):
            try:
                self._inboxes[peer] += sock.recv(1 << 20)
            except BlockingIOError:
                continue
            messages = take_frames(self._inboxes[peer])
            if replace:
                for message in messages:
                    if isinstance(message, Outputs):
                        for _ in range(sum(item.finish_reason is not None for item in message.items)):
                            self.submit(peer)


@dataclass
class Case:
    num_requests: int
    num_peers: int
    num_outputs: int = 1 << 14
    replace: bool = False


CASES = {
    "1 decode, 1 peer": Case(1, 1),
    "32 decodes, 1 peer": Case(32, 1),
    "100 decodes, 4 peers": Case(100, 4),
    "256 decodes, 1 peer": Case(256, 1),
    "256 decodes, 4 peers": Case(256, 4),
    "100 steady, 4 peers": Case(100, 4, NUM_OUTPUTS, replace=True),
    "256 steady, 4 peers": Case(256, 4, NUM_OUTPUTS, replace=True),
}
PARTS = ("schedule", "update", "send", "flush", "read", "board", "turn")


class Clocks:
    """Wraps methods of instances; times of each per turn."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def time(self, owner: Any, method: str, part: str) -> None:
        inner, seconds = getattr(owner, method), self.seconds

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args)
            finally:
                seconds[part] += time.perf_counter() - begin

        setattr(owner, method, timed)


@contextmanager
def running(case: Case) -> Iterator[tuple[EngineLoop, Scheduler, Peers, Web]]:
    """A loop with all requests decoding."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/engine"
        listener.bind(path)
        listener.listen(8)
        tables = BlockTables(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True)
        scheduler, peers = Scheduler(tables, LIMITS, ()), Peers(listener, 1)
        loop = EngineLoop(peers, scheduler, NullRunner(), Board.create(), 1.0)
        web = Web(path, case.num_peers, case.num_outputs)
        while len(peers) < case.num_peers:
            loop._read_messages(0.0)
        for _ in web.start(case.num_requests):
            loop._read_messages(0.0)
        for _ in range(WARM_UP_STEPS):
            loop.turn()
            web.read(replace=case.replace)
        yield loop, scheduler, peers, web


def measure(case: Case, num_steps: int) -> str:
    """The lowest tenth of each part, in us: what is slower is mostly other work on the machine. The median in all."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    with running(case) as (loop, scheduler, peers, web):
        clocks = Clocks()
        clocks.time(scheduler, "schedule", "schedule")
        clocks.time(scheduler, "update", "update")
        clocks.time(peers, "send", "send")
        clocks.time(peers, "flush", "flush")
        clocks.time(loop, "_read_messages", "read")
        clocks.time(loop, "_write_board", "board")
        clocks.time(loop, "turn", "turn")
        for _ in range(num_steps):
            clocks.seconds.clear()
            loop.turn()
            for part in PARTS:
                samples[part].append(clocks.seconds[part] * 1e6)
            web.read(replace=case.replace)
    low = {part: statistics.quantiles(times, n=10)[0] for part, times in samples.items()}
    parts = "  ".join(f"{part} {low[part]:5.0f}" for part in PARTS if low[part])
    return f"{parts}  median {statistics.median(samples['turn']):5.0f} us"


def profile(case: Case, num_steps: int) -> None:
    """Where the time goes."""
    profiler = cProfile.Profile()
    with running(case) as (loop, _, _, web):
        for _ in range(num_steps):
            profiler.runcall(loop.turn)
            web.read(replace=case.replace)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="measured steps per case")
    parser.add_argument("--profile", choices=CASES, help="profile this case instead")
    options = parser.parse_args()
    gc.collect()
    resume_collector()  # as in a model worker
    if options.profile:
        profile(CASES[options.profile], options.steps)
        return
    for name, case in CASES.items():
        sys.stdout.write(f"{name:22} {measure(case, options.steps)}\n")


if __name__ == "__main__":
    main()
