"""Which KV blocks are free, and how many requests hold each of the others.

Knows block ids and counts. Does not know tensors, requests or prefixes: only that the content of some blocks is worth
keeping, so that these are reused last, the longest unused first.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

SCRATCH_BLOCK = 0  # never leased: padding rows and warm-ups write there


class BlockPool:
    """Leases blocks 1 .. num_blocks - 1. Lease and return cost O(1) per block, however full the pool is.

    A block is in one of three states:

        held       num_holders > 0              leased, perhaps by several requests
        empty      free, content is worthless   reused first
        cached     free, content is kept        reused when no empty block is left; `on_evict` is told then
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[Sequence[int]], None]) -> None:
        """`on_evict` gets the ids of cached blocks that a lease is about to overwrite."""
        assert num_blocks > 1, f"a pool of {num_blocks} blocks has none to lease"
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._empty_ids = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._cached_ids: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._num_holders = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)  # 1: becomes cached, not empty, when its last holder returns it

    @property
    def num_leasable(self) -> int:
        """Blocks in the pool, the scratch block not counted."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that a lease can get: empty and cached ones."""
        return len(self._empty_ids) + len(self._cached_ids)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_leasable - self.num_free

    def try_allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when fewer are free."""
        num_empty = len(self._empty_ids)
        if count > num_empty + len(self._cached_ids):
            return None
        split = max(0, num_empty - count)
        block_ids = self._empty_ids[split:]
        del self._empty_ids[split:]
        if len(block_ids) < count:
            block_ids += self._evict(count - len(block_ids))
        num_holders = self._num_holders
        for block_id in block_ids:
            num_holders[block_id] = 1
        return block_ids

    def _evict(self, count: int) -> list[int]:
        block_ids = list(itertools.islice(self._cached_ids, count))
        for block_id in block_ids:
            del self._cached_ids[block_id]
            self._is_kept[block_id] = 0
        self._on_evict(block_ids)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each of these blocks, which are held or cached."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                del self._cached_ids[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each of these blocks, which stand in the order of a block table."""
        # Tail first: a prefix outlives its suffix, so it must be reused last.
        for block_id in reversed(block_ids):
            num_holders = self._num_holders[block_id] - 1
            assert num_holders >= 0, f"block {block_id} released twice"
            self._num_holders[block_id] = num_holders
            if num_holders:
                continue
            if self._is_kept[block_id]:
                self._cached_ids[block_id] = None
            else:
                self._empty_ids.append(block_id)

    def num_holders(self, block_id: int) -> int:
        """Requests that hold the block; 0: it is free."""
        return self._num_holders[block_id]

    def keep(self, block_id: int) -> None:
        """From now on the content of this held block is worth keeping."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is free, its content may be gone"
        self._is_kept[block_id] = 1

    def unkeep(self, block_id: int) -> None:
        """The content of this kept block, held or cached, is worthless after all."""
        self._is_kept[block_id] = 0
        if not self._num_holders[block_id]:
            del self._cached_ids[block_id]
            self._empty_ids.append(block_id)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state. O(num_blocks): for tests and idle moments."""
        empty, cached = set(self._empty_ids), set(self._cached_ids)
        held = {block_id for block_id, count in enumerate(self._num_holders) if count}
        assert len(empty) == len(self._empty_ids), "a block is twice among the empty ones"
        assert len(empty) + len(cached) + len(held) == self.num_leasable, "blocks were lost or counted twice"
        assert empty | cached | held == set(range(1, self.num_blocks)), "scratch or unknown blocks are in the pool"
        assert all(self._is_kept[block_id] for block_id in cached), "a cached block is not worth keeping"
        assert not any(self._is_kept[block_id] for block_id in empty), "an empty block is worth keeping"
