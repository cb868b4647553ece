"""The KV cache manager: which blocks each request holds, and which of them it shares with others.

A shared block is never written: a request that is about to write into one gets its own copy first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.cache.block_pool import BlockPool
from minillm.request import Request
from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    Event,
)


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks that already hold the first `num_tokens` tokens of a request."""

    block_ids: list[int]
    num_tokens: int
    source: str


NO_SHARED_BLOCKS = SharedBlocks([], 0, "prefix")


class KVCacheManager:
    """Gives the requests blocks of the pool. A subclass takes its place in a `Scheduler` that names it as its
    `kv_cache_manager_cls`."""

    def __init__(
        self,
        pool: BlockPool,
        enable_prefix_caching: bool,
        emit: Callable[[Event], None],
        copy_blocks: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self.pool = pool
        self.enable_prefix_caching = enable_prefix_caching
        self.emit = emit
        self.copy_blocks = copy_blocks
        pool.on_evict = lambda block_ids: emit(BlocksEvicted(list(block_ids)))

    def get_computed_blocks(self, request: Request) -> SharedBlocks:
        """Blocks that a waiting request can share. Its last token is always computed, because its logits are needed."""
        parent = request.fork_of
        if parent is not None and not parent.finished and not request.num_output_tokens:
            shared = self.pool.blocks_for(request.num_prompt_tokens)
            start = request.num_prompt_tokens - 1
            return SharedBlocks(parent.block_table[:shared], start, "fork")
        if not self.enable_prefix_caching or request.lacks_prompt_logprobs:
            return NO_SHARED_BLOCKS
        found: list[int] = []
        hashes = request.block_hashes(self.pool.block_size)
        for block_hash in hashes[: (request.num_tokens - 1) // self.pool.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return SharedBlocks(found, len(found) * self.pool.block_size, "prefix")

    def share(self, request: Request, found: SharedBlocks) -> None:
        """Make these blocks the first ones of a request that has none yet."""
        if found.block_ids:
            self.pool.share(found.block_ids)
            request.block_table += found.block_ids
            self.emit(BlocksShared(request.request_id, found.block_ids, found.num_tokens, found.source))

    def allocate_slots(self, request: Request, start: int, num_tokens: int) -> bool:
        """Give `request` blocks of its own for tokens `start … start + num_tokens - 1`.

        Missing blocks are appended, shared ones copied. Returns False, without any change, if the pool has too few.
        Full blocks of committed tokens are registered at once, so that other requests find them in this same step: a
        layer stores all keys before it reads any.
        """
        end, held = start + num_tokens, len(request.block_table)
        needed = self.pool.blocks_for(end)
        missing = max(0, needed - held)
        written = range(start // self.pool.block_size, min(needed, held))
        shared = [i for i in written if self.pool.ref_count(request.block_table[i]) > 1]
        block_ids = self.pool.allocate(missing + len(shared)) if missing or shared else []
        if block_ids is None:
            return False
        for index in shared:
            self._copy_on_write(request, index, block_ids.pop())
        if block_ids:
            request.block_table += block_ids
            self.emit(BlocksAllocated(request.request_id, block_ids))
        self.cache_full_blocks(request, start, min(end, request.num_tokens))
        return True

    def _copy_on_write(self, request: Request, index: int, target: int) -> None:
        source = request.block_table[index]
        self.copy_blocks([(source, target)])  # contents first: an interrupt after this line loses nothing
        request.block_table[index] = target
        self.pool.free([source])
        self.emit(BlockCopied(request.request_id, source, target))

    def cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Register the hashes of the blocks that become full when tokens `start … end - 1` are computed."""
        size = self.pool.block_size
        full = range(start // size, end // size)
        if not (full and self.enable_prefix_caching):
            return
        table, hashes = request.block_table, request.block_hashes(size)
        cached = [table[i] for i in full if self.pool.register(table[i], hashes[i])]
        if cached:
            self.emit(BlocksCached(request.request_id, cached))

    def free(self, request: Request, reason: str, keep: int = 0) -> None:
        """Free the blocks of a request, except the first `keep`. `reason`: see `BlocksFreed`."""
        tail = request.block_table[keep:]
        if tail:
            self.pool.free(tail)
            del request.block_table[keep:]
            self.emit(BlocksFreed(request.request_id, tail, reason))
