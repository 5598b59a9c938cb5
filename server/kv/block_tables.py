"""The block tables of requests: which pool blocks hold the KV of which positions, shared where prefixes are equal.

Knows token ids and positions. Does not know steps, slots or sampling. One BlockTables owns the pool and the index.

    position       0 .. b-1    b .. 2b-1   2b .. 3b-1      (b = block_size)
    block_ids      [  17    ,     4     ,      9     ]     9 may be partly written
    digests        [  d0    ,    d1     ]                  full blocks of known ids, hashed once per request
"""

import sys
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import takewhile

from server.kv.block_pool import BlockPool
from server.kv.prefix_index import ROOT_DIGEST, PrefixIndex, chain_digest


@dataclass(slots=True, eq=False)
class BlockTable:
    """One request's blocks. `digests` outlive the blocks: a preempted request is looked up again for nothing."""

    block_ids: tuple[int, ...] = ()
    num_positions: int = 0  # that the blocks hold
    num_offered: int = 0  # leading full blocks that came from the index or were offered to it
    next_offer: int = 0  # positions written from which on `offer` has something to do
    digests: list[bytes] = field(default_factory=list)


class BlockTables:
    """Opens, extends and closes block tables over one pool. Shared blocks are full and never written again."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        """`num_blocks` counts the scratch block, `block_size` is in tokens."""
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, on_evict=self._index.evict)

    @property
    def num_leasable(self) -> int:
        """Blocks that requests can hold, together."""
        return self._pool.num_leasable

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, each counted once."""
        return self._pool.num_held

    def num_blocks_for(self, num_positions: int) -> int:
        """Blocks that a table of this many positions needs."""
        return -(-num_positions // self.block_size)

    def try_open(self, table: BlockTable, token_ids: Sequence[int], num_spare: int) -> int | None:
        """Lease blocks for all of `token_ids`, reusing known prefixes; the number of tokens found in the pool.

        None, and no change, if fewer than `num_spare` blocks would stay free. At least one token is left to compute.
        """
        assert not table.block_ids, "the table is open"
        hits = self._find(table, token_ids)
        num_new = self.num_blocks_for(len(token_ids)) - len(hits)
        num_revived = sum(not self._pool.num_holders(block_id) for block_id in hits)
        if num_new + num_revived + num_spare > self._pool.num_free:
            return None
        self._pool.hold(hits)  # before the lease, which could evict them
        block_ids = self._pool.try_allocate(num_new)
        assert block_ids is not None, "the pool has fewer free blocks than it said"
        table.block_ids = (*hits, *block_ids)
        table.num_positions = len(table.block_ids) * self.block_size
        self._set_offered(table, len(hits))
        return len(hits) * self.block_size

    def look_up(self, table: BlockTable, token_ids: Sequence[int], coming: Set[bytes]) -> tuple[int, int]:
        """Leading tokens that are in the pool, and tokens after them whose blocks have digests in `coming`."""
        num_found = len(self._find(table, token_ids))
        num_full = (len(token_ids) - 1) // self.block_size
        num_coming = len(list(takewhile(coming.__contains__, table.digests[num_found:num_full])))
        return num_found * self.block_size, num_coming * self.block_size

    def not_offered(self, table: BlockTable, num_written: int) -> list[bytes]:
        """Digests of the full blocks among the first `num_written` positions that `offer` will make known."""
        return table.digests[table.num_offered : num_written // self.block_size]

    def _find(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        if not self._prefix_cache:
            return []
        num_full = (len(token_ids) - 1) // self.block_size  # the last token is always computed: its logits are needed
        self._extend_digests(table, token_ids, num_full)
        return self._index.find(table.digests[:num_full])

    def _extend_digests(self, table: BlockTable, token_ids: Sequence[int], num_full: int) -> None:
        digests, size = table.digests, self.block_size
        for start in range(len(digests) * size, num_full * size, size):
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(chain_digest(parent, token_ids[start : start + size]))

    def try_extend(self, table: BlockTable) -> bool:
        """Add one block to the table; False, and no change, if none is free."""
        block_ids = self._pool.try_allocate(1)
        if block_ids is None:
            return False
        table.block_ids = (*table.block_ids, *block_ids)
        table.num_positions += self.block_size
        return True

    def offer(self, table: BlockTable, token_ids: Sequence[int], num_written: int) -> None:
        """Let later requests share the full blocks among the first `num_written` positions.

        NOTE: a block may be offered once the step that writes it has been planned, since later plans run after it;
        never before, and never with an id that the host does not know yet.
        """
        num_full = num_written // self.block_size
        if not self._prefix_cache or num_full <= table.num_offered:
            return
        self._extend_digests(table, token_ids, num_full)
        for i in range(table.num_offered, num_full):
            if self._index.add(table.digests[i], table.block_ids[i]):
                self._pool.keep(table.block_ids[i])
        self._set_offered(table, num_full)

    def _set_offered(self, table: BlockTable, num_blocks: int) -> None:
        table.num_offered = num_blocks
        table.next_offer = (num_blocks + 1) * self.block_size if self._prefix_cache else sys.maxsize

    def distrust(self, table: BlockTable) -> None:
        """Nobody may reuse this request's prefixes, whichever blocks hold them: their content may be non-finite."""
        for digest in table.digests:
            block_id = self._index.remove(digest)
            if block_id is not None:
                self._pool.unkeep(block_id)

    def close(self, table: BlockTable) -> None:
        """Return the blocks. What was offered keeps its content until its blocks are reused."""
        self._pool.release(table.block_ids)
        table.block_ids, table.num_positions = (), 0

    def check_integrity(self, open_tables: Sequence[BlockTable]) -> None:
        """Assert that pool, index and tables (all open ones must be given) agree. For tests and idle moments."""
        self._pool.check_integrity()
        self._index.check_integrity()
        held = Counter(block_id for table in open_tables for block_id in table.block_ids)
        assert len(held) == self._pool.num_held, "a block is held by nobody, or not held although in a table"
        assert all(self._pool.num_holders(block_id) == count for block_id, count in held.items())
