"""The state of the block pool at any point of a trace: the owners of each block, and the state of each slot.

slots of a used block   [written … | fresh … | rolled back … | empty …]
                         └── hold keys and values ──┘ └──── waste ────┘

A block without owners is free. A free block in the prefix cache is `cached`: a request that starts with the same tokens
reuses it, until it is evicted to make room for other contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from minillm.trace import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    EngineStarted,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    StepRan,
    StepStarted,
    TokensCommitted,
    Work,
)
from minillm.trace.page import Freed, Page, PageState, SlotState
from minillm.trace.request_state import NOTHING, RequestState, StepChanges
from minillm.trace.trace_state import TraceState

MAX_PAGE_SIZE = 64
"""In an older trace of a layout that is not called paged, a block with more slots than this holds one whole request."""


@dataclass(frozen=True)
class PoolSnapshot:
    """The pool at the end of a step."""

    step: int
    used_blocks: int
    waste_slots: int
    cached_blocks: int = 0


@dataclass
class Totals:
    """Counters since the start of the trace."""

    preemptions: int = 0
    prefix_hit_tokens: int = 0
    """Tokens found in the prefix cache, which need no prefill."""
    forked_tokens: int = 0
    """Tokens shared with another completion of the same prompt."""
    output_tokens: int = 0
    peak_blocks: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0


@dataclass
class CacheState(TraceState):
    """Folds events, in order, into the state of the pool: one at a time with `fold`, or many with `fold_all`."""

    engine: EngineStarted | None = None
    step: int = 0
    """The last step that started; 0 before the first."""
    requests: dict[str, RequestState] = field(default_factory=dict)
    owners: dict[int, dict[str, int]] = field(default_factory=dict)
    """For each used block: its owners, each with the block's index in the owner's block table."""
    freed: dict[int, Freed] = field(default_factory=dict)
    """Blocks that became free in this step and were not allocated again."""
    in_prefix_cache: set[int] = field(default_factory=set)
    """Full blocks in the prefix cache, with or without owners."""
    evicted: set[int] = field(default_factory=set)
    """Blocks that were evicted from the prefix cache in this step."""
    copied_from: dict[int, int] = field(default_factory=dict)
    """The copies of this step, as target → source."""
    history: list[PoolSnapshot] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    _active: dict[str, RequestState] = field(default_factory=dict)
    """The requests that had not finished before this step. Only these have blocks, or changes of this step."""
    _num_added: int = 0
    """Requests so far. `requests` has fewer if an id was used again."""

    @property
    def block_size(self) -> int:
        """Slots per block; 0 before the engine started."""
        return self.engine.block_size if self.engine else 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool; 0 before the engine started."""
        return self.engine.num_blocks if self.engine else 0

    @property
    def used_blocks(self) -> int:
        """The number of blocks with at least one owner."""
        return len(self.owners)

    @property
    def free_blocks(self) -> int:
        """The number of blocks without an owner, including cached ones: the blocks that can be allocated."""
        return self.num_blocks - self.used_blocks

    @property
    def cached_blocks(self) -> int:
        """The number of free blocks in the prefix cache."""
        return len(self.in_prefix_cache - self.owners.keys())

    @property
    def whole_sequences(self) -> bool:
        """Whether a block holds one whole request instead of a page. Older traces do not say it; then it is guessed."""
        if self.engine is None:
            return False
        if self.engine.whole_sequences is not None:
            return self.engine.whole_sequences
        return not self.engine.cache_layout.lower().startswith("paged") and self.block_size > MAX_PAGE_SIZE

    @property
    def keeps_every_token(self) -> bool:
        """See `EngineStarted`."""
        return self.engine is None or self.engine.keeps_every_token

    @property
    def used_slots(self) -> int:
        """The number of slots in used blocks."""
        return self.used_blocks * self.block_size

    @property
    def waste_slots(self) -> int:
        """The number of slots in used blocks without valid contents. Blocks before the one being filled have none; 0 in
        a layout that drops tokens, where an empty slot takes no memory."""
        if not self.owners or not self.keeps_every_token:
            return 0
        partly_filled = {b for r in self._active.values() for b in r.block_table[r.num_computed // self.block_size :]}
        return sum(self.block_size - self._num_filled(block_id) for block_id in partly_filled)

    def fold(self, event: Event) -> None:
        """Update the state with one event."""
        match event:
            case EngineStarted():
                self.engine = event
                self.in_prefix_cache.update(event.cached_blocks)
            case RequestAdded():
                self._add(event)
            case StepStarted(step=step):
                self._start(step)
            case BlocksAllocated(request_id=request_id, block_ids=block_ids):
                self._allocate(self._request(request_id), block_ids)
            case BlocksShared():
                self._share(self._request(event.request_id), event)
            case BlockCopied(request_id=request_id, source=source, target=target):
                self._copy(self._request(request_id), source, target)
            case BlocksCached(request_id=request_id, block_ids=block_ids):
                self.in_prefix_cache.update(block_ids)
                self._request(request_id).marks.newly_cached_blocks += block_ids
            case BlocksEvicted(block_ids=block_ids):
                self._evict(block_ids)
            case BlocksFreed(request_id=request_id, block_ids=block_ids, reason=reason):
                self._free(self._request(request_id), block_ids, reason)
            case RequestPreempted(request_id=request_id, num_computed_tokens=num_computed):
                self._request(request_id).preempt(num_computed)
                self.totals.preemptions += 1
            case StepRan(work=parts):
                for work in parts:
                    self._run(work)
            case TokensCommitted():
                self._commit(event)
            case RequestFinished(request_id=request_id, reason=reason):
                self._finish(self._request(request_id), reason)
            case StepFinished():
                self._end(event)

    def page(self, block_id: int) -> Page:
        """Return the state of block `block_id` and of its slots."""
        freed = self.freed.get(block_id)
        owners = (freed.request_id,) if freed else ()
        state: PageState = "freed" if freed else "free"
        if block_id in self.owners:
            owners = tuple(self.owners[block_id])
            state, slots = "shared" if len(owners) > 1 else "used", self._slots(block_id)
        elif block_id in self.in_prefix_cache:
            state, slots = "cached", (("cached", self.block_size),)
        else:
            slots = self._runs([freed.rolled_back if freed else NOTHING], rest="free")
        reused = any(block_id in self.requests[owner].marks.reused_blocks for owner in self.owners.get(block_id, {}))
        flags = block_id in self.in_prefix_cache, reused, block_id in self.evicted
        return Page(block_id, state, owners, slots, *flags, self.copied_from.get(block_id))

    def pages(self) -> list[Page]:
        """Return the states of all blocks."""
        return [self.page(block_id) for block_id in range(self.num_blocks)]

    def _slots(self, block_id: int) -> tuple[tuple[SlotState, int], ...]:
        """Return the runs of slots of a used block."""
        owners = [(self.requests[owner].marks, index) for owner, index in self.owners[block_id].items()]
        fresh = [self._slots_inside(marks.written, index) for marks, index in owners]
        rolled_back = [self._slots_inside(marks.rolled_back, index) for marks, index in owners]
        return self._runs(rolled_back, fresh, range(self._num_filled(block_id)), rest="empty")

    def _runs(
        self, rolled_back: Sequence[range], fresh: Sequence[range] = (), filled: range = NOTHING, *, rest: SlotState
    ) -> tuple[tuple[SlotState, int], ...]:
        """Return the runs of the slots of a block; the slots in none of these ranges are in the state `rest`."""

        def state(slot: int) -> SlotState:
            if any(slot in part for part in fresh):
                return "fresh"
            if slot in filled:
                return "written"
            return "rolled_back" if any(slot in part for part in rolled_back) else rest

        bounds = {bound for part in (*rolled_back, *fresh, filled) for bound in (part.start, part.stop)}
        parts = pairwise(sorted({0, *bounds, self.block_size}))
        runs = groupby(parts, key=lambda part: state(part[0]))
        return tuple((of, sum(stop - start for start, stop in run)) for of, run in runs)

    def _num_filled(self, block_id: int) -> int:
        """Return the number of slots of a used block that hold valid keys and values."""
        if block_id in self.in_prefix_cache:
            return self.block_size
        owners = self.owners[block_id].items()
        return max(len(self._slots_inside(range(self.requests[owner].num_computed), index)) for owner, index in owners)

    def _slots_inside(self, tokens: range, index: int) -> range:
        """Return the part of `tokens` in block `index` of a block table, relative to the start of that block."""
        first = index * self.block_size
        start, stop = (min(max(bound - first, 0), self.block_size) for bound in (tokens.start, tokens.stop))
        return range(start, max(start, stop))

    def _add(self, event: RequestAdded) -> None:
        num_tokens = len(event.prompt_token_ids)
        index, self._num_added = self._num_added, self._num_added + 1
        self.requests.pop(event.request_id, None)  # an id that is used again is a new request, and comes last
        self.requests[event.request_id] = RequestState(event.request_id, index, event.prompt, num_tokens, num_tokens)
        self._request(event.request_id)

    def _request(self, request_id: str) -> RequestState:
        """Return the request that an event is about to change, as an active one."""
        request = self._active[request_id] = self.requests[request_id]
        return request

    def _start(self, step: int) -> None:
        self.step = step
        for changes in (self.freed, self.evicted, self.copied_from):
            changes.clear()
        for request in self._active.values():
            request.marks = StepChanges()
        self._active = {i: request for i, request in self._active.items() if request.status != "finished"}

    def _allocate(self, request: RequestState, block_ids: list[int]) -> None:
        if self.engine is None:
            raise ValueError("blocks are allocated before the engine has started")
        # Allocating a cached block implies its eviction.
        self._evict([b for b in block_ids if b in self.in_prefix_cache and b not in self.owners])
        for block_id in block_ids:
            self._add_owner(block_id, request, len(request.block_table))
            request.block_table.append(block_id)
        request.marks.allocated_blocks += block_ids

    def _share(self, request: RequestState, event: BlocksShared) -> None:
        forked_from = None
        if event.source == "fork":
            self.totals.forked_tokens += event.num_tokens
            # Only completions of the same prompt share the last block, so its owners identify the forked request.
            owners = self.owners.get(event.block_ids[-1], {})
            forked_from = min((self.requests[owner].index for owner in owners), default=None)
        else:
            self.totals.prefix_hit_tokens += event.num_tokens
            self.in_prefix_cache.update(event.block_ids)  # they may have been cached before the trace began
        for index, block_id in enumerate(event.block_ids, start=len(request.block_table)):
            self._add_owner(block_id, request, index)
        request.reuse(event.block_ids, event.num_tokens, forked_from)

    def _copy(self, request: RequestState, source: int, target: int) -> None:
        index = request.block_table.index(source)
        self._remove_owner(source, request, "copied")
        self._add_owner(target, request, index)
        request.block_table[index] = target
        request.marks.copied.append((source, target))
        self.copied_from[target] = source

    def _evict(self, block_ids: list[int]) -> None:
        self.in_prefix_cache.difference_update(block_ids)
        self.evicted.update(block_ids)

    def _add_owner(self, block_id: int, request: RequestState, index: int) -> None:
        self.owners.setdefault(block_id, {})[request.request_id] = index
        self.freed.pop(block_id, None)
        self.totals.peak_blocks = max(self.totals.peak_blocks, self.used_blocks)

    def _remove_owner(self, block_id: int, request: RequestState, reason: str) -> None:
        index = self.owners[block_id].pop(request.request_id)
        if self.owners[block_id]:
            return
        del self.owners[block_id]
        self.freed[block_id] = Freed(request.request_id, reason, self._slots_inside(request.marks.rolled_back, index))
        self.copied_from.pop(block_id, None)

    def _free(self, request: RequestState, block_ids: list[int], reason: str) -> None:
        if reason in ("finished", "aborted") and block_ids:
            request.former_table = list(request.block_table)
        for block_id in block_ids:
            request.block_table.remove(block_id)
            self._remove_owner(block_id, request, reason)
            request.marks.num_freed_shared += block_id in self.owners
            request.marks.num_freed_cached += block_id in self.in_prefix_cache and block_id not in self.owners
        request.marks.num_freed += len(block_ids)
        if reason == "interrupted":
            request.restart()

    def _run(self, work: Work) -> None:
        request = self._request(work.request_id)
        request.status = work.kind
        request.write(work.start, work.num_tokens)

    def _commit(self, event: TokensCommitted) -> None:
        request = self._request(event.request_id)
        request.keep(event.num_computed_tokens)
        request.num_tokens += len(event.token_ids)
        request.marks.num_drafts, request.marks.num_accepted = event.num_drafts, event.num_accepted
        self.totals.output_tokens += len(event.token_ids)

    def _finish(self, request: RequestState, reason: str) -> None:
        # A finished request holds no blocks, even if an interrupt prevented the event `BlocksFreed`.
        self._free(request, list(request.block_table), "aborted")
        request.status, request.finish_reason, request.marks.finished = "finished", reason, True

    def _end(self, event: StepFinished) -> None:
        self.history.append(PoolSnapshot(event.step, self.used_blocks, self.waste_slots, self.cached_blocks))
        self.totals.seconds += event.seconds
        self.totals.draft_seconds += event.draft_seconds
