"""Two hundred streams at once, some of whose clients leave: everyone gets one end, and nothing stays behind."""

import asyncio
import json
import random
import time
from pathlib import Path

import httpx
import pytest

from tests.process.conftest import StartService
from tests.process.harness import ProcessService

NUM_STREAMS = 200
NUM_WAVES = 3
MEMORY_SLACK_MIB = 8  # heaps settle within it over thousands of requests: 4 MiB were seen


async def stream(client: httpx.AsyncClient, prompt: str, num_tokens: int, leave_after: int | None) -> list[int]:
    """Token ids of a stream, read to its end or until its client leaves."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens}}
    token_ids: list[int] = []
    num_finals = 0
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            event = json.loads(line[5:])
            assert "error" not in event, event
            assert not num_finals, "an event after the final one"
            token_ids.append(event["token"]["id"])
            num_finals += event["generated_text"] is not None
            if leave_after is not None and len(token_ids) > leave_after:
                return token_ids
    assert num_finals == 1
    assert len(token_ids) == num_tokens
    return token_ids


async def wave(service: ProcessService, seed: int) -> dict[str, list[int]]:
    """NUM_STREAMS at once; those that were read to their end, by prompt."""
    rng = random.Random(seed)
    address = service.address()
    assert address is not None
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", limits=limits, timeout=60) as client:
        calls = [
            (f"{number} the sea was {'x' * rng.randrange(60)}", rng.randrange(1, 40), rng.choice([None, None, 0, 2, 9]))
            for number in range(NUM_STREAMS)
        ]
        results = await asyncio.gather(*(stream(client, *call) for call in calls))
    return {prompt: ids for (prompt, _, leave), ids in zip(calls, results, strict=True) if leave is None}


def wait_until_idle(service: ProcessService) -> None:
    board = service.wait_for(
        lambda board: board.num_running == board.num_waiting == board.num_executing == 0, "an idle engine", 10
    )
    assert board.num_free_kv_blocks == board.num_kv_blocks


def resident_mib(service: ProcessService) -> dict[int, float]:
    """Resident memory by process. Not the private part: pages become private when a sibling writes its copy."""
    sizes = {}
    for pid in service.processes():
        [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
        sizes[pid] = int(line.split()[1]) / 1024
    return sizes


@pytest.mark.slow
def test_two_hundred_streams_with_clients_that_leave(start: StartService) -> None:
    service = start(server__web_workers=2, engine__max_num_requests=64, kv__prefix_cache=True).wait_ready()
    first = asyncio.run(wave(service, seed=1))
    asyncio.run(wave(service, seed=2))
    wait_until_idle(service)
    before = resident_mib(service)
    for seed in range(3, 3 + NUM_WAVES):
        asyncio.run(wave(service, seed))
    again = asyncio.run(wave(service, seed=1))
    wait_until_idle(service)
    assert again == first, "the same prompts gave other tokens under other neighbours"
    after = resident_mib(service)
    assert after.keys() == before.keys(), "a process was replaced"
    growth = {pid: after[pid] - before[pid] for pid in before}
    assert max(growth.values()) < MEMORY_SLACK_MIB, growth
    assert service.get("/health") == 200
    begin = time.monotonic()
    assert service.end(15).exit_code == 0
    assert time.monotonic() - begin < 5
