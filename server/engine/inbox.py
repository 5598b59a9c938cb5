"""Where the outputs of one call's requests wait for the one task that reads them.

However many have come, reading them costs one wake-up. Knows no sockets, and nothing of what an output means.
"""

import asyncio

from server.engine.messages import TokenOutput
from server.errors import EngineDead

MAX_TAKEN = 256  # of a reader that fell behind: more at once would hold the event loop for a millisecond


class Inbox:
    """Filled by the streams that `EngineClient.submit` made for it; one task at a time may wait."""

    def __init__(self) -> None:
        self._outputs: list[TokenOutput] = []
        self._num_open = 0
        self._has_failed = False
        self._is_given_up = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_ends = False

    async def take(self) -> list[TokenOutput]:
        """What has come since the last call, in order and at most MAX_TAKEN; waits for the first.

        Empty when all streams have ended and everything was taken. Raises EngineDead when the service gives a request
        up, after what had come before.
        """
        while not self._outputs:
            if self._is_given_up:
                raise EngineDead("the engine did not come back")
            if not self._num_open:
                return []
            await self._wait()
        taken, self._outputs = self._outputs, []
        if len(taken) > MAX_TAKEN:
            taken, self._outputs = taken[:MAX_TAKEN], taken[MAX_TAKEN:]
            await asyncio.sleep(0)  # a reader that nothing holds up would take one part after the other in this turn
        return taken

    async def take_when_ended(self) -> list[TokenOutput]:
        """Everything, in order, once all streams have ended or one has failed, at one wake-up. Raises EngineDead."""
        self._waits_for_ends = True
        while self._num_open and not self._has_failed and not self._is_given_up:
            await self._wait()
        self._waits_for_ends = False
        if self._is_given_up:
            raise EngineDead("the engine did not come back")
        taken, self._outputs = self._outputs, []
        return taken

    def open(self) -> None:
        """One more stream delivers here."""
        self._num_open += 1

    def put(self, output: TokenOutput) -> None:
        """A stream's next output; its last one closes it."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._num_open -= 1
            self._has_failed |= output.token_id < 0
        if not self._waits_for_ends or not self._num_open or self._has_failed:
            self._wake()

    def close_one(self) -> None:
        """A stream was aborted: its last output will not come."""
        self._num_open -= 1
        self._wake()

    def give_up(self) -> None:
        """No engine will go on with a stream: what has come can still be taken."""
        self._is_given_up = True
        self._wake()

    async def _wait(self) -> None:
        assert self._waiter is None, "two tasks read one inbox"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
