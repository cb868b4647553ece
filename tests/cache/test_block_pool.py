"""The allocator under every order of use: nothing is lost, freed twice or leaked."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minillm.cache.block_pool import BlockPool, BlockPoolError


class BlockPoolMachine(RuleBasedStateMachine):
    """Requests that grow, roll back, lose everything and end, against a model that only counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=11, block_size=4)
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, int] = {}
        self.next_request = 0

    @rule(num_tokens=st.integers(1, 30))
    def add(self, num_tokens: int) -> None:
        """A new request takes what it needs, or nothing."""
        blocks = self.pool.allocate(self.pool.blocks_for(num_tokens))
        if blocks is not None:
            self.tables[self.next_request], self.tokens[self.next_request] = blocks, num_tokens
            self.next_request += 1
        else:
            assert self.pool.blocks_for(num_tokens) > self.pool.num_free

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        """A request grows by some tokens: decoding, verification or a prefill chunk."""
        request = data.draw(st.sampled_from(sorted(self.tables)))
        total = self.tokens[request] + num_tokens
        missing = self.pool.blocks_for(total) - len(self.tables[request])
        blocks = self.pool.allocate(missing)
        if blocks is not None:
            assert len(blocks) == missing
            self.tables[request] += blocks
            self.tokens[request] = total

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Rejected drafts go: whole tail blocks return."""
        request = data.draw(st.sampled_from(sorted(self.tables)))
        kept = data.draw(st.integers(1, self.tokens[request]))
        keep = self.pool.blocks_for(kept)
        self.pool.free(self.tables[request][keep:])
        del self.tables[request][keep:]
        self.tokens[request] = kept

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free_or_preempt(self, data: st.DataObject) -> None:
        """A request ends or is preempted: all its blocks return."""
        request = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.free(self.tables.pop(request))
        del self.tokens[request]

    @rule()
    def reclaim(self) -> None:
        """After an accident the tables alone rebuild the pool."""
        stolen = self.pool.allocate(min(2, self.pool.num_free))
        assert stolen is not None
        self.pool.reclaim(self.tables.values())

    @invariant()
    def books_balance(self) -> None:
        """No block is lost, shared by accident or counted wrongly, and tables hold just what their tokens need."""
        self.pool.check_integrity(self.tables.values())
        held = [block for table in self.tables.values() for block in table]
        assert len(held) == len(set(held)) == self.pool.num_used
        assert self.pool.num_used + self.pool.num_free == self.pool.num_blocks
        for request, table in self.tables.items():
            assert len(table) == self.pool.blocks_for(self.tokens[request])


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4, 16)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    pool.check_integrity([first or []])
    assert pool.num_free == 1


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2) or []
    pool.free(blocks)
    with pytest.raises(BlockPoolError, match="freed twice"):
        pool.free(blocks)


@pytest.mark.parametrize("num_tokens, blocks", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_fill_blocks(num_tokens: int, blocks: int) -> None:
    assert BlockPool(8, 16).blocks_for(num_tokens) == blocks


@pytest.mark.parametrize("damage", ["leak", "double", "foreign"])
def test_integrity_check_sees_planted_damage(damage: str) -> None:
    pool = BlockPool(6, 4)
    table = pool.allocate(3) or []
    claims = {"leak": [table[:2]], "double": [table, table[:1]], "foreign": [[*table, 5]]}[damage]
    with pytest.raises(BlockPoolError):
        pool.check_integrity(claims)


def test_freed_blocks_come_back_in_order() -> None:
    pool = BlockPool(6, 4)
    table = pool.allocate(4) or []
    pool.free(table[1:])
    assert pool.allocate(3) == table[1:]
