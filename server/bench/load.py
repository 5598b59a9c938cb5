"""`model-server bench load`: users that send one request after the other, or requests at a rate, against one server.

Yields one LoadRun per repetition of each load; what they mean together and how they are shown is
server.bench.load_report's matter.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import uvloop

from server.bench.http import Address
from server.bench.load_client import ExchangeFailed, LoadClient
from server.bench.load_figures import (
    Failures,
    Figures,
    Record,
    closed_window,
    failures_of,
    figures_of,
    open_window,
    steady_figures,
)
from server.bench.load_probes import Probes, disturb, probe_health, probes_of
from server.bench.load_requests import PATH, RequestMaker, Shape
from server.bench.server_memory import Memory, MemoryWatch
from server.bench.server_process import BenchFailed

_AFTER_FAILURE_S = 0.1  # a user whose request failed waits: a server that refuses at once would be asked without end
_WARMUP_USERS = 32  # of an open loop, whose users are not known


@dataclass(frozen=True, slots=True)
class Load:
    """`users` > 0: a closed loop of so many; else an open loop of `rate` requests/s on average."""

    users: int
    rate: float
    is_stream: bool

    @property
    def name(self) -> str:
        """For tables."""
        if not self.users:
            return f"{self.rate:g} requests/s"
        return "1 user" if self.users == 1 else f"{self.users} users"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send. A closed loop ends after `num_rounds` of each user, an open one after `num_requests`, or both when
    `duration_s` > 0 is over. `spreads_start`: users begin one after the other within the time of a request."""

    loads: Sequence[Load]
    shape: Shape
    token_ids: range
    model: str = ""
    num_rounds: int = 10
    num_requests: int = 1000
    duration_s: float = 0.0
    num_repeats: int = 1
    num_warmup_rounds: int = 1
    spreads_start: bool = False
    disturb_tokens: int = 0
    disturb_every_s: float = 1.0
    probes_health: bool = False
    timeout_s: float = 300.0
    seed: int = 0


_WHOLE = Load(1, 0.0, is_stream=False)


class ClientShare(msgspec.Struct, frozen=True):
    """What the client itself did: had it been the bottleneck, it would show here.

    `cpu_share`: of one core. `max_late_ms`: by how much a request of an open loop was sent after its time.
    """

    cpu_share: float
    events_per_s: float
    max_late_ms: float


class LoadRun(msgspec.Struct, frozen=True):
    """One repetition of one load. `all`: started together, from the first request to the last answer."""

    load: str
    users: int
    rate: float
    is_stream: bool
    repeat: int
    all: Figures | None
    steady: Figures | None
    errors: dict[str, Failures]
    client: ClientShare
    memory: Memory | None
    health: Probes | None
    disturbance: Probes | None

    @property
    def num_failed(self) -> int:
        """Requests of the load and of the probes beside it."""
        probes = [one.errors for one in (self.health, self.disturbance) if one is not None]
        return sum(failures.count for errors in (self.errors, *probes) for failures in errors.values())


def measure_load(address: Address, plan: LoadPlan, session: int | None) -> Iterator[LoadRun]:
    """All loads, then all again for each repeat, so that a machine that changes changes all of them. `session`: of
    the server's processes, where their memory is known. Raises BenchFailed when nothing at all is answered."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        client = LoadClient(address, plan.timeout_s)
        try:
            latencies = {}
            for repeat in range(plan.num_repeats):
                for number, load in enumerate(plan.loads):
                    if not repeat:
                        latencies[load] = runner.run(
                            _warm_up(_Sender(client, plan, load, (plan.seed, number)), plan, load)
                        )
                    seed = (plan.seed, number, 1 + repeat)
                    watch = None if session is None else MemoryWatch(session)
                    with _no_collections(), watch or nullcontext():
                        measured = runner.run(_measure(client, plan, load, seed, latencies[load]))
                    yield _run_of(load, repeat, measured, None if watch is None else watch.result())
        finally:
            runner.run(client.close())


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection would stop the client's clock for its time; what a run makes is dropped after it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Sender:
    """Sends requests of one load and keeps a record of each."""

    def __init__(self, client: LoadClient, plan: LoadPlan, load: Load, seed: Sequence[int]) -> None:
        self.client = client
        self.records: list[Record] = []
        self._is_stream = load.is_stream
        self._maker = RequestMaker(plan.shape, plan.token_ids, plan.model, seed)
        self._expected_tokens = plan.shape.expected_tokens

    def next_request(self) -> bytes:
        """The bytes of a request, ready to be sent."""
        return self.client.post(PATH, self._maker.next_body(self._is_stream))

    async def send(self, request: bytes, user: int, begin: float | None = None) -> Record:
        """Send it and wait for its answer. `begin`: what its time counts from; not given: the sending."""
        record = Record(user, time.perf_counter() if begin is None else begin)
        self.records.append(record)
        try:
            exchange = await self.client.send(request, self._is_stream)
            if begin is None:
                record.begin = exchange.sent
            record.late_s = exchange.sent - record.begin
            record.end, record.arrivals = exchange.end, exchange.arrivals
            record.num_tokens = exchange.finish()
            if record.num_tokens != self._expected_tokens:
                raise ExchangeFailed(
                    "wrong number of tokens", f"{record.num_tokens} instead of {self._expected_tokens}"
                )
        except ExchangeFailed as error:
            record.error, record.example = error.kind, str(error)
            record.end = record.end or time.perf_counter()
        return record


async def _warm_up(sender: _Sender, plan: LoadPlan, load: Load) -> float:
    """Rounds that do not count. The median latency. Raises BenchFailed unless something was answered."""
    num_users = load.users or _WARMUP_USERS
    if plan.num_warmup_rounds:
        await _closed_loop(sender, num_users, plan.num_warmup_rounds, 0.0, 0.0)
    else:
        await _closed_loop(sender, 1, 1, 0.0, 0.0)
    figures = figures_of(sender.records)
    if figures is None:
        first = sender.records[0]
        raise BenchFailed(f"no request of the warm-up was answered well; the first: {first.error}: {first.example}")
    return figures.latency_ms.p50 / 1e3


async def _closed_loop(
    sender: _Sender, num_users: int, num_rounds: int, duration_s: float, start_within_s: float
) -> None:
    """All users, until each has sent its rounds, or for a time."""
    await sender.client.connect(num_users)
    first = [sender.next_request() for _ in range(num_users)]
    begin = time.perf_counter()

    async def run(user: int) -> None:
        await asyncio.sleep(start_within_s * user / num_users)
        request = first[user]
        for number in count(1):
            record = await sender.send(request, user)
            is_over = time.perf_counter() - begin >= duration_s if duration_s else number >= num_rounds
            if is_over:
                return
            if record.error:
                await asyncio.sleep(_AFTER_FAILURE_S)
            request = sender.next_request()

    await asyncio.gather(*map(run, range(num_users)))


def poisson_times(rate: float, seed: Sequence[int], num_requests: int, duration_s: float) -> list[float]:
    """When to send, in seconds from the begin: independent arrivals, so many or for so long."""
    random = np.random.default_rng(seed)
    if duration_s:  # given their number, the arrivals of a Poisson process are uniform
        return sorted(random.uniform(0.0, duration_s, random.poisson(rate * duration_s)).tolist())
    times: list[float] = np.cumsum(random.exponential(1 / rate, num_requests)).tolist()
    return times


async def _open_loop(sender: _Sender, times: Sequence[float]) -> None:
    """Each request at its time, however many are still unanswered."""
    await sender.client.connect(_WARMUP_USERS)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for user, offset in enumerate(times):
            request = sender.next_request()
            if (wait_s := begin + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(sender.send(request, user, begin + offset))


@dataclass(frozen=True, slots=True)
class _Measured:
    records: list[Record]
    health: list[Record]
    disturbance: list[Record]
    cpu_share: float


async def _measure(client: LoadClient, plan: LoadPlan, load: Load, seed: Sequence[int], latency_s: float) -> _Measured:
    """One repetition, with its probes beside it."""
    sender = _Sender(client, plan, load, seed)
    health: list[Record] = []
    long_prompts = _Sender(client, replace(plan, shape=Shape(plan.disturb_tokens or 1, 1)), _WHOLE, (*seed, 1))
    probes: list[Coroutine[Any, Any, None]] = []
    if plan.probes_health:
        probes.append(probe_health(client, health))
    if plan.disturb_tokens:
        probes.append(
            disturb(lambda number: long_prompts.send(long_prompts.next_request(), number), plan.disturb_every_s)
        )
    begin, begin_cpu = time.perf_counter(), time.process_time()
    async with _beside(probes):
        if load.users:
            start_within_s = latency_s if plan.spreads_start else 0.0
            await _closed_loop(sender, load.users, plan.num_rounds, plan.duration_s, start_within_s)
        else:
            await _open_loop(sender, poisson_times(load.rate, seed, plan.num_requests, plan.duration_s))
    cpu_share = (time.process_time() - begin_cpu) / (time.perf_counter() - begin)
    return _Measured(sender.records, health, long_prompts.records, cpu_share)


@asynccontextmanager
async def _beside(probes: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs them until the block is left, which cancels them. One that fails makes the block fail after its end."""
    tasks = [asyncio.create_task(probe) for probe in probes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _run_of(load: Load, repeat: int, measured: _Measured, memory: Memory | None) -> LoadRun:
    records = measured.records
    window = closed_window(records) if load.users else open_window(records)
    whole = figures_of(records)
    num_events = sum(len(record.arrivals) for record in records)
    client = ClientShare(
        cpu_share=measured.cpu_share,
        events_per_s=num_events / whole.seconds if whole else 0.0,
        max_late_ms=max((record.late_s for record in records), default=0.0) * 1e3,
    )
    return LoadRun(
        load=load.name,
        users=load.users,
        rate=load.rate,
        is_stream=load.is_stream,
        repeat=repeat,
        all=whole,
        steady=steady_figures(records, window),
        errors=failures_of(records),
        client=client,
        memory=memory,
        health=probes_of(measured.health) if measured.health else None,
        disturbance=probes_of(measured.disturbance) if measured.disturbance else None,
    )
