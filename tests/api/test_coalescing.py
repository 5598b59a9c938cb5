"""Event streams whose engine, event loop and client have paces of their own: each token comes once, in order.

The app at the level of ASGI, between a scripted engine and a client that takes a message when the test says so.
"""

import asyncio
import contextlib
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.app import create_app
from server.engine.messages import PROTOCOL_VERSION, Hello, Outputs, Submit, TokenOutput, encode_frame, take_frames
from server.launch.board import Board, ModelState
from server.settings.load import load_settings
from server.settings.machine import Machine
from server.settings.resolve import resolve
from server.weights.index import Checkpoint
from tests.api.service import FACTS, events_of
from tests.tiny_tokenizer import write_tiny_tokenizer

TEXT = "näive café, 100 % of \N{SNOWMAN}!"  # characters of one, two and three tokens


class ScriptedEngine:
    """Says what the test tells it to: one message of outputs at a time."""

    def __init__(self):
        self.submits = []
        self._writer = None

    async def serve(self, reader, writer):
        self._writer = writer
        writer.write(encode_frame(Hello(PROTOCOL_VERSION, 1)))
        buffer = bytearray()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            while data := await reader.read(1 << 20):
                buffer += data
                self.submits += [message for message in take_frames(buffer) if isinstance(message, Submit)]
        writer.close()

    def say(self, outputs):
        self._writer.write(encode_frame(Outputs(1, outputs)))


class App:
    """The app with its client connected to a scripted engine, in one event loop for all examples."""

    def __init__(self, folder):
        self.runner = asyncio.Runner()
        self.engine = ScriptedEngine()
        self.folder = folder
        write_tiny_tokenizer(folder / "model", 320)
        board = Board.create()
        board.started_at = board.ready_at = time.monotonic()
        board.model_state, board.max_model_len = ModelState.READY, 512
        chosen = {"server.runtime_dir": str(folder), "model.path": "org/echo", "engine.watchdog_s": 0}
        settings = load_settings("test", {}, chosen)
        resolved = resolve(settings, FACTS, Machine(1, 1 << 34, 0, None, True))
        self.app = create_app(settings, resolved, Checkpoint(folder / "model", FACTS, {}, {}), board, self.socket_path)

    @property
    def socket_path(self):
        return str(self.folder / "e")

    def __enter__(self):
        self.runner.run(self._start())
        return self

    def __exit__(self, *_):
        self.runner.run(self._stop())
        self.runner.close()

    async def _start(self):
        self._server = await asyncio.start_unix_server(self.engine.serve, self.socket_path)
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()

    async def _stop(self):
        await self._lifespan.__aexit__(None, None, None)
        self._server.close()
        await self._server.wait_closed()

    @property
    def tokenizer(self):
        return self.app.state.serving.tokenizer

    async def post(self, path, body, send):
        """Call the app; `send` gets its messages."""
        received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            return received.pop() if received else await asyncio.Event().wait()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    with App(tmp_path_factory.mktemp("c")) as app:
        yield app


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def split(items, sizes):
    """Cut `items` into messages of the given sizes, over and over."""
    messages, position, number = [], 0, 0
    while position < len(items):
        size = sizes[number % len(sizes)]
        messages.append(items[position : position + size])
        position, number = position + size, number + 1
    return messages


class Client:
    """Takes each message after so many turns of the event loop: a connection whose buffer is full until then."""

    def __init__(self, pauses):
        self._pauses = pauses
        self.messages = []

    async def send(self, message):
        for _ in range(self._pauses[len(self.messages) % len(self._pauses)]):
            await asyncio.sleep(0)
        self.messages.append(message)

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.messages[1:]).decode()


PACES = {
    "sizes": st.lists(st.integers(1, 9), min_size=1, max_size=5),
    "engine_pauses": st.lists(st.integers(0, 4), min_size=1, max_size=5),
    "client_pauses": st.lists(st.integers(0, 30), min_size=1, max_size=5),
}
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


async def run(app, path, body, prompts_ids, sizes, engine_pauses, client_pauses, order):
    """Post `body` and let the engine say the ids of each prompt in messages of these sizes; returns the client."""
    client = Client(client_pauses)
    streams = [index for index, ids in enumerate(prompts_ids) for _ in ids]
    order.shuffle(streams)  # which may end the example
    app.engine.submits.clear()
    call = asyncio.create_task(app.post(path, body, client.send))
    await until(lambda: len(app.engine.submits) == len(prompts_ids))
    positions = [0] * len(prompts_ids)
    outputs = []
    for index in streams:
        ids, position = prompts_ids[index], positions[index]
        finish = "length" if position == len(ids) - 1 else None
        outputs.append(TokenOutput(app.engine.submits[index].request_id, ids[position], -0.5, finish))
        positions[index] += 1
    for number, message in enumerate(split(outputs, sizes)):
        app.engine.say(message)
        for _ in range(engine_pauses[number % len(engine_pauses)]):
            await asyncio.sleep(0)
    await asyncio.wait_for(call, 10)
    assert [message.get("more_body", False) for message in client.messages[1:]][-1:] == [False]
    assert app.app.state.serving.engine.num_live == 0
    return client


@EXAMPLES
@given(num_tokens=st.integers(1, 60), order=st.randoms(use_true_random=False), **PACES)
def test_a_native_stream_has_each_token_once(app, num_tokens, order, sizes, engine_pauses, client_pauses):
    ids = (app.tokenizer.encode(TEXT) * 3)[:num_tokens]
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 100}}
    client = app.runner.run(run(app, "/generate_stream", body, [ids], sizes, engine_pauses, client_pauses, order))
    events = [json.loads(event) for event in events_of(client.text)]
    assert [event["index"] for event in events] == list(range(1, num_tokens + 1))
    assert [event["token"]["id"] for event in events] == ids
    assert [event["generated_text"] is None for event in events] == [True] * (num_tokens - 1) + [False]
    expected = app.tokenizer.decode(ids)
    assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"] == expected


@EXAMPLES
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    with_usage=st.booleans(),
    **PACES,
)
def test_each_choice_of_a_completion_has_its_text(app, lengths, order, with_usage, sizes, engine_pauses, client_pauses):
    all_ids = app.tokenizer.encode(TEXT) * 2
    ids = [all_ids[index : index + length] for index, length in enumerate(lengths)]
    options = {"include_usage": True, "continuous_usage_stats": True} if with_usage else {}
    body = {"prompt": ["abc"] * len(ids), "max_tokens": 100, "stream": True, "stream_options": options}
    client = app.runner.run(run(app, "/v1/completions", body, ids, sizes, engine_pauses, client_pauses, order))
    *chunks, done = events_of(client.text)
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    if with_usage:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [*range(1, sum(lengths) + 1), sum(lengths)]
        assert chunks.pop()["choices"] == []
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == sum(lengths)
    for index, own_ids in enumerate(ids):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == app.tokenizer.decode(own_ids)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own_ids) - 1) + ["length"]


@EXAMPLES
@given(num_tokens=st.integers(2, 40), stop_at=st.integers(0, 38), order=st.randoms(use_true_random=False), **PACES)
def test_a_stop_string_ends_a_stream_wherever_messages_end(
    app, num_tokens, stop_at, order, sizes, engine_pauses, client_pauses
):
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"[:num_tokens]
    stop_at %= num_tokens
    ids = [app.tokenizer.encode(letter)[0] for letter in letters]
    for path in ("/generate_stream", "/generate"):
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 100, "stop": letters[stop_at]}}
        client = app.runner.run(run(app, path, body, [ids], sizes, engine_pauses, client_pauses, order))
        events = events_of(client.text) if path == "/generate_stream" else [client.text]
        assert json.loads(events[-1])["generated_text"] == letters[:stop_at]
        if path == "/generate_stream":
            assert len(events) == stop_at + 1


@EXAMPLES
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), order=st.randoms(use_true_random=False), **PACES)
def test_whole_answers_are_what_streams_add_up_to(app, lengths, order, sizes, engine_pauses, client_pauses):
    all_ids = app.tokenizer.encode(TEXT) * 2
    ids = [all_ids[index : index + length] for index, length in enumerate(lengths)]
    body = {"prompt": ["abc"] * len(ids), "max_tokens": 100}
    client = app.runner.run(run(app, "/v1/completions", body, ids, sizes, engine_pauses, client_pauses, order))
    answer = json.loads(client.text)
    assert [choice["text"] for choice in answer["choices"]] == [app.tokenizer.decode(own) for own in ids]
    assert answer["usage"]["completion_tokens"] == sum(lengths)


def test_while_a_client_takes_nothing_events_wait_and_go_in_one_message(app):
    ids = app.tokenizer.encode("abc") * 20

    async def main():
        opened = asyncio.Event()
        messages = []

        async def send(message):
            messages.append(message)
            if len(messages) == 2:  # the first event
                await opened.wait()

        body = {"inputs": "abc", "parameters": {"max_new_tokens": 100}}
        app.engine.submits.clear()
        call = asyncio.create_task(app.post("/generate_stream", body, send))
        await until(lambda: app.engine.submits)
        for position, token_id in enumerate(ids):
            is_last = position == len(ids) - 1
            finish = "length" if is_last else None
            app.engine.say([TokenOutput(app.engine.submits[0].request_id, token_id, -0.5, finish)])
            for _ in range(5):
                await asyncio.sleep(0)
        assert len(messages) == 2, messages
        await until(lambda: not app.app.state.serving.engine.num_live)
        opened.set()
        await asyncio.wait_for(call, 10)
        return messages

    _, first, rest, end = app.runner.run(main())
    assert len(events_of(first["body"].decode())) == 1
    assert len(events_of(rest["body"].decode())) == len(ids) - 1
    assert end["body"] == b""


def test_one_client_that_takes_nothing_delays_none_of_fifty(app):
    ids = app.tokenizer.encode("abc") * 20

    async def main():
        stalled_messages = []

        async def stall(message):
            stalled_messages.append(message)
            await asyncio.Event().wait()

        clients = [Client([0]) for _ in range(49)]
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 100}}
        app.engine.submits.clear()
        stalled = asyncio.create_task(app.post("/generate_stream", body, stall))
        calls = [asyncio.create_task(app.post("/generate_stream", body, client.send)) for client in clients]
        await until(lambda: len(app.engine.submits) == 50)
        for position, token_id in enumerate(ids):
            finish = "length" if position == len(ids) - 1 else None
            app.engine.say([TokenOutput(s.request_id, token_id, -0.5, finish) for s in app.engine.submits])
            await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*calls), 10)
        assert all(len(events_of(client.text)) == len(ids) for client in clients)
        assert len(stalled_messages) == 1
        stalled.cancel()
        await asyncio.gather(stalled, return_exceptions=True)

    app.runner.run(main())
    assert app.app.state.serving.engine.num_live == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_whole_answer_wakes_its_task_once(app, path, monkeypatch):
    from server.engine.inbox import Inbox

    num_waits = []
    wait = Inbox._wait

    async def counted(inbox):
        num_waits.append(1)
        await wait(inbox)

    monkeypatch.setattr(Inbox, "_wait", counted)
    ids = app.tokenizer.encode("abc") * 20
    body = {"inputs": "abc", "prompt": "abc", "max_tokens": 100, "parameters": {"max_new_tokens": 100}}

    class InOrder:
        def shuffle(self, items):
            pass

    app.runner.run(run(app, path, body, [ids], [1], [5], [0], InOrder()))
    assert len(num_waits) == 1
