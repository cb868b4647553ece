"""The allocator of cache blocks: who owns which block. It never touches keys or values.

A block is free or has one or more owners; its reference count is the number of block tables that hold it. The tables
themselves belong to the requests, and after an accident (an interrupt between two lines) they are the truth from
which `reclaim` rebuilds the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from minillm.errors import MinillmError


class BlockPoolError(MinillmError):
    """The pool's books do not balance: a defect of the engine, never of its input."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._ref_counts: list[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

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
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each block; those without any left are free. The first of them is allocated next."""
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise BlockPoolError(f"block {block_id} was freed twice")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def reclaim(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Make the books say what these tables say, and nothing else."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        self._ref_counts = [owners[block_id] for block_id in range(self.num_blocks)]
        self._free = [block_id for block_id in range(self.num_blocks - 1, -1, -1) if not owners[block_id]]

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `BlockPoolError` unless free + used = total and every reference count is its number of owners."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts):
            if count != owners[block_id]:
                raise BlockPoolError(f"block {block_id} counts {count} owners, {owners[block_id]} tables hold it")
        if len(set(self._free)) != len(self._free):
            raise BlockPoolError("a block is in the free list twice")
        for block_id in self._free:
            if self._ref_counts[block_id]:
                raise BlockPoolError(f"block {block_id} is free and has {self._ref_counts[block_id]} owners")
        if len(self._free) + sum(count > 0 for count in self._ref_counts) != self.num_blocks:
            raise BlockPoolError(f"{self.num_blocks - len(self._free)} blocks are not free, but fewer have owners")
