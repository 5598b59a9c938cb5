"""The client takes what servers send, wherever it is cut, and says of each bad answer what was wrong with it."""

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load_client import Connection, Exchange, ExchangeFailed, LoadClient
from tests.bench.fake_server import DONE, EVENT, HEAD, Answer, chunked, plain, serving, stream, usage


def ask(answer: Answer, num_requests: int = 1, is_stream: bool = True, timeout_s: float = 10.0) -> list[Exchange]:
    """One request after the other; the last one's failure is raised."""

    async def run(address: tuple[str, int]) -> list[Exchange]:
        client = LoadClient(address, timeout_s)
        try:
            request = client.post("/v1/completions", b"{}")
            return [await client.send(request, is_stream) for _ in range(num_requests)]
        finally:
            await client.close()

    with serving(answer) as address:
        return asyncio.run(run(address))


def test_each_event_is_counted_and_timed_and_the_count_itself_is_no_event() -> None:
    [exchange] = ask(lambda _: [stream(5)])
    assert exchange.finish() == 5
    assert len(exchange.arrivals) == 5
    assert exchange.sent < exchange.arrivals[0] <= exchange.arrivals[-1] <= exchange.end


class Wire(asyncio.Transport):
    """Where requests go, and nothing comes back by itself."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False


@given(st.lists(st.integers(1, len(stream(3)) - 1)))
def test_it_does_not_matter_where_a_stream_is_cut(cuts: list[int]) -> None:
    async def run() -> Exchange:
        connection = Connection()
        connection.connection_made(Wire())
        exchange = asyncio.create_task(connection.exchange(b"", is_stream=True))
        await asyncio.sleep(0)
        for begin, end in pairwise([0, *sorted(cuts), len(stream(3))]):
            connection.data_received(stream(3)[begin:end])
        return await exchange

    exchange = asyncio.run(run())
    assert exchange.finish() == 3
    assert list(exchange.arrivals) == sorted(exchange.arrivals)


def test_events_are_taken_as_other_servers_write_them() -> None:
    body = EVENT.replace(b"\n", b"\r\n").replace(b"data: ", b"data:") + b": ping\r\n\r\n" + b"data:[DONE]\r\n\r\n"
    [exchange] = ask(lambda _: [HEAD + chunked(b"event: message\r\n" + body) + b"0\r\n\r\n"])
    assert exchange.finish() == 1  # no usage: events are what there is to count


def test_an_event_of_several_tokens_counts_its_tokens() -> None:
    [exchange] = ask(lambda _: [HEAD + chunked(EVENT, EVENT, usage(7), DONE) + b"0\r\n\r\n"])
    assert exchange.finish() == 7
    assert len(exchange.arrivals) == 2


def test_a_whole_answer_has_no_arrivals() -> None:
    body = b'{"choices":[{"text":"a b"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    [exchange] = ask(lambda _: [plain(200, body)], is_stream=False)
    assert exchange.finish() == 2
    assert not exchange.arrivals


def test_connections_are_kept_unless_the_server_closes_them() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    closing = head + chunked(EVENT, DONE) + b"0\r\n\r\n"
    answers = {0: [stream(1)], 1: [closing, b""], 2: [stream(2)]}
    assert [exchange.finish() for exchange in ask(lambda number: answers[number], 3)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("parts", "kind", "example"),
    [
        ([HEAD + chunked(EVENT), b""], "connection lost", "connection lost"),
        ([b""], "connection lost", "connection lost"),
        ([HEAD + chunked(EVENT, b'data: {"error":{"message":"gone"}}\n\n') + b"0\r\n\r\n"], "error event", "gone"),
        ([HEAD + chunked(EVENT, b'data: {"error":{"message":"cut"}}\n\n'), b""], "error event", "cut"),
        ([HEAD + chunked(EVENT, EVENT) + b"0\r\n\r\n"], "no event stream up to [DONE]", "choices"),
        ([HEAD + chunked(DONE) + b"0\r\n\r\n"], "no event stream up to [DONE]", ""),
        ([plain(200, b"<html>hello</html>")], "no event stream up to [DONE]", "<html>"),
        ([HEAD + chunked(b"data: nonsense\n\n", DONE) + b"0\r\n\r\n"], "wrong content", "nonsense"),
        ([plain(503, b'{"error":"loading"}')], "status 503", "loading"),
        ([plain(429, b'{"error":"full"}')], "status 429", "full"),
        ([b"SSH-2.0-OpenSSH\r\n"], "wrong content", "no HTTP"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(parts: list[bytes], kind: str, example: str) -> None:
    with pytest.raises(ExchangeFailed) as failure:
        ask(lambda _: parts)[0].finish()
    assert failure.value.kind == kind
    assert example in str(failure.value)


@pytest.mark.parametrize("body", [b"hello", b"{}", b'{"choices":[{"text":"a"}]}'])
def test_a_whole_answer_without_counts_is_wrong(body: bytes) -> None:
    with pytest.raises(ExchangeFailed) as failure:
        ask(lambda _: [plain(200, body)], is_stream=False)[0].finish()
    assert failure.value.kind == "wrong content"


def test_a_connection_that_is_lost_before_it_is_used_is_no_timeout() -> None:
    class Closed(Wire):
        def is_closing(self) -> bool:
            return True

    async def run() -> None:
        connection = Connection()
        connection.connection_made(Closed())
        connection.connection_lost(None)
        await asyncio.wait_for(connection.exchange(b"", is_stream=True), 5)

    with pytest.raises(ExchangeFailed) as failure:
        asyncio.run(run())
    assert failure.value.kind == "connection lost"


def test_a_server_that_hangs_is_given_up() -> None:
    begin = time.monotonic()
    with pytest.raises(ExchangeFailed) as failure:
        ask(lambda _: [HEAD + chunked(EVENT)], timeout_s=0.1)
    assert failure.value.kind == "timeout"
    assert time.monotonic() - begin < 5


def test_a_connection_that_was_given_up_is_not_used_again() -> None:
    answers = {0: [HEAD + chunked(EVENT)], 1: [stream(4)]}

    async def run(address: tuple[str, int]) -> int:
        client = LoadClient(address, 0.2)
        request = client.post("/v1/completions", b"{}")
        with pytest.raises(ExchangeFailed):
            await client.send(request, is_stream=True)
        exchange = await client.send(request, is_stream=True)
        await client.close()
        return exchange.finish()

    with serving(lambda number: answers[number]) as address:
        assert asyncio.run(run(address)) == 4


def test_nobody_who_listens_is_a_failure_of_the_request() -> None:
    with serving(lambda _: []) as address:
        pass

    async def run() -> None:
        client = LoadClient(address, 1.0)
        await client.connect(3)  # says nothing
        await client.send(b"", is_stream=False)

    with pytest.raises(ExchangeFailed) as failure:
        asyncio.run(run())
    assert failure.value.kind == "no connection"
