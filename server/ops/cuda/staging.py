"""The way of a step's integers to the device and of its tokens back: pinned host memory, one copy each per step.

Two host buffers take turns on the way there, a ring of them on the way back. Knows streams and events, not kernels.
"""

from dataclasses import fields

from server.ops.cuda.arena import ALIGNMENT, BufferSpec
from server.ops.cuda.buffer import ITEM_BYTES, Buffer
from server.ops.cuda.driver import Driver, Stream
from server.ops.interface import BatchLimits, SampledTokens, StepInputs, StepShape, input_sizes

NUM_FETCHES = 4  # of which the engine has two on their way at most
_WORD_BYTES = ITEM_BYTES["int32"]
_WORDS_PER_LINE = ALIGNMENT // _WORD_BYTES


def staging_spec(limits: BatchLimits) -> BufferSpec:
    """The device's packed arrays, each of which begins at a multiple of ALIGNMENT."""
    return BufferSpec((_packed_words(limits),), "int32")


class Staging:
    """`inputs` are the device's arrays; they stay valid for ever. Each step fills one of two pinned twins."""

    def __init__(self, driver: Driver, stream: Stream, limits: BatchLimits, packed: Buffer) -> None:
        self._driver, self._stream, self._packed = driver, stream, packed
        offsets, sizes = _offsets(limits), input_sizes(limits)
        self._table_offset = offsets["block_tables"]
        self.inputs = StepInputs(
            *(Buffer(packed.address + offsets[n] * _WORD_BYTES, (sizes[n],), "int32", packed) for n in _FIELDS)
        )
        self._hosts = [driver.allocate_pinned(packed.num_bytes) for _ in range(2)]
        self._views = [_split(host.view, offsets, sizes) for host in self._hosts]
        self._copied = [driver.create_event() for _ in self._hosts]
        self._turn = 0

    def next_host(self) -> StepInputs[memoryview]:
        """Host arrays to fill for the step after the one uploaded last."""
        self._turn = 1 - self._turn
        self._driver.wait(self._copied[self._turn])  # its copy was two steps ago
        return self._views[self._turn]

    def upload(self, shape: StepShape) -> None:
        """Copy the host arrays handed out last, of the block tables the rows that the step uses."""
        num_bytes = (self._table_offset + shape.table_rows * shape.table_columns) * _WORD_BYTES
        source = self._hosts[self._turn].address
        self._driver.copy_to_device_async(self._packed.address, source, num_bytes, self._stream)
        self._driver.record(self._copied[self._turn], self._stream)


class CudaPendingTokens:
    """Sampled tokens on their way to one entry of the ring. Read once, then kept."""

    def __init__(self, entry: "_RingEntry", num_samples: int) -> None:
        self._entry = entry
        self._num_samples = num_samples
        self._tokens: SampledTokens | None = None

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._tokens is not None or self._entry.is_done()

    def wait(self) -> SampledTokens:
        """Block until the tokens are on the host."""
        if self._tokens is None:
            self._tokens = self._entry.wait(self._num_samples)
        return self._tokens


class TokenRing:
    """Takes int32 [3, max_num_requests] off the device: ids, fp32 bits of logprobs, whether logits were finite."""

    def __init__(self, driver: Driver, stream: Stream, packed: Buffer) -> None:
        self._driver, self._stream, self._packed = driver, stream, packed
        self._entries = [_RingEntry(driver, packed) for _ in range(NUM_FETCHES)]
        self._turn = 0

    def fetch(self, num_samples: int) -> CudaPendingTokens:
        """Start the copy of the first `num_samples` columns; with none it only tells when the step is over."""
        self._turn = (self._turn + 1) % NUM_FETCHES
        entry = self._entries[self._turn]
        entry.settle()
        if num_samples:
            self._driver.copy_to_host_async(entry.address, self._packed.address, self._packed.num_bytes, self._stream)
        self._driver.record(entry.copied, self._stream)
        return entry.lend(num_samples)


class _RingEntry:
    def __init__(self, driver: Driver, packed: Buffer) -> None:
        host = driver.allocate_pinned(packed.num_bytes)
        num_columns = packed.shape[1]
        rows = [
            host.view.cast("B")[begin : begin + num_columns * 4]
            for begin in range(0, packed.num_bytes, num_columns * 4)
        ]
        self._token_ids, self._logprobs, self._is_finite = rows[0].cast("i"), rows[1].cast("f"), rows[2].cast("i")
        self._driver = driver
        self.address = host.address
        self.copied = driver.create_event()
        self._lent: CudaPendingTokens | None = None

    def settle(self) -> None:
        """Whoever was given this entry last and has not read it, reads it now: it is about to be written again."""
        if self._lent is not None:
            self._lent.wait()
            self._lent = None

    def lend(self, num_samples: int) -> CudaPendingTokens:
        self._lent = CudaPendingTokens(self, num_samples)
        return self._lent

    def is_done(self) -> bool:
        return self._driver.is_done(self.copied)

    def wait(self, num_samples: int) -> SampledTokens:
        self._driver.wait(self.copied)
        return SampledTokens(
            self._token_ids[:num_samples].tolist(),
            list(self._logprobs[:num_samples]),
            [bool(flag) for flag in self._is_finite[:num_samples]],
        )


_FIELDS = tuple(field.name for field in fields(StepInputs))


def _offsets(limits: BatchLimits) -> dict[str, int]:
    """Where each array begins, in words."""
    offsets: dict[str, int] = {}
    offset = 0
    for name, size in input_sizes(limits).items():
        offsets[name] = offset
        offset += -(-size // _WORDS_PER_LINE) * _WORDS_PER_LINE
    return offsets


def _packed_words(limits: BatchLimits) -> int:
    return _offsets(limits)["block_tables"] + input_sizes(limits)["block_tables"]


def _split(view: memoryview, offsets: dict[str, int], sizes: dict[str, int]) -> StepInputs[memoryview]:
    words = view.cast("B")

    def array(name: str) -> memoryview:
        begin = offsets[name] * _WORD_BYTES
        return words[begin : begin + sizes[name] * _WORD_BYTES].cast("i")

    return StepInputs(*(array(name) for name in _FIELDS))
