"""Lesson 06: five schedulers with one mistake each about shared blocks. The docstring of each is the mistake."""

from __future__ import annotations

from typing import Any

import minillm.cache.prefix as prefix
from minillm.engine.scheduler import Scheduler, SharedBlocks
from minillm.request import Request


class NoCopyOnWrite(Scheduler):
    """Writes into a shared block as if it were the only owner."""

    def _reserve_slots(self, request: Request, start: int, num_tokens: int) -> bool:
        counts = self.pool._ref_counts
        self.pool._ref_counts = [min(count, 1) for count in counts]  # no block looks shared while the base class asks
        try:
            before = list(self.pool._ref_counts)
            extended = super()._reserve_slots(request, start, num_tokens)
            after = self.pool._ref_counts
        finally:
            self.pool._ref_counts = counts
        for block, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                counts[block] = new
        return extended


class EmptyCopy(Scheduler):
    """Takes a new block on writing, and forgets to copy what was in the old one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copy_blocks = lambda pairs: None


class SharesHalfFull(Scheduler):
    """Also shares blocks that are only partly filled, under the hash of the tokens they will hold later."""

    def _cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        super()._cache_full_blocks(request, start, min(end + self.pool.block_size - 1, request.num_tokens))


class ForgetsParents(Scheduler):
    """Hashes a block's own tokens alone, without what stands before them."""

    def _cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        self._forget_parents(request)
        super()._cache_full_blocks(request, start, end)

    def _find_shared_blocks(self, request: Request) -> SharedBlocks:
        self._forget_parents(request)
        return super()._find_shared_blocks(request)

    def _forget_parents(self, request: Request) -> None:
        size = self.pool.block_size
        starts = range(0, len(request.token_ids) - size + 1, size)
        request._block_hashes[:] = [prefix.hash_block_tokens(b"", request.token_ids[at : at + size]) for at in starts]


class Leaks(Scheduler):
    """Does not return the last block of a finished request."""

    def _free(self, request: Request, keep: int, reason: str) -> None:
        if reason == "finished":
            request.block_table = request.block_table[:-1]
        super()._free(request, keep, reason)


BROKEN = (NoCopyOnWrite, EmptyCopy, SharesHalfFull, ForgetsParents, Leaks)
