"""The allocator of cache blocks: who owns which block, and which contents are kept. It never touches keys or values.

A block is *used* (it has owners), *cached* (it has no owner, but its contents have a hash and can be shared again) or
*empty*. Its reference count is the number of block tables that hold it. Cached blocks count as free: when no empty
block is left, the least recently used one is evicted. The block tables belong to the requests. After an interrupt (such
as Ctrl-C) between any two lines, `reclaim` rebuilds the pool from them.

    allocate: empty → used, cached → (evicted) → used        share: used or cached → used, one owner more
    free:     used → used, one owner less → cached if it has a hash, else empty
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import islice

from minillm.errors import MinillmError


class BlockPoolError(MinillmError):
    """The pool's records contradict each other: a bug in the engine, never in its input."""


def _ignore(block_ids: list[int]) -> None:
    """The default callback."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[list[int]], None] = _ignore
        """Called with the cached blocks that were just evicted."""
        self.on_free: Callable[[list[int]], None] = _ignore
        """Called with the blocks that just became empty."""
        self._empty: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._ref_counts: list[int] = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_with: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def cached_blocks(self) -> list[int]:
        """The ids of the blocks that have no owner but whose contents are kept, ascending."""
        return sorted(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """Owners of a block; 0 if it is free."""
        return self._ref_counts[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None (and no change) if there are not that many."""
        if count > self.num_free:
            return None
        evicted = list(islice(self._cached, max(0, count - len(self._empty))))
        if evicted:
            self._evict(evicted)
        taken = [self._empty.pop() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each of these used or cached blocks one more owner."""
        for block_id in block_ids:
            if not self._ref_counts[block_id] and block_id not in self._cached:
                raise BlockPoolError(f"block {block_id} is empty; there is nothing in it to share")
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each block. Blocks that become empty are allocated again in the given order. Blocks that
        become cached are evicted in reverse order, because fewer requests can share a longer prefix."""
        empty = []
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise BlockPoolError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            if block_id in self._hash_of:
                self._cached[block_id] = None
            else:
                empty.append(block_id)
        self._empty += empty
        if empty:
            self.on_free(empty)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full, used block findable by the hash of its contents. Returns False, without a change, if another
        block has that hash or this block already has one."""
        if block_hash in self._block_with or block_id in self._hash_of:
            return False
        self._hash_of[block_id] = block_hash
        self._block_with[block_hash] = block_id
        return True

    def find(self, block_hash: bytes) -> int | None:
        """The used or cached block whose contents have this hash, or None."""
        return self._block_with.get(block_hash)

    def evict_cached(self) -> None:
        """Empty every cached block."""
        if self._cached:
            self._evict(list(self._cached))

    def _evict(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self._cached[block_id]
            del self._block_with[self._hash_of.pop(block_id)]
            self._empty.append(block_id)
        self.on_evict(block_ids)
        self.on_free(block_ids)

    def reclaim(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Rebuild the pool from these tables alone; what can be found by its hash is evicted."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        evicted = list(self._hash_of)
        self._hash_of, self._block_with, self._cached = {}, {}, OrderedDict()
        self._ref_counts = [owners[block_id] for block_id in range(self.num_blocks)]
        self._empty = [block_id for block_id in range(self.num_blocks - 1, -1, -1) if not owners[block_id]]
        with ExitStack() as calls:  # makes both, the last one first
            if self._empty:
                calls.callback(self.on_free, list(self._empty))
            if evicted:
                calls.callback(self.on_evict, evicted)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `BlockPoolError` unless empty + cached + used = total, each block's reference count is its number of
        owners, and every hash leads to the block that has it."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        free = [*self._empty, *self._cached]
        if unknown := {*owners, *free} - set(range(self.num_blocks)):
            raise BlockPoolError(f"there is no block {min(unknown)}")
        for block_id, count in enumerate(self._ref_counts):
            if count != owners[block_id]:
                raise BlockPoolError(f"block {block_id} counts {count} owners, {owners[block_id]} tables hold it")
        if len(set(free)) != len(free):
            raise BlockPoolError("a block is free twice")
        for block_id in free:
            if self._ref_counts[block_id]:
                raise BlockPoolError(f"block {block_id} is free and has {self._ref_counts[block_id]} owners")
        if len(free) + sum(count > 0 for count in self._ref_counts) != self.num_blocks:
            raise BlockPoolError(f"{self.num_blocks - len(free)} blocks are not free, but fewer have owners")
        pairs = {(block_hash, block_id) for block_id, block_hash in self._hash_of.items()}
        if pairs != set(self._block_with.items()):
            raise BlockPoolError("a hash leads to a block that has another hash")
        if not self._cached.keys() <= self._hash_of.keys() or self._hash_of.keys() & set(self._empty):
            raise BlockPoolError("a cached block has no hash, or an empty block has one")
