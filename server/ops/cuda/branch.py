"""A second stream that runs beside the first for a while: in a recorded step, a parallel branch.

Knows streams and events. Does not know what runs where, nor whether the two touch the same memory.
"""

from collections.abc import Iterable

from server.ops.cuda.driver import Driver, KernelImage, Stream
from server.ops.cuda.kernels import Kernels


class Branch:
    """What is issued to it between `fork` and `join` may overlap with what is issued to `stream` meanwhile.

    `kernels` are those whose launches go to it. The events are the same in every step: waiting for one means its last
    record, so that the next may follow at once.
    """

    def __init__(self, driver: Driver, stream: Stream, images: Iterable[KernelImage]) -> None:
        self._driver, self._stream = driver, stream
        self._side = driver.create_stream()
        self._forked, self._joined = driver.create_event(), driver.create_event()
        self.kernels = Kernels(driver, self._side, images)

    def fork(self) -> None:
        """The branch begins behind what `stream` has been given so far."""
        self._driver.record(self._forked, self._stream)
        self._driver.wait_on_stream_async(self._forked, self._side)

    def join(self) -> None:
        """What `stream` is given from now on waits for the branch."""
        self._driver.record(self._joined, self._side)
        self._driver.wait_on_stream_async(self._joined, self._stream)
