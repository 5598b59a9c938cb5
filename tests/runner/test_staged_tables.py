"""Block tables in host memory: what is written, what is not written again, and how wide the rows are."""

from array import array

import pytest

from server.ops.interface import BatchLimits
from server.runner.staged_tables import MIN_COLUMNS, StagedTables, TableWidth

LIMITS = BatchLimits(64, 4, 512, 100, 8)
UNTOUCHED = -9


class CountingWords:
    """Host memory that counts what is written to it."""

    def __init__(self) -> None:
        self.words = memoryview(array("i", [UNTOUCHED] * (LIMITS.max_num_requests * LIMITS.max_blocks_per_request)))
        self.num_written = 0

    def __setitem__(self, where: slice, values: "array[int]") -> None:
        self.words[where] = values
        self.num_written += len(values)


def staged() -> tuple[StagedTables, CountingWords]:
    words = CountingWords()
    return StagedTables(words, LIMITS), words  # type: ignore[arg-type]


def test_rows_are_written_once_until_their_table_is_another() -> None:
    tables, words = staged()
    first, second = (5, 6), (7, 8, 9)
    tables.write([2, 0], [first, second], 8)
    assert words.words[16:19].tolist() == [5, 6, UNTOUCHED]
    assert words.words[:4].tolist() == [7, 8, 9, UNTOUCHED]
    tables.write([0, 2], [second, first], 8)  # the same slots in another order
    assert words.num_written == 5
    grown = (*first, 10)
    tables.write([2], [grown], 8)
    assert words.words[16:19].tolist() == [5, 6, 10]
    assert words.num_written == 6, "only the block that is new"
    tables.write([2, 0], [(5, 7), second], 8)  # another request's
    assert words.words[16:18].tolist() == [5, 7]
    assert words.num_written == 8


def test_a_table_that_is_shorter_than_the_one_before_is_right_as_far_as_it_goes() -> None:
    tables, words = staged()
    tables.write([0], [(1, 2, 3)], 8)
    tables.write([0], [(1, 2)], 8)
    tables.write([0], [(1, 2, 4)], 8)
    assert words.words[:3].tolist() == [1, 2, 4]


def test_rows_are_written_again_when_their_width_changes() -> None:
    tables, words = staged()
    first, second = (5, 6), (7, 8, 9)
    tables.write([1, 2], [first, second], 8)
    tables.write([2], [second], 16)
    assert words.words[32:35].tolist() == [7, 8, 9]
    tables.write([1, 2], [first, second], 16)
    assert words.words[16:18].tolist() == [5, 6]
    assert words.num_written == 10


@pytest.mark.parametrize("table", [(1, -1), (100, 3)])
def test_blocks_that_the_pool_does_not_have_are_refused(table: tuple[int, ...]) -> None:
    tables, words = staged()
    with pytest.raises(AssertionError, match=r"block .* of slot 3"):
        tables.write([3], [table], 8)
    assert words.num_written == 0


def test_width_follows_the_longest_table_but_not_at_once_when_that_is_shorter() -> None:
    width = TableWidth(LIMITS)
    assert [width.fit(longest) for longest in (1, 8, 9, 8, 5, 4, 33, 17, 9, 8, 64, 1)] == [
        MIN_COLUMNS, 8, 16, 16, 16, 16, 64, 64, 16, 16, 64, MIN_COLUMNS,
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="65 blocks of a request, a table has 64"):
        width.fit(65)


def test_width_is_bounded_by_the_longest_request() -> None:
    width = TableWidth(BatchLimits(64, 4, 77, 100, 8))
    assert [width.fit(longest) for longest in (1, 9, 10)] == [8, 10, 10]
    assert TableWidth(BatchLimits(64, 4, 20, 100, 8)).fit(2) == 3
