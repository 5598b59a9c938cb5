"""Which block holds the KV of which token prefix, by a chained hash of the token ids.

Knows digests and block ids. Does not know requests, nor whether a block is held or free.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)  # the parent of a request's first block


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of one full block: of its own ids and, through `parent`, of all tokens before it.

    128 bits of BLAKE2b: two different prefixes share a digest with a probability of about n^2 / 2^129 over n blocks,
    also if somebody chooses the prompts, so ids are not compared again.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixIndex:
    """A one-to-one map between digests and the blocks that hold their KV."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_ids)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known run of digests, from the first one on."""
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._block_ids.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def add(self, digest: bytes, block_id: int) -> bool:
        """Let `block_id` stand for `digest`; False, and no change, if another block does so already."""
        if digest in self._block_ids:
            return False
        assert block_id not in self._digests, f"block {block_id} stands for another prefix"
        self._block_ids[digest] = block_id
        self._digests[block_id] = digest
        return True

    def remove(self, digest: bytes) -> int | None:
        """Forget a prefix; the block that stood for it, or None if there was none."""
        block_id = self._block_ids.pop(digest, None)
        if block_id is not None:
            del self._digests[block_id]
        return block_id

    def evict(self, block_ids: Sequence[int]) -> None:
        """Forget these known blocks, whose content is about to be overwritten."""
        for block_id in block_ids:
            del self._block_ids[self._digests.pop(block_id)]

    def check_integrity(self) -> None:
        """Assert that both directions agree. For tests and idle moments."""
        assert {block_id: digest for digest, block_id in self._block_ids.items()} == self._digests
