"""Inboxes: outputs come out in order and once, whatever the pace of the two sides, and one wake-up fetches all."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.inbox import MAX_TAKEN, Inbox
from server.engine.messages import TokenOutput
from server.errors import EngineDead


def output(request_id, token_id, is_last=False):
    return TokenOutput(request_id, token_id, 0.0, "length" if is_last else None)


def filled(num_streams):
    inbox = Inbox()
    for _ in range(num_streams):
        inbox.open()
    return inbox


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    put_pauses=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    take_pauses=st.lists(st.integers(0, 9), min_size=1, max_size=8),
)
def test_everything_is_taken_once_and_in_order(lengths, order, put_pauses, take_pauses):
    streams = [index for index, length in enumerate(lengths) for _ in range(length)]
    order.shuffle(streams)
    sent = []
    for index in streams:
        number = sum(output.request_id == index for output in sent)
        sent.append(output(index, number, is_last=number == lengths[index] - 1))

    async def main():
        inbox, taken = filled(len(lengths)), []

        async def read():
            while batch := await inbox.take():
                taken.extend(batch)
                await turns(take_pauses[len(taken) % len(take_pauses)])

        reader = asyncio.create_task(read())
        for position, item in enumerate(sent):
            inbox.put(item)
            await turns(put_pauses[position % len(put_pauses)])
        await asyncio.wait_for(reader, 10)
        return taken

    assert asyncio.run(main()) == sent


def test_what_waits_is_taken_at_one_wake_up():
    async def main():
        inbox = filled(1)
        reader = asyncio.create_task(inbox.take())
        await turns(1)
        for number in range(50):
            inbox.put(output(1, number))
        assert len(await reader) == 50

    asyncio.run(main())


def test_a_reader_far_behind_takes_a_bounded_number_at_a_time():
    async def main():
        inbox = filled(1)
        for number in range(2 * MAX_TAKEN + 7):
            inbox.put(output(1, number, is_last=number == 2 * MAX_TAKEN + 6))
        batches = []
        while batch := await inbox.take():
            batches.append([item.token_id for item in batch])
        numbers = iter(range(2 * MAX_TAKEN + 7))
        assert batches == [[next(numbers) for _ in range(size)] for size in (MAX_TAKEN, MAX_TAKEN, 7)]

    asyncio.run(main())


def test_a_reader_far_behind_lets_others_run_between_what_it_takes():
    async def main():
        inbox, num_turns = filled(1), 0
        for number in range(5 * MAX_TAKEN):
            inbox.put(output(1, number, is_last=number == 5 * MAX_TAKEN - 1))

        async def read():
            while await inbox.take():
                pass

        reader = asyncio.create_task(read())
        while not reader.done():
            await turns(1)
            num_turns += 1
        assert num_turns >= 5

    asyncio.run(main())


def test_a_reader_of_the_whole_is_woken_when_all_have_ended():
    async def main():
        inbox = filled(2)
        reader = asyncio.create_task(inbox.take_when_ended())
        for item in (output(1, 5), output(2, 6, is_last=True), output(1, 7)):
            inbox.put(item)
            await turns(3)
            assert not reader.done()
        inbox.put(output(1, 8, is_last=True))
        assert [item.token_id for item in await reader] == [5, 6, 7, 8]

    asyncio.run(main())


def test_a_reader_of_the_whole_is_woken_by_the_first_failure():
    async def main():
        inbox = filled(2)
        reader = asyncio.create_task(inbox.take_when_ended())
        await turns(1)
        inbox.put(output(1, 5))
        inbox.put(TokenOutput(2, -1, 0.0, "error", "why"))
        assert [item.error for item in await reader] == ["", "why"]

    asyncio.run(main())


@pytest.mark.parametrize("take", [Inbox.take, Inbox.take_when_ended])
def test_an_aborted_stream_is_waited_for_no_longer(take):
    async def main():
        inbox = filled(1)
        reader = asyncio.create_task(take(inbox))
        await turns(1)
        inbox.close_one()
        assert await reader == []

    asyncio.run(main())


def test_who_is_given_up_reads_what_had_come_and_then_an_error():
    async def main():
        inbox = filled(1)
        inbox.put(output(1, 5))
        inbox.give_up()
        assert [item.token_id for item in await inbox.take()] == [5]
        with pytest.raises(EngineDead):
            await inbox.take()
        waiting = filled(1)
        reader = asyncio.create_task(waiting.take_when_ended())
        await turns(1)
        waiting.give_up()
        with pytest.raises(EngineDead):
            await reader

    asyncio.run(main())
