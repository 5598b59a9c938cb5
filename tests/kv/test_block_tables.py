import pytest

from server.kv.block_tables import BlockTable, BlockTables


def opened(tables: BlockTables, token_ids: list[int], num_cached: int) -> BlockTable:
    table = BlockTable()
    assert tables.try_open(table, token_ids, num_spare=0) == num_cached
    return table


def test_table_has_blocks_for_all_tokens_and_grows_by_one() -> None:
    tables = BlockTables(10, 4, prefix_cache=True)
    table = opened(tables, list(range(9)), 0)
    assert len(table.block_ids) == 3
    assert tables.try_extend(table)
    assert len(table.block_ids) == 4
    tables.check_integrity([table])


def test_table_is_not_opened_when_too_few_blocks_would_stay_free() -> None:
    tables = BlockTables(5, 4, prefix_cache=True)
    table = BlockTable()
    assert tables.try_open(table, list(range(12)), num_spare=2) is None
    assert table.block_ids == ()
    assert tables.num_free == 4
    assert tables.try_open(table, list(range(12)), num_spare=1) == 0


def test_full_pool_extends_no_table() -> None:
    tables = BlockTables(3, 4, prefix_cache=True)
    table = opened(tables, list(range(8)), 0)
    assert not tables.try_extend(table)
    assert len(table.block_ids) == 2


@pytest.mark.parametrize(("num_shared", "num_cached"), [(3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8), (12, 8)])
def test_whole_blocks_of_a_shared_prefix_are_found_but_never_the_last_token(num_shared: int, num_cached: int) -> None:
    tables = BlockTables(20, 4, prefix_cache=True)
    token_ids = list(range(12))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 12)
    second = opened(tables, token_ids[:num_shared] + [99] * (12 - num_shared), num_cached)
    assert second.block_ids[: num_cached // 4] == first.block_ids[: num_cached // 4]
    assert not set(second.block_ids[num_cached // 4 :]) & set(first.block_ids)
    tables.check_integrity([first, second])


def test_closed_table_keeps_its_content_until_its_blocks_are_reused() -> None:
    tables = BlockTables(5, 4, prefix_cache=True)
    token_ids = list(range(9))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 9)
    tables.close(first)
    assert tables.num_free == 4
    again = opened(tables, token_ids, 8)
    tables.close(again)
    tables.close(opened(tables, [50] * 12, 0))  # two empty blocks, then the tail of the cached prefix
    tables.close(opened(tables, token_ids, 4))
    tables.close(opened(tables, [60] * 16, 0))
    tables.close(opened(tables, token_ids, 0))
    tables.check_integrity([])


def test_opening_does_not_evict_the_blocks_that_it_found() -> None:
    tables = BlockTables(5, 4, prefix_cache=True)
    token_ids = list(range(16))
    first = opened(tables, token_ids[:12], 0)
    found_ids = first.block_ids
    tables.offer(first, token_ids, 12)
    tables.close(first)
    second = opened(tables, token_ids, 12)
    assert second.block_ids[:3] == found_ids
    assert len(set(second.block_ids)) == 4
    tables.check_integrity([second])


def test_found_blocks_that_nobody_holds_count_as_taken() -> None:
    tables = BlockTables(4, 4, prefix_cache=True)
    token_ids = list(range(8))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 8)
    tables.close(first)
    table = BlockTable()
    assert tables.try_open(table, token_ids, num_spare=2) is None
    assert tables.try_open(table, token_ids, num_spare=1) == 4


def test_partly_written_block_is_not_shared() -> None:
    tables = BlockTables(10, 4, prefix_cache=True)
    token_ids = list(range(9))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 7)
    opened(tables, token_ids, 4)
    tables.offer(first, token_ids, 8)
    opened(tables, token_ids, 8)


def test_second_copy_of_a_prefix_is_not_kept() -> None:
    tables = BlockTables(10, 4, prefix_cache=True)
    token_ids = list(range(5))
    first, second = opened(tables, token_ids, 0), opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 5)
    tables.offer(second, token_ids, 5)
    third = opened(tables, token_ids, 4)
    assert third.block_ids[0] == first.block_ids[0]
    tables.check_integrity([first, second, third])


def test_distrusted_prefix_is_not_found_whoever_holds_its_blocks() -> None:
    tables = BlockTables(10, 4, prefix_cache=True)
    token_ids = list(range(9))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 9)
    second = opened(tables, token_ids, 8)
    tables.close(first)
    tables.distrust(first)
    third = opened(tables, token_ids, 0)
    for table in (second, third):
        tables.close(table)
    assert tables.num_free == 9
    tables.check_integrity([])


def test_blocks_found_before_their_prefix_was_distrusted_are_not_offered_again() -> None:
    tables = BlockTables(20, 4, prefix_cache=True)
    token_ids = list(range(13))
    first = opened(tables, token_ids[:9], 0)
    tables.offer(first, token_ids, 9)
    second = opened(tables, token_ids, 8)
    tables.distrust(first)
    tables.offer(second, token_ids, 13)
    third = opened(tables, token_ids, 0)
    tables.check_integrity([first, second, third])


def test_without_prefix_cache_nothing_is_found() -> None:
    tables = BlockTables(10, 4, prefix_cache=False)
    token_ids = list(range(9))
    first = opened(tables, token_ids, 0)
    tables.offer(first, token_ids, 9)
    second = opened(tables, token_ids, 0)
    assert not set(first.block_ids) & set(second.block_ids)


def test_pool_that_lost_count_of_a_table_is_noticed() -> None:
    tables = BlockTables(10, 4, prefix_cache=True)
    table = opened(tables, list(range(5)), 0)
    with pytest.raises(AssertionError, match="held by nobody"):
        tables.check_integrity([])
    tables.check_integrity([table])
