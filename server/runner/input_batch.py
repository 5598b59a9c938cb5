"""Turns a StepPlan into the integers of a step: ragged chunks become flat arrays in host memory.

Knows plans, block tables and which sampling steps are in use. Does not know devices or tensors.
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate, compress
from operator import add

from server.kv.block_pool import SCRATCH_BLOCK
from server.ops.interface import HEADER_FIELDS, ON_HOST, BatchLimits, StepInputs, StepShape, StepSize
from server.ops.sampling import SamplingUse, SlotSampling, bounded_penalty, bounded_temperature
from server.runner.slot_uses import SlotUses
from server.runner.staged_tables import StagedTables, TableWidth
from server.runner.step_columns import StepColumns
from server.scheduler.plan import SlotReset, StepPlan


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
    """Fills a step's host arrays. Remembers what each buffer's block tables hold, and each slot's sampling.

    A step of decodes is filled column by column: at 256 requests a loop over chunks takes longer than the step may.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._block_size = limits.block_size
        self._uses = SlotUses()
        self._width = TableWidth(limits)
        self._tables: dict[int, tuple[StepInputs[memoryview], StagedTables]] = {}  # by the id of the host arrays
        most = max(limits.max_batched_tokens, limits.max_num_requests) + 1
        self._rising = memoryview(array("i", range(most)))
        self._ones = memoryview(array("i", [1]) * most)
        self._zeros = memoryview(array("i", [0]) * most)
        self._on_host = memoryview(array("i", [ON_HOST]) * most)
        self._scratch_rows = memoryview(array("i", [SCRATCH_BLOCK * limits.block_size]) * most)
        self._no_slots = memoryview(array("i", [limits.max_num_requests]) * most)

    def reset_slot(self, slot: int, sampling: SlotSampling) -> None:
        """The slot is this request's from now on."""
        self._uses.reset(slot, sampling)

    def fill(
        self, plan: StepPlan | StepColumns, host: StepInputs[memoryview], size: StepSize | None = None
    ) -> StepShape:
        """Write the plan into `host`, front-aligned, padded to `size` if given; what lies behind is left as it is.

        Raises AssertionError, before anything is issued, for a plan that would read or write past a table or array.
        """
        columns = plan if isinstance(plan, StepColumns) else StepColumns.of(plan)
        columns.check(self._limits)
        exact = columns.size
        size = exact if size is None else size
        reads_last_tokens = self._fill_decodes(columns, host)
        if exact.num_prefills:
            self._fill_prefills(columns, host)
        num_chunks = len(columns.slots)
        contexts = list(map(add, columns.starts, columns.lengths))
        host.context_lens[:num_chunks] = array("i", contexts)
        host.slots[:num_chunks] = array("i", columns.slots)
        table_columns = self._fill_tables(columns, host)
        # HEADER_FIELDS
        host.header[:] = array("i", (exact.num_decodes, num_chunks, exact.num_tokens, table_columns))
        use, num_random = self._fill_samples(columns, contexts, host)
        self._pad(exact, size, host)
        return StepShape(
            starts=columns.starts,
            lengths=columns.lengths,
            num_decodes=exact.num_decodes,
            num_samples=exact.num_samples,
            num_random=num_random,
            reads_last_tokens=reads_last_tokens,
            sampling=use,
            table_rows=max(columns.slots) + 1,
            table_columns=table_columns,
            size=size,
        )

    def fill_padding(self, host: StepInputs[memoryview], size: StepSize) -> StepShape:
        """A step of nobody's requests."""
        host.header[:] = array("i", (0,) * len(HEADER_FIELDS))
        self._pad(StepSize(0, 0, 0, 0), size, host)
        use, _ = self._uses.use((), ())
        return StepShape(
            (), (), 0, 0, 0, reads_last_tokens=False, sampling=use, table_rows=0, table_columns=0, size=size
        )

    def _fill_decodes(self, columns: StepColumns, host: StepInputs[memoryview]) -> bool:
        """The tokens of the leading chunks of one token each; whether any is on the device."""
        count, block_size = columns.num_decodes, self._block_size
        decodes = columns.chunks if count == len(columns.chunks) else columns.chunks[:count]
        known = [chunk.token_ids for chunk in decodes]
        if any(known):
            assert max(map(len, known)) == 1, f"{max(map(len, known))} ids for a chunk of one token"
            host.token_ids[:count] = array("i", [ids[0] if ids else 0 for ids in known])
            slots = [ON_HOST if ids else slot for ids, slot in zip(known, columns.slots, strict=False)]
            host.token_slots[:count] = array("i", slots)
        else:
            host.token_ids[:count] = self._zeros[:count]
            host.token_slots[:count] = array("i", columns.slots[:count])
        starts = columns.starts[:count]
        host.positions[:count] = array("i", starts)
        try:
            rows = [
                block_ids[start // block_size] * block_size + start % block_size
                for block_ids, start in zip(columns.block_ids, starts, strict=False)
            ]
        except IndexError:
            raise AssertionError(self._beyond_table(columns)) from None
        host.kv_rows[:count] = array("i", rows)
        host.query_starts[: count + 1] = self._rising[: count + 1]
        return not all(known)

    def _fill_prefills(self, columns: StepColumns, host: StepInputs[memoryview]) -> None:
        """The tokens of the other chunks, which follow the decodes."""
        first, block_size = columns.num_decodes, self._block_size
        token_ids, positions, kv_rows, query_starts = array("i"), array("i"), array("i"), array("i")
        end_row = first
        for chunk in columns.chunks[first:]:
            start, end = chunk.start, chunk.start + chunk.num_tokens
            assert len(chunk.token_ids) == chunk.num_tokens, (
                f"{len(chunk.token_ids)} ids for {chunk.num_tokens} tokens of slot {chunk.slot} behind the decodes"
            )
            assert end <= len(chunk.block_ids) * block_size, self._beyond_table(columns)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(start, end))
            for block in range(start // block_size, -(-end // block_size)):
                row = (chunk.block_ids[block] - block) * block_size  # of the request's position 0, were it in one piece
                kv_rows.extend(range(row + max(start, block * block_size), row + min(end, (block + 1) * block_size)))
            end_row += chunk.num_tokens
            query_starts.append(end_row)
        host.token_ids[first:end_row] = token_ids
        host.token_slots[first:end_row] = self._on_host[: end_row - first]
        host.positions[first:end_row] = positions
        host.kv_rows[first:end_row] = kv_rows
        host.query_starts[first + 1 : first + 1 + len(query_starts)] = query_starts

    def _fill_tables(self, columns: StepColumns, host: StepInputs[memoryview]) -> int:
        """Columns of the tables."""
        width = self._width.fit(max(map(len, columns.block_ids)))
        staged = self._tables.get(id(host))
        if staged is None:
            # The arrays are kept: another's could have their id otherwise.
            staged = self._tables[id(host)] = (host, StagedTables(host.block_tables, self._limits))
        staged[1].write(columns.slots, columns.block_ids, width)
        return width

    def _fill_samples(
        self, columns: StepColumns, contexts: list[int], host: StepInputs[memoryview]
    ) -> tuple[SamplingUse, int]:
        """Which sampling steps are in use, and how many samples draw."""
        count = columns.size.num_samples
        slots, positions = columns.slots, contexts
        if count == columns.size.num_tokens:
            host.sample_rows[:count] = self._rising[:count]
        else:
            slots, positions = list(compress(slots, columns.samples)), list(compress(contexts, columns.samples))
            rows = [end_row - 1 for end_row in compress(accumulate(columns.lengths), columns.samples)]
            host.sample_rows[:count] = array("i", rows)
        host.sample_slots[:count] = array("i", slots)
        host.sample_positions[:count] = array("i", positions)
        use, is_any_random = self._uses.use(slots, positions)
        drawn = array("i", self._uses.random_samples(slots)) if is_any_random else ()
        if drawn:
            host.random_samples[: len(drawn)] = drawn
        return use, len(drawn)

    def _pad(self, exact: StepSize, size: StepSize, host: StepInputs[memoryview]) -> None:
        first, end = exact.num_tokens, size.num_tokens
        if first < end:
            for target, padding in (
                (host.token_ids, self._zeros),
                (host.token_slots, self._on_host),
                (host.positions, self._zeros),
                (host.kv_rows, self._scratch_rows),
            ):
                target[first:end] = padding[first:end]
        first, end = exact.num_samples, size.num_samples
        if first < end:
            host.sample_rows[first:end] = self._zeros[first:end]
            host.sample_slots[first:end] = self._no_slots[first:end]
            host.sample_positions[first:end] = self._ones[first:end]

    def _beyond_table(self, columns: StepColumns) -> str:
        """Of the first chunk for which it is true."""
        for slot, start, length, block_ids in zip(
            columns.slots, columns.starts, columns.lengths, columns.block_ids, strict=True
        ):
            if start + length > len(block_ids) * self._block_size:
                return (
                    f"positions {start} .. {start + length - 1} of slot {slot} are beyond its table of "
                    f"{len(block_ids)} blocks of {self._block_size} tokens"
                )
        return "a chunk is beyond its block table"


def _tokens_of(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
