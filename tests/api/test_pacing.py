"""Requests that come together begin one after the other, and whatever else the event loop has to do comes between."""

import asyncio
import itertools

import pytest

from server.api.pacing import Pacing


class Recorder:
    """An app that notes in which turn of the loop each request began."""

    def __init__(self):
        self.turn = 0
        self.begun = []

    async def __call__(self, scope, receive, send):
        self.begun.append((scope["path"], self.turn))

    async def count_turns(self):
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def run(scenario):
    async def main():
        app = Recorder()
        paced = Pacing(app)
        counter = asyncio.create_task(app.count_turns())
        await asyncio.sleep(0)

        def begin(path, method="POST"):
            return asyncio.create_task(paced({"type": "http", "method": method, "path": path}, None, None))

        await asyncio.wait_for(scenario(app, begin), 10)
        counter.cancel()
        return app.begun

    return asyncio.run(main())


def test_one_begins_in_a_turn_first_come_first_served():
    async def scenario(app, begin):
        await asyncio.gather(*(begin(f"/{number}") for number in range(20)))

    begun = run(scenario)
    assert [path for path, _ in begun] == [f"/{number}" for number in range(20)]
    turns = [turn for _, turn in begun]
    assert all(later > earlier for earlier, later in itertools.pairwise(turns))


def test_who_comes_alone_waits_for_nothing():
    async def scenario(app, begin):
        for number in range(3):
            request = begin(f"/{number}")
            await asyncio.sleep(0)
            assert request.done()
            await asyncio.sleep(0)

    assert len(run(scenario)) == 3


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_pass_those_that_wait(method):
    async def scenario(app, begin):
        posts = [begin("/generate") for _ in range(10)]
        await asyncio.sleep(0)
        await begin("/health", method)
        assert sum(path == "/generate" for path, _ in app.begun) < 5
        await asyncio.gather(*posts)

    assert len(run(scenario)) == 11


def test_who_left_meanwhile_takes_no_turn_and_blocks_nobody():
    async def scenario(app, begin):
        requests = [begin(f"/{number}") for number in range(4)]
        await asyncio.sleep(0)
        for number in (1, 2, 3):
            requests[number].cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await begin("/later")

    assert [path for path, _ in run(scenario)] == ["/0", "/later"]
