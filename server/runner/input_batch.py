"""Turns a StepPlan into the integers of a step: ragged chunks become flat arrays in host memory.

Knows plans, block tables and which sampling steps are in use. Does not know devices or tensors.
"""

from array import array
from collections.abc import Iterable

from server.kv.block_pool import SCRATCH_BLOCK
from server.ops.interface import ON_HOST, BatchLimits, StepInputs, StepShape
from server.ops.sampling import SamplingUse, SlotSampling, bounded_penalty, bounded_temperature
from server.scheduler.plan import SlotReset, StepPlan, TokenChunk

_NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


def slot_sampling(reset: SlotReset, eos_token_ids: Iterable[int], vocab_size: int) -> SlotSampling:
    """What the sampler has to know of a request; ids that are no tokens are dropped."""
    sampling = reset.sampling
    penalty = bounded_penalty(sampling.repetition_penalty)
    stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    return SlotSampling(
        temperature=bounded_temperature(sampling.temperature),
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=penalty,
        seed=sampling.seed,
        min_position=reset.num_prompt_tokens + sampling.min_tokens,
        seen_ids=_tokens_of(reset.token_ids, vocab_size) if penalty != 1 else (),
        stop_ids=_tokens_of(stop_ids, vocab_size) if sampling.min_tokens else (),
        logprobs=sampling.logprobs,
    )


class InputBatch:
    """Fills a step's host arrays. Remembers each slot's sampling, because a plan tells it only once."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._slots: dict[int, SlotSampling] = {}

    def reset_slot(self, slot: int, sampling: SlotSampling) -> None:
        """The slot is this request's from now on."""
        self._slots[slot] = sampling

    def fill(self, plan: StepPlan, host: StepInputs[memoryview]) -> StepShape:
        """Write the plan into `host`, front-aligned; what lies behind is left as it is."""
        limits = self._limits
        assert 0 < len(plan.chunks) <= limits.max_num_requests, f"{len(plan.chunks)} chunks in a step"
        assert plan.num_tokens <= limits.max_batched_tokens, f"{plan.num_tokens} tokens in a step"
        reads_last_tokens = self._fill_tokens(plan.chunks, host)
        self._fill_tables(plan.chunks, host)
        samples = [(self._slots[chunk.slot], chunk.start + chunk.num_tokens) for chunk in plan.chunks if chunk.samples]
        num_random = self._fill_samples(plan.chunks, host)
        return StepShape(
            starts=tuple(chunk.start for chunk in plan.chunks),
            lengths=tuple(chunk.num_tokens for chunk in plan.chunks),
            num_tokens=plan.num_tokens,
            num_decodes=_count_decodes(plan.chunks),
            num_samples=len(samples),
            num_random=num_random,
            reads_last_tokens=reads_last_tokens,
            sampling=_sampling_use(samples),
        )

    def fill_decodes(self, plan: StepPlan, host: StepInputs[memoryview], num_rows: int) -> StepShape:
        """As `fill`, for chunks of one token that all sample, with padding up to `num_rows` requests."""
        return self._pad(self.fill(plan, host), host, num_rows)

    def fill_padding(self, host: StepInputs[memoryview], num_rows: int) -> StepShape:
        """A decode step of nobody's requests."""
        host.query_starts[0] = 0
        empty = StepShape((), (), 0, 0, 0, 0, reads_last_tokens=False, sampling=_NO_SAMPLING)
        return self._pad(empty, host, num_rows)

    def _pad(self, shape: StepShape, host: StepInputs[memoryview], num_rows: int) -> StepShape:
        """Rows of the scratch block's first token, sampled for the slot behind the last one."""
        first, count = shape.num_chunks, num_rows - shape.num_chunks
        columns = self._limits.max_blocks_per_request
        _put(host.token_ids[first:], array("i", [0]) * count)
        _put(host.token_slots[first:], array("i", [ON_HOST]) * count)
        _put(host.positions[first:], array("i", [0]) * count)
        _put(host.kv_rows[first:], array("i", [SCRATCH_BLOCK * self._limits.block_size]) * count)
        _put(host.query_starts[first + 1 :], array("i", range(first + 1, num_rows + 1)))
        _put(host.context_lens[first:], array("i", [1]) * count)
        for row in range(first, num_rows):
            host.block_tables[row * columns] = SCRATCH_BLOCK
        _put(host.sample_rows[first:], array("i", range(first, num_rows)))
        _put(host.sample_slots[first:], array("i", [self._limits.max_num_requests]) * count)
        _put(host.sample_positions[first:], array("i", [1]) * count)
        return StepShape(
            starts=shape.starts + (0,) * count,
            lengths=shape.lengths + (1,) * count,
            num_tokens=num_rows,
            num_decodes=num_rows,
            num_samples=num_rows,
            num_random=shape.num_random,
            reads_last_tokens=shape.reads_last_tokens,
            sampling=shape.sampling,
        )

    def _fill_tokens(self, chunks: tuple[TokenChunk, ...], host: StepInputs[memoryview]) -> bool:
        token_ids, token_slots, positions, kv_rows = array("i"), array("i"), array("i"), array("i")
        block_size = self._limits.block_size
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            if chunk.input_on_device:
                assert chunk.num_tokens == 1, f"{chunk.num_tokens} tokens of slot {chunk.slot} cannot be on the device"
                token_ids.append(0)
                token_slots.append(chunk.slot)
            else:
                assert len(chunk.token_ids) == chunk.num_tokens
                token_ids.extend(chunk.token_ids)
                token_slots.extend([ON_HOST] * chunk.num_tokens)
            positions.extend(range(chunk.start, end))
            block_ids = chunk.block_ids
            kv_rows.extend([block_ids[p // block_size] * block_size + p % block_size for p in range(chunk.start, end)])
        _put(host.token_ids, token_ids)
        _put(host.token_slots, token_slots)
        _put(host.positions, positions)
        _put(host.kv_rows, kv_rows)
        return any(chunk.input_on_device for chunk in chunks)

    def _fill_tables(self, chunks: tuple[TokenChunk, ...], host: StepInputs[memoryview]) -> None:
        columns = self._limits.max_blocks_per_request
        query_starts, context_lens = array("i", [0]), array("i")
        for index, chunk in enumerate(chunks):
            query_starts.append(query_starts[-1] + chunk.num_tokens)
            context_lens.append(chunk.start + chunk.num_tokens)
            assert len(chunk.block_ids) <= columns, f"{len(chunk.block_ids)} blocks, a table has {columns}"
            _put(host.block_tables[index * columns :], array("i", chunk.block_ids))
        _put(host.query_starts, query_starts)
        _put(host.context_lens, context_lens)

    def _fill_samples(self, chunks: tuple[TokenChunk, ...], host: StepInputs[memoryview]) -> int:
        rows, slots, positions, random_samples = array("i"), array("i"), array("i"), array("i")
        end_row = 0
        for chunk in chunks:
            end_row += chunk.num_tokens
            if not chunk.samples:
                continue
            if self._slots[chunk.slot].is_random:
                random_samples.append(len(rows))
            rows.append(end_row - 1)
            slots.append(chunk.slot)
            positions.append(chunk.start + chunk.num_tokens)
        _put(host.sample_rows, rows)
        _put(host.sample_slots, slots)
        _put(host.sample_positions, positions)
        _put(host.random_samples, random_samples)
        return len(random_samples)


def _count_decodes(chunks: tuple[TokenChunk, ...]) -> int:
    """Leading chunks of one token: they can be attended together, whoever they belong to."""
    for index, chunk in enumerate(chunks):
        if chunk.num_tokens > 1:
            return index
    return len(chunks)


def _sampling_use(samples: list[tuple[SlotSampling, int]]) -> SamplingUse:
    drawn = [sampling for sampling, _ in samples if sampling.is_random]
    return SamplingUse(
        penalty=any(sampling.repetition_penalty != 1 for sampling, _ in samples),
        min_tokens=any(sampling.stop_ids and position < sampling.min_position for sampling, position in samples),
        top_k_or_top_p=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in drawn),
        min_p=any(sampling.min_p > 0 for sampling in drawn),
        logprobs=any(sampling.logprobs for sampling, _ in samples),
    )


def _tokens_of(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def _put(target: memoryview, values: "array[int]") -> None:
    target[: len(values)] = memoryview(values)
