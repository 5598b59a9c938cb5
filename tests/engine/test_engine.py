"""Client and engine over a real socket: streams, aborts, deaths and stops, with the real scheduler in between."""

import asyncio
import dataclasses
import random
import socket
import time

import pytest

from server.engine.client import ClientLimits, EngineClient
from server.engine.messages import Outputs, SamplingParams, Submit, encode_frame, take_frames
from server.errors import EngineDead, NotReady, Overloaded
from server.launch.board import Board, ModelState, StopMode
from tests.engine.engine_thread import LIMITS, EngineThread
from tests.scheduler.simulator import expected_outputs

CLIENT_LIMITS = ClientLimits(max_requests=100, max_waiting_tokens=5000, watchdog_s=0)


@pytest.fixture
def board():
    return Board.create()


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "engine.sock"))
        sock.listen(8)
        yield sock


@pytest.fixture
def engines(listener, board):
    started = []

    def start(**options):
        started.append(EngineThread(listener, board, **options).start())
        return started[-1]

    yield start
    board.raise_stop(StopMode.QUICK)
    for engine in started:
        if engine.runner.permits is not None:
            engine.kill()
        engine.join()


@pytest.fixture
def with_client(listener, board):
    """Run a coroutine function with a started client; the client is closed afterwards."""

    def run(scenario, limits=CLIENT_LIMITS):
        async def main():
            client = EngineClient(listener.getsockname(), board, limits)
            await client.start()
            try:
                return await asyncio.wait_for(scenario(client), 20)
            finally:
                await client.close()

        return asyncio.run(main())

    return run


def sampling(seed=0, max_tokens=20, **options):
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **options)


async def outputs_of(stream):
    outputs = []
    while taken := await stream.inbox.take():
        outputs += taken
    return outputs


async def collect(stream, taken_before=()):
    outputs = [*taken_before, *await outputs_of(stream)]
    assert [output.finish_reason is not None for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    return [output.token_id for output in outputs if output.token_id >= 0], outputs[-1].finish_reason


def expected(prompt, params):
    return expected_outputs(Submit(1, prompt, len(prompt), params))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("pipelined", [False, True])
def test_streams_get_their_tokens_and_one_end(engines, with_client, pipelined):
    engine = engines(pipelined=pipelined)

    async def scenario(client):
        requests = [([seed + 2, 3, 4], sampling(seed)) for seed in range(20)]
        results = await asyncio.gather(*(collect(client.submit(*request)) for request in requests))
        assert results == [expected(*request) for request in requests]
        assert client.num_live == 0

    with_client(scenario)
    assert engine.tables.num_held == 0


def test_an_engine_whose_results_are_there_at_once_computes_nothing_twice(engines, with_client):
    engine = engines(pipelined=False)

    async def scenario(client):
        await collect(client.submit([2, 3], SamplingParams(max_tokens=40, seed=5)))

    with_client(scenario)
    tokens, reason = expected([2, 3], SamplingParams(max_tokens=40, seed=5))
    assert reason == "length"
    assert len(engine.runner.plans) == len(tokens)


def test_an_abort_frees_the_request_within_a_step(engines, with_client):
    engine = engines(gated=True)

    async def scenario(client):
        stream = client.submit([2, 3, 4], sampling(max_tokens=1000))
        engine.permit(3)
        await stream.inbox.take()
        stream.abort()
        stream.abort()
        engine.permit(1)  # the step that was already being made
        await until(lambda: engine.tables.num_held == 0)
        assert len(engine.runner.plans) <= 5

    with_client(scenario)


def test_a_lost_web_worker_takes_only_its_own_requests(engines, listener, board):
    engine = engines()

    async def main():
        lost, kept = (EngineClient(listener.getsockname(), board, CLIENT_LIMITS) for _ in range(2))
        await lost.start()
        await kept.start()
        stream = lost.submit([2, 3, 4], sampling(max_tokens=1900))
        await stream.inbox.take()
        kept_stream = kept.submit([5, 6], sampling(1, max_tokens=50))
        await lost.close()
        result = await collect(kept_stream)
        await until(lambda: engine.tables.num_held == 0)
        await kept.close()
        return result

    assert asyncio.run(main()) == expected([5, 6], sampling(1, max_tokens=50))


def test_streams_go_on_in_the_next_engine_as_if_undisturbed(engines, with_client):
    requests = [([seed + 2, 3, 4], sampling(seed, max_tokens=60, min_tokens=30)) for seed in range(6)]

    async def scenario(client):
        engine = engines(gated=True)
        streams = [client.submit(*request) for request in requests]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        for num_steps in (10, 7, 1):
            engine.permit(num_steps)
            await until(lambda engine=engine, num_steps=num_steps: len(engine.runner.plans) > num_steps)
            await asyncio.to_thread(engine.kill)
            late = client.submit([9, 9], sampling(99))  # while nobody is there
            tasks.append(asyncio.create_task(collect(late)))
            engine = engines(gated=True)
        engine.open_gate()
        return await asyncio.gather(*tasks)

    results = with_client(scenario)
    assert results == [expected(*request) for request in requests] + [expected([9, 9], sampling(99))] * 3


def test_a_request_that_can_never_fit_is_refused_and_nothing_else_is_disturbed(engines, with_client):
    engines()

    async def scenario(client):
        good = client.submit([2, 3], sampling())
        bad = await collect(client.submit([4], sampling(max_tokens=LIMITS.max_model_len)))
        return await collect(good), bad

    good, bad = with_client(scenario)
    assert good == expected([2, 3], sampling())
    assert bad == ([], "refused")


def test_nothing_is_admitted_before_the_first_engine_is_ready(board, with_client):
    async def scenario(client):
        with pytest.raises(NotReady, match="loading"):
            client.submit([1], sampling())

    with_client(scenario)


def test_nothing_is_admitted_while_the_service_stops(engines, board, with_client):
    engines()

    async def scenario(client):
        board.raise_stop(StopMode.DRAIN)
        with pytest.raises(NotReady, match="stopping"):
            client.submit([1], sampling())

    with_client(scenario)


def test_too_many_requests_are_turned_away_at_the_bound(engines, with_client):
    engine = engines(gated=True)

    async def scenario(client):
        streams = [client.submit([2, 3], sampling(seed)) for seed in range(4)]
        with pytest.raises(Overloaded, match="4 requests run or wait, at most 4") as refusal:
            client.submit([2, 3], sampling())
        assert 1 <= refusal.value.retry_after_s <= 120
        engine.open_gate()
        await asyncio.gather(*map(collect, streams))
        await collect(client.submit([2, 3], sampling()))

    with_client(scenario, ClientLimits(max_requests=4, max_waiting_tokens=5000, watchdog_s=0))


def test_too_many_waiting_tokens_are_turned_away_but_one_long_prompt_is_not(engines, with_client):
    engines(gated=True)

    async def scenario(client):
        client.submit([2] * 50, sampling())
        with pytest.raises(Overloaded, match="50 prompt tokens wait"):
            client.submit([2], sampling())

    with_client(scenario, ClientLimits(max_requests=4, max_waiting_tokens=10, watchdog_s=0))


def test_prompts_wait_until_an_output_or_an_abort(engines, with_client):
    engine = engines(gated=True)

    async def scenario(client):
        for _ in range(3):
            client.submit([2] * 50, sampling()).abort()
        streams = [client.submit([2] * 5, sampling(seed)) for seed in range(2)]
        with pytest.raises(Overloaded, match="10 prompt tokens wait"):
            client.submit([2], sampling())
        engine.open_gate()
        await asyncio.gather(*map(collect, streams))
        refused = client.submit([2] * LIMITS.max_model_len, sampling())  # too long: its only output is the refusal
        await collect(refused)
        await collect(client.submit([2] * 50, sampling()))

    with_client(scenario, ClientLimits(max_requests=4, max_waiting_tokens=10, watchdog_s=0))


def test_the_first_output_says_how_long_the_request_waited(engines, board, with_client):
    engine = engines(limits=dataclasses.replace(LIMITS, max_num_requests=1), gated=True)

    async def scenario(client):
        first, second = client.submit([2, 3], sampling(max_tokens=400)), client.submit([2, 3], sampling(1))
        engine.permit(2)
        first_outputs = await first.inbox.take()
        opening = first_outputs[0]
        while not board.num_waiting:  # the engine reads the second request between two steps
            engine.permit(1)
            await asyncio.sleep(0.001)
        seen_waiting = time.monotonic()
        await until(lambda: (time.monotonic() - seen_waiting) * 1e3 > opening.queue_ms)
        engine.open_gate()
        outputs = [first_outputs + await outputs_of(first), await outputs_of(second)]
        assert outputs[1][0].queue_ms > opening.queue_ms > 0
        assert all(output.queue_ms == 0 for output in outputs[0][1:] + outputs[1][1:])

    with_client(scenario)


def test_a_drain_lets_running_streams_finish(engines, board, with_client):
    engine = engines(gated=True)

    async def scenario(client):
        stream = client.submit([2, 3], sampling(max_tokens=50))
        engine.permit(5)
        opening = await stream.inbox.take()
        board.raise_stop(StopMode.DRAIN)
        engine.open_gate()
        return await collect(stream, opening)

    assert with_client(scenario) == expected([2, 3], sampling(max_tokens=50))
    engine.join()  # ends by itself: its last web worker has closed


def test_an_engine_that_dies_during_a_drain_ends_its_streams_with_an_error(engines, board, with_client):
    engine = engines(gated=True)

    async def scenario(client):
        stream = client.submit([2, 3], sampling(max_tokens=50))
        engine.permit(2)
        await stream.inbox.take()
        board.raise_stop(StopMode.DRAIN)
        await asyncio.to_thread(engine.kill)
        with pytest.raises(EngineDead):
            await collect(stream)

    with_client(scenario)


def test_a_request_id_that_runs_already_is_refused(engines, listener, board):
    engines()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(listener.getsockname())
        frame = encode_frame(Submit(5, [2, 3], 2, sampling()))
        sock.sendall(frame + frame)
        buffer, reasons = bytearray(), []
        while len(reasons) < 2:
            buffer += sock.recv(1 << 16)
            for message in take_frames(buffer):
                if isinstance(message, Outputs):
                    reasons += [item.finish_reason for item in message.items if item.finish_reason]
    assert reasons == ["refused", expected([2, 3], sampling())[1]]


def test_the_board_shows_work_and_its_end(engines, board, with_client):
    engine = engines(gated=True)
    tokens, _ = expected([2, 3, 4], sampling(max_tokens=30))

    async def scenario(client):
        stream = client.submit([2, 3, 4], sampling(max_tokens=30))
        engine.permit(4)
        await stream.inbox.take()
        await until(lambda: board.num_executing == 1 and board.executing[0] == stream.request_id)
        assert board.step > 0
        engine.open_gate()
        await collect(stream)
        await until(lambda: board.num_executing == 0 and board.num_running == 0)
        assert board.num_generated_tokens == len(tokens)
        beat = board.engine_beat
        await until(lambda: board.engine_beat > beat)  # idle is not stalled

    with_client(scenario)


def test_a_step_that_may_take_long_is_not_taken_for_a_stall(board, listener, monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, signal_number: killed.append(pid))
    board.model_state, board.model_pid, board.ready_at = ModelState.READY, 4242, 1.0
    board.engine_beat, board.longest_step_s = time.monotonic(), 0.6

    async def main():
        client = EngineClient(listener.getsockname(), board, ClientLimits(10, 100, watchdog_s=0.1))
        await client.start()
        await until(lambda: killed)
        await client.close()
        return time.monotonic() - board.engine_beat

    assert asyncio.run(main()) > 0.6


def test_an_engine_that_does_not_step_is_killed_and_one_that_idles_is_not(board, listener, monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda pid, signal_number: killed.append((pid, int(signal_number))))
    board.model_state, board.model_pid, board.ready_at = ModelState.READY, 4242, 1.0

    async def main():
        client = EngineClient(listener.getsockname(), board, ClientLimits(10, 100, watchdog_s=0.2))
        await client.start()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            board.engine_beat = time.monotonic()
            await asyncio.sleep(0.01)
        assert killed == []
        await until(lambda: killed)
        await asyncio.sleep(0.1)
        await client.close()

    asyncio.run(main())
    assert killed == [(4242, 9)]
    assert board.model_state == ModelState.NONE


@pytest.mark.slow
def test_random_load_with_aborts_ends_every_request_once(engines, with_client):
    engine = engines()
    rng = random.Random(3)

    async def one(client, seed):
        prompt = [rng.randrange(2, 30) for _ in range(rng.randrange(1, 40))]
        params = sampling(seed, max_tokens=rng.randrange(1, 60))
        stop_after = rng.choice([None, None, 0, 1, 5, 20])
        stream = client.submit(prompt, params)
        if stop_after is None:
            assert await collect(stream) == expected(prompt, params)
            return
        num_taken = 0
        while num_taken < stop_after and (taken := await stream.inbox.take()):
            num_taken += len(taken)
        stream.abort()

    async def scenario(client):
        for _ in range(5):
            await asyncio.gather(*(one(client, seed) for seed in range(60)))
        await until(lambda: engine.tables.num_held == 0)
        assert client.num_live == 0

    with_client(scenario)
