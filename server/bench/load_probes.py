"""What runs beside a load and asks how the server bears it: GET /health now and then, and long prompts in between.

Both measure on the load's own event loop, so a time here holds the client's own delays too.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import msgspec

from server.bench.load_client import ExchangeFailed, LoadClient
from server.bench.load_figures import Failures, Record, Spread, failures_of, spread_ms

HEALTH_EVERY_S = 0.02


class Probes(msgspec.Struct, frozen=True):
    """Of requests beside the load. `ms`: from connecting (health) or sending (long prompts) to the whole answer."""

    num_good: int
    ms: Spread | None
    errors: dict[str, Failures]


def probes_of(records: list[Record]) -> Probes:
    """Summed up, without those that were cut off by the end of the load."""
    good = [record for record in records if record.end and not record.error]
    return Probes(len(good), spread_ms(record.end - record.begin for record in good), failures_of(records))


async def probe_health(client: LoadClient, records: list[Record], every_s: float = HEALTH_EVERY_S) -> None:
    """GET /health over and over, each on a connection of its own as probes do it, until cancelled."""
    while True:
        record = Record(0, time.perf_counter())
        records.append(record)
        try:
            exchange = await client.get_once("/health")
            record.end = exchange.end
            record.error = "" if exchange.status == 200 else f"status {exchange.status}"
        except ExchangeFailed as error:
            record.error, record.example = error.kind, str(error)
        await asyncio.sleep(max(0.0, record.begin + every_s - time.perf_counter()))


async def disturb(send: Callable[[int], Coroutine[Any, Any, object]], every_s: float) -> None:
    """Something, given its number, every `every_s` seconds, whether the last was answered or not, until cancelled."""
    begin = time.perf_counter() + every_s / 2
    async with asyncio.TaskGroup() as tasks:
        for number in count():
            await asyncio.sleep(max(0.0, begin + number * every_s - time.perf_counter()))
            tasks.create_task(send(number))
