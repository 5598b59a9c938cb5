import gc
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.kv.block_pool import BlockPool
from server.kv.prefix_index import PrefixIndex


class EvictionLog:
    """Remembers which blocks the pool was about to overwrite."""

    def __init__(self) -> None:
        self.block_ids: list[int] = []

    def __call__(self, block_ids: Sequence[int]) -> None:
        self.block_ids += block_ids


def lease(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.try_allocate(count)
    assert block_ids is not None
    return block_ids


def test_scratch_block_is_never_leased() -> None:
    pool = BlockPool(5, EvictionLog())
    assert sorted(lease(pool, 4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_lease_is_all_or_nothing() -> None:
    pool = BlockPool(5, EvictionLog())
    assert pool.try_allocate(5) is None
    assert pool.num_free == 4
    assert lease(pool, 0) == []


def test_block_is_free_when_its_last_holder_returns_it() -> None:
    pool = BlockPool(5, EvictionLog())
    block_ids = lease(pool, 2)
    pool.hold(block_ids)
    pool.release(block_ids)
    assert pool.num_held == 2
    pool.release(block_ids)
    assert pool.num_held == 0
    pool.check_integrity()


def test_releasing_a_free_block_is_an_error_of_ours() -> None:
    pool = BlockPool(5, EvictionLog())
    block_ids = lease(pool, 1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block_ids)


def test_kept_blocks_are_reused_last_and_the_longest_unused_first() -> None:
    log = EvictionLog()
    pool = BlockPool(7, log)
    old, new, worthless = lease(pool, 2), lease(pool, 2), lease(pool, 2)
    for block_id in old + new:
        pool.keep(block_id)
    pool.release(old)
    pool.release(new)
    pool.release(worthless)
    assert set(lease(pool, 2)) == set(worthless)
    assert log.block_ids == []
    assert lease(pool, 3) == [old[1], old[0], new[1]]  # of one table the tail goes first
    assert log.block_ids == [old[1], old[0], new[1]]


def test_cached_block_that_is_held_again_is_not_reused() -> None:
    pool = BlockPool(4, EvictionLog())
    block_ids = lease(pool, 3)
    for block_id in block_ids:
        pool.keep(block_id)
    pool.release(block_ids)
    pool.hold([block_ids[0]])
    assert pool.num_free == 2
    assert block_ids[0] not in lease(pool, 2)
    pool.check_integrity()


def test_block_that_is_not_worth_keeping_after_all_is_reused_first() -> None:
    log = EvictionLog()
    pool = BlockPool(4, log)
    block_ids = lease(pool, 3)
    for block_id in block_ids:
        pool.keep(block_id)
    pool.unkeep(block_ids[0])  # still held
    pool.release(block_ids)
    pool.unkeep(block_ids[1])  # cached
    assert set(lease(pool, 2)) == set(block_ids[:2])
    assert log.block_ids == []
    pool.check_integrity()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), num_blocks=st.integers(2, 12))
def test_every_block_is_in_one_state_whatever_is_leased_held_kept_and_returned(
    data: st.DataObject, num_blocks: int
) -> None:
    evicted = EvictionLog()
    pool = BlockPool(num_blocks, evicted)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["lease", "share", "release", "keep", "unkeep"]))
        if action == "lease":
            block_ids = pool.try_allocate(data.draw(st.integers(0, num_blocks)))
            if block_ids is not None:
                assert not {block_id for table in tables for block_id in table} & set(block_ids)
                tables.append(block_ids)
        elif tables:
            table = data.draw(st.sampled_from(tables))
            if action == "share":
                pool.hold(table)
                tables.append(list(table))
            elif action == "release":
                tables.remove(table)
                pool.release(table)
            else:
                for block_id in table:
                    pool.keep(block_id)
                    if action == "unkeep":
                        pool.unkeep(block_id)
        pool.check_integrity()
        assert pool.num_held == len({block_id for table in tables for block_id in table})
    for table in tables:
        pool.release(table)
    assert pool.num_free == num_blocks - 1


@pytest.mark.slow  # not under coverage, whose tracing takes ten times as long
@pytest.mark.parametrize("is_cached", [False, True])
def test_lease_of_16_blocks_at_95_percent_full_takes_microseconds(is_cached: bool) -> None:
    """Measured 0.8 us from empty blocks, 3.2 us when all are cached; the bound leaves room for a busy machine."""
    index = PrefixIndex()
    pool = BlockPool(20_001, index.evict)
    free_ids = lease(pool, 20_000)[:1000]
    durations_us = []
    gc.collect()
    for _ in range(5):
        if is_cached:
            for block_id in free_ids:
                index.add(block_id.to_bytes(16, "little"), block_id)
                pool.keep(block_id)
        pool.release(free_ids)
        leased = []
        for _ in range(62):
            begin = time.perf_counter_ns()
            block_ids = pool.try_allocate(16)
            durations_us.append((time.perf_counter_ns() - begin) / 1e3)
            assert block_ids is not None
            leased += block_ids
        free_ids = leased + lease(pool, 8)
    assert sorted(durations_us)[len(durations_us) // 2] < 25
