"""The block pool at any point of a trace: who owns which block, and what is in each of its slots.

slots of a used block   [written … | fresh … | rolled back … | empty …]
                         └── hold keys and values ──┘ └──── waste ────┘

A block without owners is free. If it is full and still known by its contents it is `cached`: a request that starts
with the same tokens gets it back as it is, until it is evicted because somebody needs an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
from minillm.viz.page import Freed, Page, PageState, SlotState
from minillm.viz.request_state import NOTHING, RequestState, StepMarks

LONGEST_BLOCK = 64
"""Above so many slots, a block of a layout that is not paged is a request's whole place."""


@dataclass(frozen=True)
class StepFigures:
    """The pool at the end of a step."""

    step: int
    used_blocks: int
    waste_slots: int
    cached_blocks: int = 0


@dataclass
class Totals:
    """Counted since the trace began."""

    written_slots: int = 0
    """Slots that ever received keys and values, rewritten ones counted again."""
    rolled_back_slots: int = 0
    recomputed_tokens: int = 0
    """Tokens whose keys and values a preemption threw away."""
    preemptions: int = 0
    found_tokens: int = 0
    """Tokens taken from the prefix cache instead of computed."""
    forked_tokens: int = 0
    """Tokens taken over from another completion of the same prompt."""
    copied_blocks: int = 0
    evicted_blocks: int = 0
    finished: int = 0
    output_tokens: int = 0
    peak_blocks: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


@dataclass
class CacheState:
    """Folds events, in order, into the state of the pool; `fold` one by one or `fold_all`."""

    engine: EngineStarted | None = None
    step: int = 0
    """The last step that started; 0 before the first."""
    requests: dict[str, RequestState] = field(default_factory=dict)
    owners: dict[int, dict[str, int]] = field(default_factory=dict)
    """Per used block: its owners, each with the block's index in the owner's block table."""
    freed: dict[int, Freed] = field(default_factory=dict)
    """Blocks that became free in this step and were not taken again."""
    findable: set[int] = field(default_factory=set)
    """Full blocks that the prefix cache knows by their contents, with or without owners."""
    evicted: set[int] = field(default_factory=set)
    """Blocks whose contents the prefix cache forgot in this step."""
    copied_from: dict[int, int] = field(default_factory=dict)
    """Target and source of the copies of this step."""
    history: list[StepFigures] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    @property
    def block_size(self) -> int:
        """Slots per block; 0 before the engine started."""
        return self.engine.block_size if self.engine else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; 0 before the engine started."""
        return self.engine.num_blocks if self.engine else 0

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one owner."""
        return len(self.owners)

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner, cached ones among them: all that can be allocated."""
        return self.num_blocks - self.used_blocks

    @property
    def cached_blocks(self) -> int:
        """Free blocks that keep their contents."""
        return len(self.findable - self.owners.keys())

    @property
    def whole_sequences(self) -> bool:
        """Whether a block is the place of one whole request instead of a page."""
        paged = self.engine is None or self.engine.cache_layout.lower().startswith("paged")
        return not paged and self.block_size > LONGEST_BLOCK

    @property
    def used_slots(self) -> int:
        """Slots of the used blocks."""
        return self.used_blocks * self.block_size

    @property
    def waste_slots(self) -> int:
        """Slots of used blocks that hold nothing valid. Blocks before the one being filled cannot have any."""
        if not self.owners:
            return 0
        filling = {b for r in self.requests.values() for b in r.block_table[r.num_computed // self.block_size :]}
        return sum(self.block_size - self._filled(block_id) for block_id in filling)

    def fold_all(self, events: Iterable[Event]) -> CacheState:
        """Fold many events; returns self."""
        for event in events:
            self.fold(event)
        return self

    def fold(self, event: Event) -> None:
        """Take one event into account."""
        match event:
            case EngineStarted():
                self.engine = event
            case RequestAdded():
                self._add(event)
            case StepStarted(step=step):
                self._start(step)
            case BlocksAllocated(request_id=request_id, block_ids=block_ids):
                self._allocate(self.requests[request_id], block_ids)
            case BlocksShared():
                self._share(self.requests[event.request_id], event)
            case BlockCopied(request_id=request_id, source=source, target=target):
                self._copy(self.requests[request_id], source, target)
            case BlocksCached(request_id=request_id, block_ids=block_ids):
                self.findable.update(block_ids)
                self.requests[request_id].marks.remembered += block_ids
            case BlocksEvicted(block_ids=block_ids):
                self._evict(block_ids)
            case BlocksFreed(request_id=request_id, block_ids=block_ids, reason=reason):
                self._free(self.requests[request_id], block_ids, reason)
            case RequestPreempted(request_id=request_id, num_computed_tokens=num_computed):
                self.requests[request_id].preempt(num_computed)
                self.totals.preemptions += 1
                self.totals.recomputed_tokens += num_computed
            case StepRan(work=parts):
                for work in parts:
                    self._run(work)
            case TokensCommitted():
                self._commit(event)
            case RequestFinished(request_id=request_id, reason=reason):
                self._finish(self.requests[request_id], reason)
            case StepFinished():
                self._end(event)

    def page(self, block_id: int) -> Page:
        """Block `block_id` slot by slot."""
        slots: tuple[SlotState, ...]
        freed = self.freed.get(block_id)
        owners = (freed.request_id,) if freed else ()
        state: PageState = "freed" if freed else "free"
        if block_id in self.owners:
            owners = tuple(self.owners[block_id])
            state, slots = "shared" if len(owners) > 1 else "used", self._slots(block_id)
        elif block_id in self.findable:
            state, slots = "cached", ("cached",) * self.block_size
        else:
            void = freed.rolled_back if freed else NOTHING
            slots = tuple("rolled_back" if slot in void else "free" for slot in range(self.block_size))
        reused = any(block_id in self.requests[owner].marks.reused_blocks for owner in self.owners.get(block_id, {}))
        known = block_id in self.findable, reused, block_id in self.evicted
        return Page(block_id, state, owners, slots, *known, self.copied_from.get(block_id))

    def pages(self) -> list[Page]:
        """All blocks of the pool."""
        return [self.page(block_id) for block_id in range(self.num_blocks)]

    def _slots(self, block_id: int) -> tuple[SlotState, ...]:
        filled = self._filled(block_id)
        slots: list[SlotState] = ["written"] * filled + ["empty"] * (self.block_size - filled)
        for request_id, index in self.owners[block_id].items():
            marks = self.requests[request_id].marks
            for slot in self._inside(marks.rolled_back, index):
                slots[slot] = "rolled_back" if slot >= filled else slots[slot]
            for slot in self._inside(marks.written, index):
                slots[slot] = "fresh"
        return tuple(slots)

    def _filled(self, block_id: int) -> int:
        """Slots of a used block that hold valid keys and values."""
        if block_id in self.findable:
            return self.block_size
        owners = self.owners[block_id].items()
        return max(len(self._inside(range(self.requests[owner].num_computed), index)) for owner, index in owners)

    def _inside(self, tokens: range, index: int) -> range:
        """The part of `tokens` that lies in block `index` of a block table, counted from the start of that block."""
        first = index * self.block_size
        start, stop = (min(max(bound - first, 0), self.block_size) for bound in (tokens.start, tokens.stop))
        return range(start, max(start, stop))

    def _add(self, event: RequestAdded) -> None:
        num_tokens = len(event.prompt_token_ids)
        index = len(self.requests)
        self.requests[event.request_id] = RequestState(event.request_id, index, event.prompt, num_tokens, num_tokens)

    def _start(self, step: int) -> None:
        self.step = step
        for of_the_step in (self.freed, self.evicted, self.copied_from):
            of_the_step.clear()
        for request in self.requests.values():
            request.marks = StepMarks()

    def _allocate(self, request: RequestState, block_ids: list[int]) -> None:
        # Whoever gets a block to fill it has made sure that its old contents are forgotten.
        self._evict([block_id for block_id in block_ids if block_id in self.findable - self.owners.keys()])
        for block_id in block_ids:
            self._own(block_id, request, len(request.block_table))
            request.block_table.append(block_id)
        request.marks.took += block_ids

    def _share(self, request: RequestState, event: BlocksShared) -> None:
        forked_from = None
        if event.source == "fork":
            self.totals.forked_tokens += event.num_tokens
            # The last block is the one that only completions of this very prompt have.
            owners = self.owners.get(event.block_ids[-1], {})
            forked_from = min((self.requests[owner].index for owner in owners), default=None)
        else:
            self.totals.found_tokens += event.num_tokens
        for index, block_id in enumerate(event.block_ids, start=len(request.block_table)):
            self._own(block_id, request, index)
        request.reuse(event.block_ids, event.num_tokens, forked_from)

    def _copy(self, request: RequestState, source: int, target: int) -> None:
        index = request.block_table.index(source)
        self._disown(source, request, "copied")
        self._own(target, request, index)
        request.block_table[index] = target
        request.marks.copied.append((source, target))
        self.copied_from[target] = source
        self.totals.copied_blocks += 1

    def _evict(self, block_ids: list[int]) -> None:
        self.findable.difference_update(block_ids)
        self.evicted.update(block_ids)
        self.totals.evicted_blocks += len(block_ids)

    def _own(self, block_id: int, request: RequestState, index: int) -> None:
        self.owners.setdefault(block_id, {})[request.request_id] = index
        self.freed.pop(block_id, None)
        self.totals.peak_blocks = max(self.totals.peak_blocks, self.used_blocks)

    def _disown(self, block_id: int, request: RequestState, reason: str) -> None:
        index = self.owners[block_id].pop(request.request_id)
        if self.owners[block_id]:
            return
        del self.owners[block_id]
        self.freed[block_id] = Freed(request.request_id, reason, self._inside(request.marks.rolled_back, index))
        self.copied_from.pop(block_id, None)

    def _free(self, request: RequestState, block_ids: list[int], reason: str) -> None:
        if reason in ("finished", "aborted") and block_ids:
            request.former_table = list(request.block_table)
        for block_id in block_ids:
            request.block_table.remove(block_id)
            self._disown(block_id, request, reason)
            request.marks.left_shared += block_id in self.owners
            request.marks.left_cached += block_id in self.findable and block_id not in self.owners
        request.marks.gave_back += len(block_ids)

    def _run(self, work: Work) -> None:
        request = self.requests[work.request_id]
        request.status = work.kind
        request.write(work.start, work.num_tokens)
        self.totals.written_slots += work.num_tokens

    def _commit(self, event: TokensCommitted) -> None:
        request = self.requests[event.request_id]
        request.keep(event.num_computed_tokens)
        request.num_tokens += len(event.token_ids)
        request.marks.num_drafts, request.marks.num_accepted = event.num_drafts, event.num_accepted
        self.totals.rolled_back_slots += len(request.marks.rolled_back)
        self.totals.output_tokens += len(event.token_ids)

    def _finish(self, request: RequestState, reason: str) -> None:
        # A finished request holds no blocks, even if an interrupt kept the engine from saying so.
        self._free(request, list(request.block_table), "aborted")
        request.status, request.finish_reason, request.marks.finished = "finished", reason, True
        self.totals.finished += 1

    def _end(self, event: StepFinished) -> None:
        self.history.append(StepFigures(event.step, self.used_blocks, self.waste_slots, self.cached_blocks))
        self.totals.seconds += event.seconds
        self.totals.draft_seconds += event.draft_seconds
        self.totals.target_seconds += event.target_seconds
