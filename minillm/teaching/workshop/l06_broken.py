"""Lesson 06: five KV cache managers with one mistake each about shared blocks. The docstring of each is the mistake."""

from __future__ import annotations

from typing import Any

import minillm.cache.prefix as prefix
from minillm.engine.kv_cache_manager import KVCacheManager, SharedBlocks
from minillm.request import Request


class NoCopyOnWrite(KVCacheManager):
    """Writes into a shared block as if it were the only owner."""

    def allocate_slots(self, request: Request, start: int, num_tokens: int) -> bool:
        """The mistake: no block is copied."""
        counts = self.pool._ref_counts
        self.pool._ref_counts = [min(count, 1) for count in counts]  # no block looks shared while the base class asks
        try:
            before = list(self.pool._ref_counts)
            extended = super().allocate_slots(request, start, num_tokens)
            after = self.pool._ref_counts
        finally:
            self.pool._ref_counts = counts
        for block, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                counts[block] = new
        return extended


class EmptyCopy(KVCacheManager):
    """Takes a new block on writing, and forgets to copy what was in the old one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copy_blocks = lambda pairs: None


class SharesHalfFull(KVCacheManager):
    """Also shares blocks that are only partly filled, under the hash of the tokens they will hold later."""

    def cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """The mistake: the last block of the tokens counts as full."""
        super().cache_full_blocks(request, start, min(end + self.pool.block_size - 1, request.num_tokens))


class ForgetsParents(KVCacheManager):
    """Hashes a block's own tokens alone, without what stands before them."""

    def cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """The mistake: the hashes are those of the blocks alone."""
        self._forget_parents(request)
        super().cache_full_blocks(request, start, end)

    def get_computed_blocks(self, request: Request) -> SharedBlocks:
        """See `cache_full_blocks`."""
        self._forget_parents(request)
        return super().get_computed_blocks(request)

    def _forget_parents(self, request: Request) -> None:
        size = self.pool.block_size
        starts = range(0, len(request.token_ids) - size + 1, size)
        request._block_hashes[:] = [prefix.hash_block_tokens(b"", request.token_ids[at : at + size]) for at in starts]


class Leaks(KVCacheManager):
    """Does not return the last block of a finished request."""

    def free(self, request: Request, reason: str, keep: int = 0) -> None:
        """The mistake: the request loses its last block before they are freed."""
        if reason == "finished":
            request.block_table = request.block_table[:-1]
        super().free(request, reason, keep)


BROKEN = (NoCopyOnWrite, EmptyCopy, SharesHalfFull, ForgetsParents, Leaks)
