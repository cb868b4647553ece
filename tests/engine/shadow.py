"""What the slots of a cache really hold, kept beside it in tokens, so that the engine's beliefs can be checked.

Keys and values at a position depend on all tokens up to it. So a slot *is* those tokens, and whoever reads it must
have the same ones. Accidents happen here too: a `KeyboardInterrupt` before, during or after any forward, any copy of a
block, or any event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from minillm.batch import Segment
from minillm.cache.block_pool import BlockPool
from minillm.cache.prefix import extend_block_hashes
from minillm.request import Request
from minillm.runtime.runner import ModelRunner

Contents = tuple[int, ...]
"""The tokens from the first of the sequence to the one at this slot."""


class Accidents:
    """Raises `KeyboardInterrupt` at the n-th place of some kind from now."""

    def __init__(self, seen: Counter[str]) -> None:
        self.seen = seen
        self.kind = ""
        """Part of the names of places where it may happen; empty: all of them."""
        self.left = 0
        """Such places to go; 0: nothing will happen."""

    def due(self, place: str) -> bool:
        """Whether the accident is to happen here; if so, there will be no other."""
        if not self.left or self.kind not in place:
            return False
        self.left -= 1
        if self.left:
            return False
        self.seen[f"interrupted {place}"] += 1
        return True

    def may_happen(self, place: str) -> None:
        """Raise, if it is to happen here."""
        if self.due(place):
            raise KeyboardInterrupt


class Shadow:
    """Follows one runner: every forward and every copied block."""

    def __init__(self, runner: ModelRunner, accidents: Accidents, who: str) -> None:
        self.block_size = runner.block_size
        self.slots: dict[int, Contents] = {}
        self.accidents, self.who = accidents, who
        self.num_tokens = 0
        self.first_reads: list[Segment] = []
        """Segments run since this list was last cleared."""
        self._run: Callable[[Sequence[Segment]], object] = runner.run
        self._copy: Callable[[Sequence[tuple[int, int]]], None] = runner.cache.copy_blocks
        self._cache = runner.cache
        runner.run = self.run
        runner.cache.copy_blocks = self.copy_blocks

    def run(self, segments: Sequence[Segment]) -> object:
        """The forward, and what it writes. Interrupted half-way it leaves NaN where it would have changed anything."""
        self.accidents.may_happen(f"before a {self.who} forward")
        written = self._written(segments)
        if self.accidents.due(f"during a {self.who} forward"):
            lost = [slot for slot, contents in written.items() if self.slots.get(slot) != contents]
            for pool in (self._cache.keys, self._cache.values):
                pool[:, lost] = float("nan")
            for slot in lost:
                self.slots.pop(slot, None)
            raise KeyboardInterrupt
        result = self._run(segments)
        self.slots |= written
        self.num_tokens += sum(len(segment.token_ids) for segment in segments)
        self.first_reads += segments
        self.accidents.may_happen(f"after a {self.who} forward")
        return result

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The copy, and what it copies."""
        self.accidents.may_happen(f"before a {self.who} copy")
        self._copy(pairs)
        for source, target in pairs:
            for offset in range(self.block_size):
                contents = self.slots.get(source * self.block_size + offset)
                self.slots.pop(target * self.block_size + offset, None)
                if contents is not None:
                    self.slots[target * self.block_size + offset] = contents
        self.accidents.may_happen(f"after a {self.who} copy")

    def _written(self, segments: Sequence[Segment]) -> dict[int, Contents]:
        """Slot → contents after this forward. All keys are stored before any is read, so segments see each other's."""
        written: dict[int, Contents] = {}
        for segment in segments:
            for position, token in enumerate(segment.token_ids, start=segment.start):
                before: Contents = ()
                if position:
                    slot = self._slot(segment.block_table, position - 1)
                    before = written.get(slot, self.slots.get(slot))  # type: ignore[assignment]
                    assert before is not None, f"the {self.who} reads a slot that was never filled"
                    assert len(before) == position, f"the {self.who} reads position {len(before) - 1} as {position - 1}"
                written[self._slot(segment.block_table, position)] = (*before, token)
        return written

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def check_computed(self, request: Request, num_computed: int) -> None:
        """The first `num_computed` slots of a request hold its own tokens."""
        for position in range(num_computed):
            held = self.slots.get(self._slot(request.block_table, position))
            assert held == tuple(request.token_ids[: position + 1]), (
                f"{request.request_id}: the {self.who} believes position {position} computed; its slot holds {held}"
            )

    def check_hash(self, block_id: int, block_hash: bytes, salts: Sequence[str]) -> None:
        """A cached block holds, in all its slots, tokens that have this hash under one of the salts."""
        held = [self.slots.get(block_id * self.block_size + offset) for offset in range(self.block_size)]
        last = held[-1]
        assert last is not None and len(last) % self.block_size == 0, f"block {block_id} has a hash and holds {held}"
        first = len(last) - self.block_size
        assert held == [last[: first + offset + 1] for offset in range(self.block_size)]
        assert block_hash in true_hashes(last, self.block_size, tuple(salts)), (
            f"block {block_id} has a hash of other contents"
        )


@cache
def true_hashes(contents: Contents, block_size: int, salts: tuple[str, ...]) -> list[bytes]:
    """The hashes the last block of these tokens may have."""
    return [extend_block_hashes([], contents, block_size, salt)[-1] for salt in salts]


def check_pool_hashes(pool: BlockPool, shadow: Shadow, requests: Sequence[Request], salts: Sequence[str]) -> None:
    """Every hash in the pool is right, and everyone who holds such a block has committed these very tokens."""
    for block_id, block_hash in pool._hash_of.items():
        shadow.check_hash(block_id, block_hash, salts)
    for request in requests:
        hashes = request.block_hashes(pool.block_size)
        for index, block_id in enumerate(request.block_table):
            assert pool._hash_of.get(block_id) in (None, *hashes[index : index + 1]), (
                f"{request.request_id} holds block {block_id}, whose hash is of other tokens than {request.token_ids}"
            )
