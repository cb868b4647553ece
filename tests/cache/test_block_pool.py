"""The allocator under every order of use: nothing is lost or freed twice, and hashes lead to the right blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minillm.cache.block_pool import BlockPool, BlockPoolError

WHICH = st.integers(0, 999)
"""Picks one of however many there are."""


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests that grow, fork, roll back, lose everything and end, against a model of who owns and what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=11, block_size=4)
        self.pool.on_evict = self.see_evicted
        self.pool.on_free = self.see_freed
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, int] = {}
        self.hashes: dict[int, bytes] = {}
        """Block → its hash, as it should be."""
        self.cached: list[int] = []
        """Named blocks without owners, the one to be evicted next first."""
        self.evicted: list[int] = []
        self.freed: list[int] = []
        self.next_request = self.next_hash = 0

    # What the pool tells, taken down; and what it should have told.

    def see_evicted(self, block_ids: list[int]) -> None:
        assert block_ids, "nobody needs to hear that nothing was evicted"
        self.evicted += block_ids

    def see_freed(self, block_ids: list[int]) -> None:
        assert block_ids
        self.freed += block_ids

    def owners(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.tables.values())

    def expect_told(self, evicted: list[int], freed: list[int]) -> None:
        assert self.evicted == evicted
        assert sorted(self.freed) == sorted(freed)
        self.evicted, self.freed = [], []

    def allocate(self, count: int) -> list[int] | None:
        """Allocate, and check who had to go for it: those that nobody has used for the longest time."""
        num_empty = self.pool.num_blocks - self.pool.num_used - len(self.cached)
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > num_empty + len(self.cached))
        num_evicted = 0 if blocks is None else max(0, count - num_empty)
        gone, self.cached = self.cached[:num_evicted], self.cached[num_evicted:]
        for block_id in gone:
            del self.hashes[block_id]
        self.expect_told(gone, gone)
        if blocks is not None:
            assert len(blocks) == len(set(blocks)) == count
            assert not any(self.owners(block_id) or block_id in self.cached for block_id in blocks)
        return blocks

    def release(self, request: int, keep: int) -> None:
        """Take the tail of a table away."""
        tail = self.tables[request][keep:]
        del self.tables[request][keep:]
        self.pool.free(tail)
        ownerless = [block_id for block_id in reversed(tail) if not self.owners(block_id)]
        self.cached += [block_id for block_id in ownerless if block_id in self.hashes]
        self.expect_told([], [block_id for block_id in ownerless if block_id not in self.hashes])

    def pick(self, which: int) -> int:
        return sorted(self.tables)[which % len(self.tables)]

    # --------------------------------------------------------------------------------------------------------- rules

    @rule(num_tokens=st.integers(1, 30))
    def add(self, num_tokens: int) -> None:
        """A new request takes what it needs, or nothing."""
        blocks = self.allocate(self.pool.blocks_for(num_tokens))
        if blocks is not None:
            self.tables[self.next_request], self.tokens[self.next_request] = blocks, num_tokens
            self.next_request += 1

    @precondition(lambda self: self.tables)
    @rule(which=WHICH, num_tokens=st.integers(1, 9))
    def append(self, which: int, num_tokens: int) -> None:
        """A request grows by some tokens: decoding, verification or a prefill chunk."""
        request = self.pick(which)
        total = self.tokens[request] + num_tokens
        blocks = self.allocate(self.pool.blocks_for(total) - len(self.tables[request]))
        if blocks is not None:
            self.tables[request] += blocks
            self.tokens[request] = total

    @precondition(lambda self: self.tables)
    @rule(which=WHICH, kept=WHICH)
    def roll_back(self, which: int, kept: int) -> None:
        """Rejected drafts go: whole tail blocks return."""
        request = self.pick(which)
        self.tokens[request] = 1 + kept % self.tokens[request]
        self.release(request, self.pool.blocks_for(self.tokens[request]))

    @precondition(lambda self: self.tables)
    @rule(which=WHICH)
    def free_or_preempt(self, which: int) -> None:
        """A request ends or is preempted: all its blocks return."""
        request = self.pick(which)
        self.release(request, 0)
        del self.tables[request], self.tokens[request]

    @precondition(lambda self: self.tables)
    @rule(which=WHICH, index=WHICH, old=st.booleans())
    def register(self, which: int, index: int, old: bool) -> None:
        """A block is full and gets a hash. A hash that another block has, or a second hash, is refused."""
        table = self.tables[self.pick(which)]
        block_id = table[index % len(table)]
        taken = sorted(self.hashes.values())
        block_hash = taken[index % len(taken)] if old and taken else b"%d" % self.next_hash
        self.next_hash += 1
        accepted = self.pool.register(block_id, block_hash)
        assert accepted == (block_hash not in taken and block_id not in self.hashes)
        if accepted:
            self.hashes[block_id] = block_hash

    @precondition(lambda self: self.hashes)
    @rule(which=WHICH, count=st.integers(1, 3), num_more=st.integers(0, 3))
    def share(self, which: int, count: int, num_more: int) -> None:
        """A new request finds hashed blocks, used or cached, and takes others besides."""
        hashes = sorted(self.hashes.values())
        found = [self.pool.find(h) for h in (hashes + hashes)[which % len(hashes) :][: min(count, len(hashes))]]
        self.pool.share(found)
        self.cached = [block_id for block_id in self.cached if block_id not in found]
        self.expect_told([], [])
        self.tables[self.next_request] = list(found)
        blocks = self.allocate(num_more)
        self.tables[self.next_request] += blocks or []
        self.tokens[self.next_request] = len(self.tables[self.next_request]) * self.pool.block_size
        self.next_request += 1

    @precondition(lambda self: self.tables)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        """Another completion of the same prompt shares all its blocks, with or without hashes."""
        request = self.pick(which)
        self.pool.share(self.tables[request])
        self.tables[self.next_request] = list(self.tables[request])
        self.tokens[self.next_request] = self.tokens[request]
        self.next_request += 1

    @precondition(lambda self: any(self.owners(b) > 1 for table in self.tables.values() for b in table))
    @rule(which=WHICH)
    def copy_on_write(self, which: int) -> None:
        """Who is to write into a shared block gets one of its own."""
        shared = [(r, i) for r, table in self.tables.items() for i, b in enumerate(table) if self.owners(b) > 1]
        request, index = shared[which % len(shared)]
        blocks = self.allocate(1)
        if blocks is not None:
            [source], self.tables[request][index : index + 1] = self.tables[request][index : index + 1], blocks
            self.pool.free([source])
            self.expect_told([], [])

    @rule()
    def evict_cached(self) -> None:
        """The prefix cache is emptied; what is in use keeps its hash."""
        self.pool.evict_cached()
        for block_id in self.cached:
            del self.hashes[block_id]
        self.expect_told(self.cached, self.cached)
        self.cached = []

    @rule()
    def reclaim(self) -> None:
        """After an accident the tables alone rebuild the pool, and no hash is trusted."""
        stolen = self.allocate(min(2, self.pool.num_free))
        assert stolen is not None
        self.pool.reclaim(self.tables.values())
        empty = [block_id for block_id in range(self.pool.num_blocks) if not self.owners(block_id)]
        self.expect_told(list(self.hashes), empty)
        self.hashes, self.cached = {}, []

    # ---------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def books_balance(self) -> None:
        """No block is lost, shared by accident or counted wrongly, and tables hold just what their tokens need."""
        self.pool.check_integrity(self.tables.values())
        used = {block for table in self.tables.values() for block in table}
        assert len(used) == self.pool.num_used
        assert self.pool.num_used + self.pool.num_free == self.pool.num_blocks
        assert all(self.pool.ref_count(b) == self.owners(b) for b in range(self.pool.num_blocks))
        for request, table in self.tables.items():
            assert len(table) == self.pool.blocks_for(self.tokens[request])

    @invariant()
    def hashes_lead_to_their_blocks(self) -> None:
        """Exactly the cached blocks are found, each by its own hash."""
        assert self.pool.cached_blocks == sorted(self.cached)
        for block_id, block_hash in self.hashes.items():
            assert self.pool.find(block_hash) == block_id
        for number in range(self.next_hash):
            if b"%d" % number not in self.hashes.values():
                assert self.pool.find(b"%d" % number) is None


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=120, stateful_step_count=40)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    pool.check_integrity([first or []])
    assert pool.num_free == 1


def test_an_allocation_that_does_not_fit_evicts_nothing() -> None:
    pool = BlockPool(4, 16)
    kept, held = pool.allocate(1) or [], pool.allocate(2) or []
    pool.register(kept[0], b"kept")
    pool.free(kept)
    assert pool.allocate(3) is None
    assert pool.find(b"kept") == kept[0]
    pool.check_integrity([held])


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2) or []
    pool.free(blocks)
    with pytest.raises(BlockPoolError, match="freed twice"):
        pool.free(blocks)


def test_an_empty_block_cannot_be_shared() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(1) or []
    pool.free(blocks)
    with pytest.raises(BlockPoolError, match="nothing in it to share"):
        pool.share(blocks)


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_fill_blocks(num_tokens: int, blocks: int) -> None:
    assert BlockPool(8, 16).blocks_for(num_tokens) == blocks


def test_freed_blocks_come_back_in_order() -> None:
    pool = BlockPool(6, 4)
    table = pool.allocate(4) or []
    pool.free(table[1:])
    assert pool.allocate(3) == table[1:]


def test_of_one_prefix_the_end_is_evicted_first() -> None:
    """The longer a prefix, the fewer can use it; and a block behind a lost one can never be found again."""
    pool = BlockPool(4, 4)
    table = pool.allocate(4) or []
    for block_id in table:
        pool.register(block_id, b"%d" % block_id)
    pool.free(table)
    evicted: list[int] = []
    pool.on_evict = evicted.extend
    for _ in table:
        pool.allocate(1)
    assert evicted == table[::-1]


def test_what_is_shared_again_is_evicted_last() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(3) or []
    for block_id in table:
        pool.register(block_id, b"%d" % block_id)
        pool.free([block_id])
    pool.share(table[:1])
    pool.free(table[:1])
    evicted: list[int] = []
    pool.on_evict = evicted.extend
    pool.allocate(2)
    assert evicted == table[1:]


# ------------------------------------------------------------------------------------------- the check must see damage


def a_pool() -> tuple[BlockPool, list[list[int]]]:
    """Six blocks: 0 (cached) and 1 with one owner each, 2 with two, 3 cached, 4 and 5 empty."""
    pool = BlockPool(6, 4)
    tables = [pool.allocate(3) or [], pool.allocate(1) or []]
    pool.register(0, b"zero")
    pool.register(3, b"three")
    pool.free(tables.pop())
    pool.share([2])
    return pool, [*tables, [2]]


def drop_hash(pool: BlockPool, block_id: int) -> None:
    del pool._block_with[pool._hash_of.pop(block_id)]


DAMAGE: dict[str, tuple[Callable[[BlockPool, list[list[int]]], object], str]] = {
    "a leak": (lambda pool, tables: tables[0].remove(1), "block 1 counts 1 owners, 0 tables"),
    "an owner too many": (lambda pool, tables: tables.append([0]), "block 0 counts 1 owners, 2 tables"),
    "an owner too few": (lambda pool, tables: tables.pop(), "block 2 counts 2 owners, 1 tables"),
    "a cached block in a table": (lambda pool, tables: tables.append([3]), "block 3 counts 0 owners, 1 tables"),
    "an empty block in a table": (lambda pool, tables: tables.append([5]), "block 5 counts 0 owners, 1 tables"),
    "a strange block in a table": (lambda pool, tables: tables.append([6]), "no block 6"),
    "a strange empty block": (lambda pool, tables: pool._empty.append(-1), "no block -1"),
    "empty twice": (lambda pool, tables: pool._empty.append(4), "free twice"),
    "empty and cached": (lambda pool, tables: pool._empty.append(3), "free twice"),
    "empty and used": (lambda pool, tables: pool._empty.append(1), "block 1 is free and has 1 owners"),
    "cached and used": (lambda pool, tables: pool._cached.update({0: None}), "block 0 is free and has 1 owners"),
    "an empty block lost": (lambda pool, tables: pool._empty.remove(4), "4 blocks are not free, but fewer"),
    "a cached block lost": (lambda pool, tables: pool._cached.clear(), "4 blocks are not free, but fewer"),
    "a hash that leads nowhere": (lambda pool, tables: pool._block_with.pop(b"zero"), "another hash"),
    "a block without its hash": (lambda pool, tables: pool._hash_of.pop(0), "another hash"),
    "one hash for two blocks": (lambda pool, tables: pool._hash_of.update({2: b"three"}), "another hash"),
    "two hashes for one block": (lambda pool, tables: pool._block_with.update({b"3": 3}), "another hash"),
    "hashes crossed": (lambda pool, tables: pool._block_with.update({b"zero": 3, b"three": 0}), "another hash"),
    "cached without a hash": (lambda pool, tables: drop_hash(pool, 3), "cached block has no hash"),
    "empty with a hash": (lambda pool, tables: pool._cached.clear() or pool._empty.append(3), "empty block has one"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_integrity_check_sees_planted_damage(damage: str) -> None:
    pool, tables = a_pool()
    pool.check_integrity(tables)
    plant, words = DAMAGE[damage]
    plant(pool, tables)
    with pytest.raises(BlockPoolError, match=words):
        pool.check_integrity(tables)
