"""Event streams at the level of ASGI: pings while silent, one end, cleaning up whatever happens."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from server.api.sse import EventStream, unless_disconnected


async def never_disconnected():
    await asyncio.Event().wait()


def run_stream(chunks, receive=never_disconnected, ping_interval_s=0.01):
    sent, closed = [], []

    async def send(message):
        sent.append(message)

    async def main():
        stream = EventStream(chunks(), lambda: closed.append(1), {"x-test": "1"}, ping_interval_s)
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)

    asyncio.run(main())
    assert closed == [1]
    return sent


def test_silence_is_filled_with_comments():
    pings = 0

    async def chunks():
        yield b"data: 1\n\n"
        await asyncio.sleep(0.05)
        yield b"data: 2\n\n"

    sent = run_stream(chunks)
    bodies = [message["body"] for message in sent[1:]]
    pings = bodies.count(b": ping\n\n")
    assert pings >= 2
    assert [body for body in bodies if body != b": ping\n\n"] == [b"data: 1\n\n", b"data: 2\n\n", b""]
    assert [message.get("more_body") for message in sent] == [None, *[True] * (pings + 2), False]


def test_busy_stream_has_no_comments():
    async def chunks():
        for _ in range(100):
            await asyncio.sleep(0)
            yield b"data: 1\n\n"

    sent = run_stream(chunks, ping_interval_s=5)
    assert len(sent) == 102


def test_headers_come_before_the_first_event():
    async def chunks():
        yield b"x"

    start = run_stream(chunks)[0]
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-test"] == b"1"


def test_disconnect_stops_the_source():
    stopped = []

    async def chunks():
        try:
            yield b"1"
            await asyncio.Event().wait()
        finally:
            stopped.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    sent = run_stream(chunks, receive)
    assert stopped == [True]
    assert sent[-1].get("more_body", True)


def test_work_ends_with_its_client():
    events = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    async def main():
        with pytest.raises(ClientDisconnect):
            await unless_disconnected(receive, work())

    asyncio.run(main())
    assert events == ["cancelled"]


def test_finished_work_wins_and_its_errors_pass():
    async def work(fails):
        if fails:
            raise ValueError("no")
        return 5

    async def main():
        assert await unless_disconnected(never_disconnected, work(fails=False)) == 5
        with pytest.raises(ValueError, match="no"):
            await unless_disconnected(never_disconnected, work(fails=True))
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
