"""The slots' memory on the device, and the launches that choose a step's tokens as ops/sampling defines it.

The list of launches is the same for all parameters, which kernels read from the device. Knows the layouts of what the
kernels of server/kernels/sample.py share. Nothing here waits for the device unless a ring of uploads is full.
"""

import math
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

from server.models.facts import ModelFacts
from server.ops.cuda.arena import Arena, BufferSpec
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, Event, Stream
from server.ops.cuda.kernels import Kernels
from server.ops.interface import BatchLimits, StepInputs
from server.ops.sampling import SlotSampling

SEEN, STOP = 1, 2  # bits of a token's flags
PARAM_WORDS = 16
_PARAMS_FORMAT = "<4i4fi28x"  # top_k, min_position, seed, temperature, top_p, log(min_p), penalty, wants logprob

# Constants of the kernels, by which their images are found.
TILE = 4096
STEP = 8192
CANDIDATES = 4096
MARK_BLOCK = 512
_TILE_VALUES, _TILE_IDS = 5, 2

MAX_UPLOAD_IDS = 1 << 14
UPLOAD_RING_BYTES = 1 << 20
MAX_UPLOADS = 512


@dataclass(frozen=True, slots=True)
class _Specs:
    """Every buffer of the sampler: what a slot remembers (one more for padding rows), then what a step writes."""

    last_tokens: BufferSpec
    params: BufferSpec
    token_flags: BufferSpec
    tile_values: BufferSpec
    tile_ids: BufferSpec
    candidates: BufferSpec
    floors: BufferSpec
    largest_scores: BufferSpec
    upload_ids: BufferSpec
    packed: BufferSpec

    @classmethod
    def of(cls, facts: ModelFacts, limits: BatchLimits) -> "_Specs":
        rows, num_slots = limits.max_num_requests, limits.max_num_requests + 1
        num_tiles = _num_tiles(facts.vocab_size)
        return cls(
            last_tokens=BufferSpec((num_slots,), "int32"),
            params=BufferSpec((num_slots, PARAM_WORDS), "int32"),
            token_flags=BufferSpec((num_slots, facts.vocab_size), "uint8"),
            tile_values=BufferSpec((rows, _TILE_VALUES, num_tiles), "float32"),
            tile_ids=BufferSpec((rows, _TILE_IDS, num_tiles), "int32"),
            candidates=BufferSpec((rows, CANDIDATES), "int32"),
            floors=BufferSpec((rows,), "float32"),
            largest_scores=BufferSpec((rows,), "float32"),
            upload_ids=BufferSpec((MAX_UPLOAD_IDS,), "int32"),
            packed=BufferSpec((3, rows), "int32"),
        )

    def num_bytes(self) -> int:
        return sum(getattr(self, field.name).num_bytes for field in fields(self))


def sampler_bytes(facts: ModelFacts, limits: BatchLimits) -> int:
    """What a CudaSampler takes from its arena."""
    return _Specs.of(facts, limits).num_bytes()


class CudaSampler:
    """Slots 0 .. max_num_requests - 1 are requests'; slot max_num_requests is where padding rows write.

    `packed` int32 [3, max_num_requests] holds what `sample` chose: ids, bits of the fp32 logprobs (NaN unless wanted),
    and 1 for rows whose logits were finite. `last_tokens` int32 [slots] holds the newest id of each slot.
    """

    def __init__(
        self,
        driver: Driver,
        stream: Stream,
        kernels: Kernels,
        facts: ModelFacts,
        limits: BatchLimits,
        vocab_limit: int,
        arena: Arena,
    ) -> None:
        specs = _Specs.of(facts, limits)
        self._driver, self._stream = driver, stream
        self.last_tokens = arena.take(specs.last_tokens)
        self.packed = arena.take(specs.packed)
        self._params = arena.take(specs.params)
        self._token_flags = arena.take(specs.token_flags)
        self._tile_values = arena.take(specs.tile_values)
        self._tile_ids = arena.take(specs.tile_ids)
        self._candidates = arena.take(specs.candidates)
        self._floors = arena.take(specs.floors)
        self._largest_scores = arena.take(specs.largest_scores)
        self._upload_ids = arena.take(specs.upload_ids)
        for state in (self.last_tokens, self.packed, self._params, self._token_flags):
            driver.fill_async(state.address, 0, state.num_bytes, stream)

        self._max_rows, self._vocab_size = limits.max_num_requests, facts.vocab_size
        self._vocab_limit = min(vocab_limit, facts.vocab_size)
        self._num_tiles = _num_tiles(facts.vocab_size)
        unit = 1 if facts.vocab_size % 16 else 16
        self._vocab_units = facts.vocab_size // unit
        self._scan = kernels.get("sample_scan", TILE=TILE, VOCAB_UNIT=unit)
        self._find_thresholds = kernels.get("sample_thresholds", STEP=STEP, CANDIDATES=CANDIDATES, VOCAB_UNIT=unit)
        self._draw = kernels.get("sample_draw", TILE=TILE, VOCAB_UNIT=unit)
        self._finish = kernels.get("sample_finish")
        self._mark = kernels.get("mark_tokens", BLOCK=MARK_BLOCK)
        self._uploads = UploadRing(driver, stream, UPLOAD_RING_BYTES, MAX_UPLOADS)
        self._flagged_slots: set[int] = set()

    def reset(self, slot: int, sampling: SlotSampling) -> None:
        """Give the slot to a request. In the order of the stream: steps issued before still see the former one."""
        if slot in self._flagged_slots:
            flags = self._token_flags.rows(slot, slot + 1)
            self._driver.fill_async(flags.address, 0, flags.num_bytes, self._stream)
            self._flagged_slots.discard(slot)
        has_penalty = sampling.repetition_penalty != 1
        if has_penalty or sampling.stop_ids:
            self._flagged_slots.add(slot)
        self._uploads.send(self._params.rows(slot, slot + 1).address, _pack_params(sampling))
        if has_penalty:
            self._flag(slot, sampling.seen_ids, SEEN)
        self._flag(slot, sampling.stop_ids, STOP)

    def sample(self, logits: Buffer, inputs: StepInputs[Buffer], num_samples: int) -> None:
        """Choose a token for each of the first `num_samples` rows of logits fp32 [rows, vocab]."""
        if not num_samples:
            return
        num_tiles = self._num_tiles
        rules = (self._params, self._token_flags, inputs.sample_slots, inputs.sample_positions)
        vocab = (self._vocab_units, self._vocab_limit)
        self._scan((num_tiles, num_samples, 1), logits, *rules, self._tile_values, self._tile_ids, *vocab)
        self._find_thresholds(
            (num_samples, 1, 1),
            logits,
            *rules,
            self._tile_values,
            self._candidates,
            self._floors,
            self._largest_scores,
            num_tiles,
            *vocab,
        )
        self._draw(
            (num_tiles, num_samples, 1),
            logits,
            *rules,
            self._floors,
            self._largest_scores,
            self._tile_values,
            self._tile_ids,
            *vocab,
        )
        self._finish(
            (num_samples, 1, 1),
            logits,
            self._params,
            self._token_flags,
            self.last_tokens,
            inputs.sample_slots,
            self._floors,
            self._tile_values,
            self._tile_ids,
            self.packed,
            num_tiles,
            self._max_rows,
            self._vocab_size,
        )

    def _flag(self, slot: int, token_ids: Sequence[int], flag: int) -> None:
        # One buffer takes all chunks: a copy to it follows the launch that reads the former chunk.
        for begin in range(0, len(token_ids), MAX_UPLOAD_IDS):
            chunk = array("i", token_ids[begin : begin + MAX_UPLOAD_IDS])
            self._uploads.send(self._upload_ids.address, chunk.tobytes())
            num_blocks = -(-len(chunk) // MARK_BLOCK)
            self._mark(
                (num_blocks, 1, 1), self._upload_ids, self._token_flags, slot, self._vocab_size, len(chunk), flag
            )


class UploadRing:
    """Pinned memory through which small pieces go to the device. A piece's place is reused when its copy is over."""

    def __init__(self, driver: Driver, stream: Stream, num_bytes: int, max_pieces: int) -> None:
        self._driver, self._stream = driver, stream
        self._memory = driver.allocate_pinned(num_bytes)
        self._num_bytes, self._max_pieces = num_bytes, max_pieces
        self._next_offset = 0
        self._pieces: deque[_Piece] = deque()  # under way, oldest first
        self._free_events: list[Event] = []

    def send(self, dest: int, data: bytes) -> None:
        """Start a copy of `data`, at most the ring's size, to the device. Waits only for room in the ring."""
        begin = self._take(len(data))
        self._memory.view[begin : begin + len(data)] = data
        self._driver.copy_to_device_async(dest, self._memory.address + begin, len(data), self._stream)
        event = self._free_events.pop() if self._free_events else self._driver.create_event()
        self._driver.record(event, self._stream)
        self._pieces.append(_Piece(event, begin, begin + len(data)))

    def _take(self, num_bytes: int) -> int:
        assert num_bytes <= self._num_bytes, f"{num_bytes} bytes through a ring of {self._num_bytes}"
        while self._pieces and self._driver.is_done(self._pieces[0].event):
            self._free_events.append(self._pieces.popleft().event)
        begin = self._next_offset if self._next_offset + num_bytes <= self._num_bytes else 0
        end = begin + num_bytes
        while len(self._pieces) == self._max_pieces or any(p.begin < end and begin < p.end for p in self._pieces):
            oldest = self._pieces.popleft()
            self._driver.wait(oldest.event)
            self._free_events.append(oldest.event)
        self._next_offset = end
        return begin


@dataclass(frozen=True, slots=True)
class _Piece:
    event: Event
    begin: int
    end: int


def _num_tiles(vocab_size: int) -> int:
    return -(-vocab_size // TILE)


def _pack_params(sampling: SlotSampling) -> bytes:
    seed_low, seed_high = struct.unpack("<2i", struct.pack("<Q", sampling.seed))
    return struct.pack(
        _PARAMS_FORMAT,
        min(sampling.top_k, 2**31 - 1),
        min(sampling.min_position, 2**31 - 1),
        seed_low,
        seed_high,
        sampling.temperature,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        sampling.repetition_penalty,
        int(sampling.logprobs),
    )
