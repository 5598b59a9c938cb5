"""Choosing tokens as ops/sampling defines it, in one list of launches whatever the rows' parameters are.

Per row and tile of the vocabulary sample_scan, per row sample_thresholds, per row and tile sample_draw, per row
sample_finish. mark_tokens flags token ids of a slot. A row's parameters are in its slot's record: see ops/cuda/sampler.
"""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant

# Words of a slot's record; ops/cuda/sampler packs it.
TOP_K = tl.constexpr(0)
MIN_POSITION = tl.constexpr(1)
SEED_LOW = tl.constexpr(2)
SEED_HIGH = tl.constexpr(3)
TEMPERATURE = tl.constexpr(4)
TOP_P = tl.constexpr(5)
LOG_MIN_P = tl.constexpr(6)
PENALTY = tl.constexpr(7)
WANTS_LOGPROB = tl.constexpr(8)
NUM_WORDS = tl.constexpr(16)

SEEN = tl.constexpr(1)
STOP = tl.constexpr(2)

# What a tile leaves for its row: tile_values [rows, 5, tiles], tile_ids [rows, 2, tiles].
RAW_LARGEST = tl.constexpr(0)  # of the logits; +inf if one is NaN
RAW_SUM = tl.constexpr(1)  # of exp(logit - RAW_LARGEST); only if the row wants its logprob
BEST = tl.constexpr(2)  # largest score (logit after penalty and stop mask)
LOWEST = tl.constexpr(3)  # smallest score above -inf
DRAWN = tl.constexpr(4)  # largest z + noise
NUM_VALUES = tl.constexpr(5)
BEST_ID = tl.constexpr(0)
DRAWN_ID = tl.constexpr(1)
NUM_IDS = tl.constexpr(2)

MAX_LOGIT = tl.constexpr(1e30)
# Noise lies within -2.82 .. 22.88, so a z below this loses to the largest one, whose z is 0.
HOPELESS = tl.constexpr(-26.0)
INFINITY = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(2**31 - 1)
TILES = tl.constexpr(128)  # that a row's reduction loads at a time
NUM_DISTANCE_STEPS = tl.constexpr(12)  # halvings of the distance; the bits bound what follows
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _integer(params, slot, WORD: tl.constexpr):
    return tl.load(params + slot * NUM_WORDS + WORD)


@triton.jit
def _real(params, slot, WORD: tl.constexpr):
    return _integer(params, slot, WORD).to(tl.float32, bitcast=True)


@triton.jit
def _score_rules(params, slots, positions, token_flags, row, vocab_size):
    """What turns the row's logits into scores: its flags, penalty, and whether stop ids are masked."""
    slot = tl.load(slots + row)
    is_early = tl.load(positions + row) < _integer(params, slot, MIN_POSITION)
    return slot, token_flags + slot.to(tl.int64) * vocab_size, _real(params, slot, PENALTY), is_early


@triton.jit
def _scores_of(logits, flags, ids, is_stored, penalty, is_early):
    """Steps 2 and 3 of the definition on logits of `ids`; flags are read only if they matter."""
    scores = logits
    if (penalty != 1.0) | is_early:
        bits = tl.load(flags + ids, mask=is_stored, other=0).to(tl.int32)
        if penalty != 1.0:
            penalised = tl.where(logits > 0, tl.div_rn(logits, tl.zeros_like(logits) + penalty), logits * penalty)
            penalised = tl.minimum(tl.maximum(penalised, -MAX_LOGIT), MAX_LOGIT)
            scores = tl.where((bits & SEEN) != 0, penalised, scores)
        if is_early:
            scores = tl.where((bits & STOP) != 0, -INFINITY, scores)
    return scores


@triton.jit
def _load_scores(logits, flags, ids, penalty, is_early, vocab_size, vocab_limit):
    """Scores of `ids` of a row whose logits start at `logits`; -inf where there is no such id."""
    # Masked by the row's end, which is a multiple of a vector's width, not by the limit, which may be anything.
    is_stored = ids < vocab_size
    values = tl.load(logits + ids, mask=is_stored, other=-INFINITY)
    scores = _scores_of(values, flags, ids, is_stored, penalty, is_early)
    return tl.where(ids < vocab_limit, scores, -INFINITY)


@triton.jit
def _largest_of(values, num_tiles):
    """Largest of a row's tile values."""
    largest = tl.full([TILES], -INFINITY, tl.float32)
    for begin in range(0, num_tiles, TILES):
        tiles = begin + tl.arange(0, TILES)
        largest = tl.maximum(largest, tl.load(values + tiles, mask=tiles < num_tiles, other=-INFINITY))
    return tl.max(largest, 0)


@triton.jit
def _smallest_of(values, num_tiles):
    """Smallest of a row's tile values."""
    smallest = tl.full([TILES], INFINITY, tl.float32)
    for begin in range(0, num_tiles, TILES):
        tiles = begin + tl.arange(0, TILES)
        smallest = tl.minimum(smallest, tl.load(values + tiles, mask=tiles < num_tiles, other=INFINITY))
    return tl.min(smallest, 0)


@triton.jit
def _id_of_largest(values, ids, num_tiles):
    """The lowest id among the tiles that hold the row's largest value; 0 if nothing is above -inf."""
    largest = _largest_of(values, num_tiles)
    lowest = tl.full([TILES], NO_ID, tl.int32)
    for begin in range(0, num_tiles, TILES):
        tiles = begin + tl.arange(0, TILES)
        in_row = tiles < num_tiles
        is_largest = tl.load(values + tiles, mask=in_row, other=-INFINITY) == largest
        here = tl.load(ids + tiles, mask=in_row, other=NO_ID)
        lowest = tl.minimum(lowest, tl.where(is_largest, here, NO_ID))
    return tl.where(largest > -INFINITY, tl.min(lowest, 0), 0)


@triton.jit
def sample_scan(
    logits,
    params,
    token_flags,
    slots,
    positions,
    tile_values,
    tile_ids,
    vocab_units,
    vocab_limit,
    TILE: tl.constexpr,
    VOCAB_UNIT: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """The extremes of a tile of a row. logits [rows, vocab_units * VOCAB_UNIT]; grid (tiles, rows, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    tile = tl.program_id(0)
    row = tl.program_id(1)
    num_tiles = tl.num_programs(0)
    vocab_size = vocab_units * VOCAB_UNIT
    values = tile_values + row * NUM_VALUES * num_tiles + tile

    # The tile is asked for first: an address that waits for its slot would hold back all loads behind it.
    ids = tile * TILE + tl.arange(0, TILE)
    is_stored = ids < vocab_size
    raw = tl.load(logits + row.to(tl.int64) * vocab_size + ids, mask=is_stored, other=-INFINITY)
    slot, flags, penalty, is_early = _score_rules(params, slots, positions, token_flags, row, vocab_size)
    wants_logprob = _integer(params, slot, WANTS_LOGPROB) != 0
    raw = tl.where(ids < vocab_limit, raw, -INFINITY)
    # A maximum may skip NaN, and both mean the same for the row.
    raw_largest = tl.max(tl.where(raw == raw, raw, INFINITY), 0)
    tl.store(values + RAW_LARGEST * num_tiles, raw_largest)
    if wants_logprob:
        offset = tl.where(raw_largest > -INFINITY, raw_largest, 0.0)
        tl.store(values + RAW_SUM * num_tiles, tl.sum(tl.exp(raw - offset), 0))

    scores = _scores_of(raw, flags, ids, is_stored, penalty, is_early)
    scores = tl.where(ids < vocab_limit, scores, -INFINITY)  # a penalty makes a number of -inf
    best, index = tl.max(scores, 0, return_indices=True)
    tl.store(values + BEST * num_tiles, best)
    tl.store(values + LOWEST * num_tiles, tl.min(tl.where(scores > -INFINITY, scores, INFINITY), 0))
    tl.store(tile_ids + (row * NUM_IDS + BEST_ID) * num_tiles + tile, tile * TILE + index)


@triton.jit
def _head_weight(
    logits,
    flags,
    penalty,
    is_early,
    vocab_size,
    vocab_limit,
    largest,
    decay,
    end,
    BY_MASS: tl.constexpr,
    STEP: tl.constexpr,
):
    """How many scores of a row are at most `end` (bits of a distance) below the largest, and their weight."""
    weight = 0.0
    count = 0
    for begin in range(0, vocab_size, STEP):
        ids = begin + tl.arange(0, STEP)
        distances = largest - _load_scores(logits, flags, ids, penalty, is_early, vocab_size, vocab_limit)
        is_head = distances.to(tl.int32, bitcast=True) <= end
        inside = tl.sum(is_head.to(tl.int32), 0)
        count += inside
        if BY_MASS:
            weight += tl.sum(tl.where(is_head, tl.exp2(distances * decay), 0.0), 0)
        else:
            weight += inside.to(tl.float32)
    return weight, count


@triton.jit
def _compact(
    logits,
    flags,
    penalty,
    is_early,
    vocab_size,
    vocab_limit,
    largest,
    above,
    end,
    candidates,
    STEP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write the bits of the distances within above + 1 .. end to `candidates`; their number."""
    count = 0
    for begin in range(0, vocab_size, STEP):
        ids = begin + tl.arange(0, STEP)
        distances = largest - _load_scores(logits, flags, ids, penalty, is_early, vocab_size, vocab_limit)
        bits = distances.to(tl.int32, bitcast=True)
        is_candidate = ((bits > above) & (bits <= end)).to(tl.int32)
        places = count + tl.cumsum(is_candidate, 0) - 1
        tl.store(candidates + places, bits, mask=(is_candidate != 0) & (places < CANDIDATES))
        count += tl.sum(is_candidate, 0)
    tl.debug_barrier()  # other threads of the program read what these have written
    return count


@triton.jit
def _middle_distance(above, end):
    """Bits of above + 1 .. end - 1 that halve the distances between, as far as that can be."""
    low = tl.maximum(above, 0).to(tl.float32, bitcast=True)
    middle = (0.5 * low + 0.5 * end.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(middle, above + 1), end - 1)


@triton.jit
def _head_end(
    logits,
    flags,
    penalty,
    is_early,
    vocab_size,
    vocab_limit,
    largest,
    decay,
    target,
    end,
    num_within,
    candidates,
    BY_MASS: tl.constexpr,
    STEP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Bits of the distance where the shortest head of a row that weighs `target` ends, and how many are in that head.

    Scores are seen as distances below the largest: these are not negative, so their order is that of their bits. The
    head's end is sought within above + 1 .. end, where at most num_within - num_above scores are. Passes over the row
    halve that until few are left; then these decide. A target that is not reached gives `end`.
    """
    above = -1
    num_above = 0
    weight_above = 0.0
    steps = 0
    while (end - above > 1) & (num_within - num_above > CANDIDATES):
        middle = above + (end - above) // 2
        if steps < NUM_DISTANCE_STEPS:
            middle = _middle_distance(above, end)
        weight, count = _head_weight(
            logits, flags, penalty, is_early, vocab_size, vocab_limit, largest, decay, middle, BY_MASS, STEP
        )
        if weight >= target:
            end = middle
            num_within = count
        else:
            above = middle
            num_above = count
            weight_above = weight
        steps += 1

    if num_within - num_above <= CANDIDATES:  # otherwise they are all equal, and `end` is it
        count = _compact(
            logits, flags, penalty, is_early, vocab_size, vocab_limit, largest, above, end, candidates, STEP, CANDIDATES
        )
        places = tl.arange(0, CANDIDATES)
        bits = tl.load(candidates + places, mask=places < count, other=NO_ID)
        weights = tl.exp2(bits.to(tl.float32, bitcast=True) * decay)
        num_within = num_above + tl.sum((bits <= end).to(tl.int32), 0)
        num_outside = num_above  # the candidates' own bracket narrows around the last one kept
        while (end - above > 1) & (num_within - num_outside > 1):
            middle = above + (end - above) // 2
            is_head = bits <= middle
            inside = num_above + tl.sum(is_head.to(tl.int32), 0)
            weight = inside.to(tl.float32)
            if BY_MASS:
                weight = weight_above + tl.sum(tl.where(is_head, weights, 0.0), 0)
            if weight >= target:
                end = middle
                num_within = inside
            else:
                above = middle
                num_outside = inside
        # Whatever ties in z with the last one kept stays too, so its own distance is the end.
        end = tl.maximum(tl.max(tl.where(bits <= end, bits, above), 0), 0)
        tl.debug_barrier()  # the candidates may be written anew
    return end, num_within


@triton.jit
def _row_floor(
    logits,
    flags,
    penalty,
    is_early,
    vocab_size,
    vocab_limit,
    largest,
    lowest,
    params,
    slot,
    candidates,
    STEP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The smallest z that may be drawn, at least HOPELESS, of a row with a finite largest score."""
    temperature = _real(params, slot, TEMPERATURE)
    top_k = _integer(params, slot, TOP_K)
    top_p = _real(params, slot, TOP_P)
    has_top_k = (top_k > 0) & (top_k < vocab_limit)
    floor = tl.maximum(_real(params, slot, LOG_MIN_P), HOPELESS)
    if has_top_k | (top_p < 1.0):
        decay = -LOG2_E / temperature
        # Hopeless scores need no search; one more is allowed for, as z is rounded.
        end = tl.minimum((1.0 - HOPELESS) * temperature, largest - lowest).to(tl.int32, bitcast=True)
        num_within = vocab_limit
        if has_top_k:
            end, num_within = _head_end(
                logits,
                flags,
                penalty,
                is_early,
                vocab_size,
                vocab_limit,
                largest,
                decay,
                top_k.to(tl.float32),
                end,
                num_within,
                candidates,
                False,
                STEP,
                CANDIDATES,
            )
        if top_p < 1.0:
            mass, num_within = _head_weight(
                logits, flags, penalty, is_early, vocab_size, vocab_limit, largest, decay, end, True, STEP
            )
            end, num_within = _head_end(
                logits,
                flags,
                penalty,
                is_early,
                vocab_size,
                vocab_limit,
                largest,
                decay,
                top_p * mass,
                end,
                num_within,
                candidates,
                True,
                STEP,
                CANDIDATES,
            )
        floor = tl.maximum(floor, tl.div_rn(-end.to(tl.float32, bitcast=True), temperature))
    return floor


@triton.jit
def sample_thresholds(
    logits,
    params,
    token_flags,
    slots,
    positions,
    tile_values,
    candidates,
    floors,
    largest_scores,
    num_tiles,
    vocab_units,
    vocab_limit,
    STEP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    VOCAB_UNIT: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """floors [rows]: the smallest z that may be drawn, +inf in a row that does not draw; largest_scores [rows].

    candidates int32 [rows, CANDIDATES] is scratch. grid (rows, 1, 1).
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0)
    vocab_size = vocab_units * VOCAB_UNIT
    slot, flags, penalty, is_early = _score_rules(params, slots, positions, token_flags, row, vocab_size)
    values = tile_values + row * NUM_VALUES * num_tiles
    largest = _largest_of(values + BEST * num_tiles, num_tiles)
    raw_largest = _largest_of(values + RAW_LARGEST * num_tiles, num_tiles)
    floor = INFINITY
    draws = _real(params, slot, TEMPERATURE) > 0
    if draws & (tl.abs(raw_largest) < INFINITY) & (tl.abs(largest) < INFINITY):
        floor = _row_floor(
            logits + row.to(tl.int64) * vocab_size,
            flags,
            penalty,
            is_early,
            vocab_size,
            vocab_limit,
            largest,
            _smallest_of(values + LOWEST * num_tiles, num_tiles),
            params,
            slot,
            candidates + row * CANDIDATES,
            STEP,
            CANDIDATES,
        )
    tl.store(floors + row, floor)
    tl.store(largest_scores + row, largest)


@triton.jit
def _gumbel_of_word(word):
    """Step 6's noise from random words (uint32)."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # log1p(-v) by log, which is exact to the last bits near 1: that of the rounded u = 1 - v, times v / (1 - u).
    u = 1.0 - v
    missing = tl.where(u == 1.0, 1.0, 1.0 - u)
    return -tl.log(tl.where(u == 1.0, v, -tl.log(u) * (v / missing)))


@triton.jit
def _gumbel(ids, position, seed_low, seed_high):
    """Step 6's noise of token ids."""
    counter = ids.to(tl.uint32)
    zero = tl.zeros_like(counter)
    word, _, _, _ = tl.philox_impl(zero + position.to(tl.uint32), counter, zero, zero, seed_low, seed_high, 10)
    return _gumbel_of_word(word)


@triton.jit
def sample_draw(
    logits,
    params,
    token_flags,
    slots,
    positions,
    floors,
    largest_scores,
    tile_values,
    tile_ids,
    vocab_units,
    vocab_limit,
    TILE: tl.constexpr,
    VOCAB_UNIT: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """The largest z + noise of a tile of a row that draws. grid (tiles, rows, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    tile = tl.program_id(0)
    row = tl.program_id(1)
    num_tiles = tl.num_programs(0)
    floor = tl.load(floors + row)
    if floor < INFINITY:
        vocab_size = vocab_units * VOCAB_UNIT
        slot, flags, penalty, is_early = _score_rules(params, slots, positions, token_flags, row, vocab_size)
        temperature = _real(params, slot, TEMPERATURE)
        largest = tl.load(largest_scores + row)
        values = tile_values + row * NUM_VALUES * num_tiles + tile
        drawn = -INFINITY
        index = 0
        if tl.div_rn(tl.load(values + BEST * num_tiles) - largest, temperature) >= floor:
            ids = tile * TILE + tl.arange(0, TILE)
            row_logits = logits + row.to(tl.int64) * vocab_size
            scores = _load_scores(row_logits, flags, ids, penalty, is_early, vocab_size, vocab_limit)
            z = tl.div_rn(scores - largest, tl.zeros_like(scores) + temperature)
            seed_low = _integer(params, slot, SEED_LOW).to(tl.uint32, bitcast=True)
            seed_high = _integer(params, slot, SEED_HIGH).to(tl.uint32, bitcast=True)
            noise = _gumbel(ids, tl.load(positions + row), seed_low, seed_high)
            drawn, index = tl.max(tl.where(z >= floor, z + noise, -INFINITY), 0, return_indices=True)
        tl.store(values + DRAWN * num_tiles, drawn)
        tl.store(tile_ids + (row * NUM_IDS + DRAWN_ID) * num_tiles + tile, tile * TILE + index)


@triton.jit
def _log_sum(values, num_tiles, largest):
    """log(sum of exp(logit)) of a row whose largest logit is finite."""
    total = tl.zeros([TILES], tl.float32)
    for begin in range(0, num_tiles, TILES):
        tiles = begin + tl.arange(0, TILES)
        in_row = tiles < num_tiles
        tile_largest = tl.load(values + RAW_LARGEST * num_tiles + tiles, mask=in_row, other=-INFINITY)
        tile_sum = tl.load(values + RAW_SUM * num_tiles + tiles, mask=in_row, other=0.0)
        total += tile_sum * tl.exp(tile_largest - largest)
    return largest + tl.log(tl.sum(total, 0))


@triton.jit
def sample_finish(
    logits,
    params,
    token_flags,
    last_tokens,
    slots,
    floors,
    tile_values,
    tile_ids,
    packed,
    num_tiles,
    max_rows,
    vocab_size,
    EARLY: tl.constexpr = False,
):
    """packed int32 [3, max_rows]: id, bits of the logprob (NaN unless wanted), whether the row is finite.

    The id becomes the slot's last token, and seen if the slot has a penalty. grid (rows, 1, 1).
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    values = tile_values + row * NUM_VALUES * num_tiles
    ids = tile_ids + row * NUM_IDS * num_tiles
    raw_largest = _largest_of(values + RAW_LARGEST * num_tiles, num_tiles)
    is_finite = tl.abs(raw_largest) < INFINITY
    token_id = 0
    logprob = tl.full((), float("nan"), tl.float32)
    if is_finite:
        if tl.load(floors + row) < INFINITY:
            token_id = _id_of_largest(values + DRAWN * num_tiles, ids + DRAWN_ID * num_tiles, num_tiles)
        else:
            token_id = _id_of_largest(values + BEST * num_tiles, ids + BEST_ID * num_tiles, num_tiles)
        if _integer(params, slot, WANTS_LOGPROB) != 0:
            raw = tl.load(logits + row.to(tl.int64) * vocab_size + token_id)
            logprob = raw - _log_sum(values, num_tiles, raw_largest)
    tl.store(packed + row, token_id)
    tl.store(packed + max_rows + row, logprob.to(tl.int32, bitcast=True))
    tl.store(packed + 2 * max_rows + row, is_finite.to(tl.int32))
    tl.store(last_tokens + slot, token_id)
    if _real(params, slot, PENALTY) != 1.0:
        flag = token_flags + slot.to(tl.int64) * vocab_size + token_id
        tl.store(flag, tl.load(flag) | SEEN)


@triton.jit
def mark_tokens(ids, token_flags, slot, vocab_size, count, flag, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """token_flags[slot, id] |= flag for ids [count]; ids may come twice. grid (ceil(count / BLOCK), 1, 1)."""
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_list = places < count
    entries = token_flags + slot.to(tl.int64) * vocab_size + tl.load(ids + places, mask=in_list, other=0)
    marked = tl.load(entries, mask=in_list, other=0) | flag.to(tl.uint8)
    tl.store(entries, marked, mask=in_list)


_ROW_INPUTS = {
    "logits": "*fp32",
    "params": "*i32",
    "token_flags": "*u8",
    "slots": "*i32",
    "positions": "*i32",
}
_VOCAB = {"vocab_units": "i32", "vocab_limit": "i32"}
_ANY_ADDRESS = {"slots": 4, "positions": 4}
_VOCAB_UNITS = (16, 1)  # the vocabulary's size is a multiple of it: 16 lets rows be read by vectors


def _by_unit(constants: dict[str, int], num_warps: int) -> tuple[Variant, ...]:
    return tuple(Variant({**constants, "VOCAB_UNIT": unit}, num_warps=num_warps) for unit in _VOCAB_UNITS)


SPECS = (
    KernelSpec(
        name="sample_scan",
        function="sample_scan",
        parameters={**_ROW_INPUTS, "tile_values": "*fp32", "tile_ids": "*i32", **_VOCAB},
        variants=_by_unit({"TILE": 4096}, 8),
        aligned=_ANY_ADDRESS,
    ),
    KernelSpec(
        name="sample_thresholds",
        function="sample_thresholds",
        parameters={
            **_ROW_INPUTS,
            "tile_values": "*fp32",
            "candidates": "*i32",
            "floors": "*fp32",
            "largest_scores": "*fp32",
            "num_tiles": "i32",
            **_VOCAB,
        },
        variants=_by_unit({"STEP": 8192, "CANDIDATES": 4096}, 32),
        aligned=_ANY_ADDRESS,
    ),
    KernelSpec(
        name="sample_draw",
        function="sample_draw",
        parameters={
            **_ROW_INPUTS,
            "floors": "*fp32",
            "largest_scores": "*fp32",
            "tile_values": "*fp32",
            "tile_ids": "*i32",
            **_VOCAB,
        },
        variants=_by_unit({"TILE": 4096}, 8),
        aligned=_ANY_ADDRESS,
    ),
    KernelSpec(
        name="sample_finish",
        function="sample_finish",
        parameters={
            "logits": "*fp32",
            "params": "*i32",
            "token_flags": "*u8",
            "last_tokens": "*i32",
            "slots": "*i32",
            "floors": "*fp32",
            "tile_values": "*fp32",
            "tile_ids": "*i32",
            "packed": "*i32",
            "num_tiles": "i32",
            "max_rows": "i32",
            "vocab_size": "i32",
        },
        variants=(Variant({}, num_warps=1),),
        aligned={"slots": 4},
    ),
    KernelSpec(
        name="mark_tokens",
        function="mark_tokens",
        parameters={
            "ids": "*i32",
            "token_flags": "*u8",
            "slot": "i32",
            "vocab_size": "i32",
            "count": "i32",
            "flag": "i32",
        },
        variants=(Variant({"BLOCK": 512}),),
        aligned={"ids": 4},
    ),
)
