import pytest

from server.kv.prefix_index import ROOT_DIGEST, PrefixIndex, chain_digest


def test_digest_depends_on_the_ids_their_order_and_all_ids_before() -> None:
    first = chain_digest(ROOT_DIGEST, [1, 2, 3, 4])
    digests = {
        first,
        chain_digest(ROOT_DIGEST, [1, 2, 4, 3]),
        chain_digest(ROOT_DIGEST, [1, 2, 3, 5]),
        chain_digest(first, [1, 2, 3, 4]),
        chain_digest(chain_digest(ROOT_DIGEST, [9, 9, 9, 9]), [1, 2, 3, 4]),
    }
    assert len(digests) == 5


def test_digest_is_the_same_in_every_process() -> None:
    assert chain_digest(ROOT_DIGEST, [1, 2, 151643, 2**32 - 1]).hex() == "2d8da5cf60aaab58bc2939da4018c76a"


def test_find_returns_the_longest_run_from_the_start() -> None:
    index = PrefixIndex()
    index.add(b"a", 1)
    index.add(b"b", 2)
    index.add(b"d", 4)
    assert index.find([b"a", b"b", b"c", b"d"]) == [1, 2]
    assert index.find([b"c", b"a"]) == []


def test_first_block_of_a_prefix_stands_for_it() -> None:
    index = PrefixIndex()
    assert index.add(b"a", 1)
    assert not index.add(b"a", 2)
    assert index.find([b"a"]) == [1]
    assert len(index) == 1


def test_block_cannot_stand_for_two_prefixes() -> None:
    index = PrefixIndex()
    index.add(b"a", 1)
    with pytest.raises(AssertionError, match="another prefix"):
        index.add(b"b", 1)


def test_evicted_and_removed_prefixes_are_forgotten() -> None:
    index = PrefixIndex()
    for block_id, digest in enumerate((b"a", b"b", b"c"), start=1):
        index.add(digest, block_id)
    index.evict([2])
    assert index.remove(b"c") == 3
    assert index.remove(b"c") is None
    assert index.find([b"a", b"b"]) == [1]
    index.check_integrity()
