"""The allocator of cache blocks: who owns which block, and which contents are kept. It never touches keys or values.

A block is *used* (it has owners), *cached* (nobody owns it, but its contents have a name and can be shared again) or
*empty*. Its reference count is the number of block tables that hold it. Cached blocks count as free: when no empty
block is left, the one that was used longest ago is evicted. The tables themselves belong to the requests, and after
an accident (an interrupt between two lines) they are the truth from which `reclaim` rebuilds the pool.

    allocate: empty → used, cached → (evicted) → used        share: used or cached → used, one owner more
    free:     used → used, one owner less → cached if it has a name, else empty
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from minillm.errors import MinillmError


class BlockPoolError(MinillmError):
    """The pool's books do not balance: a defect of the engine, never of its input."""


def _nobody(block_ids: list[int]) -> None:
    """Told of blocks by default."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[list[int]], None] = _nobody
        """Told which cached blocks have just lost their names."""
        self.on_free: Callable[[list[int]], None] = _nobody
        """Told which blocks have just become empty."""
        self._empty: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._ref_counts: list[int] = [0] * num_blocks
        self._names: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns but whose contents are kept."""
        return len(self._cached)

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
        evicted = list(self._cached)[: max(0, count - len(self._empty))]
        if evicted:
            self._forget(evicted)
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
        """Take one owner from each block. Of the empty blocks the first given is allocated next, of the cached ones the
        last given is evicted first: the longer a prefix, the fewer can use it."""
        empty = []
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise BlockPoolError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id]:
                continue
            if block_id in self._names:
                self._cached[block_id] = None
            else:
                empty.append(block_id)
        self._empty += empty
        if empty:
            self.on_free(empty)

    def name(self, block_id: int, name: bytes) -> bool:
        """Let a full, used block be found by the name of its contents. False if there is such a block already."""
        if name in self._blocks or block_id in self._names:
            return False
        self._names[block_id] = name
        self._blocks[name] = block_id
        return True

    def find(self, name: bytes) -> int | None:
        """The used or cached block with these contents."""
        return self._blocks.get(name)

    def forget_cached(self) -> None:
        """Empty every cached block."""
        if self._cached:
            self._forget(list(self._cached))

    def _forget(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            del self._cached[block_id]
            del self._blocks[self._names.pop(block_id)]
            self._empty.append(block_id)
        self.on_evict(block_ids)
        self.on_free(block_ids)

    def reclaim(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Make the books say what these tables say, and nothing else: all names are forgotten."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        evicted = list(self._cached)
        self._names, self._blocks, self._cached = {}, {}, OrderedDict()
        self._ref_counts = [owners[block_id] for block_id in range(self.num_blocks)]
        self._empty = [block_id for block_id in range(self.num_blocks - 1, -1, -1) if not owners[block_id]]
        if evicted:
            self.on_evict(evicted)
        if self._empty:
            self.on_free(list(self._empty))

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `BlockPoolError` unless empty + cached + used = total, every reference count is its number of owners,
        and names and blocks belong to each other."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        free = [*self._empty, *self._cached]
        if strangers := {*owners, *free} - set(range(self.num_blocks)):
            raise BlockPoolError(f"there is no block {min(strangers)}")
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
        pairs = {(name, block_id) for block_id, name in self._names.items()}
        if pairs != set(self._blocks.items()):
            raise BlockPoolError("a block is found by another name than its own")
        if not self._cached.keys() <= self._names.keys() or self._names.keys() & set(self._empty):
            raise BlockPoolError("a cached block has no name, or an empty block has one")
