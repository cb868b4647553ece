"""The block pool at any point of a trace: who owns which block, and what is in each of its slots.

slots of a used block   [written … | fresh … | rolled back … | empty …]
                         └── hold keys and values ──┘ └──── waste ────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from minillm.trace import (
    BlocksAllocated,
    BlocksFreed,
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
from minillm.viz.request_state import RequestState, StepMarks

SlotState = Literal["written", "fresh", "rolled_back", "empty", "free"]
PageState = Literal["used", "shared", "freed", "free"]


@dataclass(frozen=True)
class Freed:
    """A block that lost its last owner in this step, and what was in it."""

    request_id: str
    reason: str
    rolled_back: range
    """Slots of the block that held rejected drafts of this very step."""


@dataclass(frozen=True)
class Page:
    """One physical block as it is drawn."""

    block_id: int
    state: PageState
    owners: tuple[str, ...]
    """Request ids; several if the block is shared. Of a `freed` block: who had it before."""
    slots: tuple[SlotState, ...]


@dataclass(frozen=True)
class StepFigures:
    """The pool at the end of a step."""

    step: int
    used_blocks: int
    waste_slots: int


@dataclass
class Totals:
    """Counted since the trace began."""

    written_slots: int = 0
    """Slots that ever received keys and values, rewritten ones counted again."""
    rolled_back_slots: int = 0
    recomputed_tokens: int = 0
    """Tokens whose keys and values a preemption threw away."""
    preemptions: int = 0
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
        """Blocks without an owner."""
        return self.num_blocks - self.used_blocks

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
        if block_id in self.owners:
            owners = tuple(self.owners[block_id])
            return Page(block_id, "shared" if len(owners) > 1 else "used", owners, self._slots(block_id))
        slots: list[SlotState] = ["free"] * self.block_size
        if block_id not in self.freed:
            return Page(block_id, "free", (), tuple(slots))
        freed = self.freed[block_id]
        for slot in freed.rolled_back:
            slots[slot] = "rolled_back"
        return Page(block_id, "freed", (freed.request_id,), tuple(slots))

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
        self.freed.clear()
        for request in self.requests.values():
            request.marks = StepMarks()

    def _allocate(self, request: RequestState, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.owners.setdefault(block_id, {})[request.request_id] = len(request.block_table)
            self.freed.pop(block_id, None)
            request.block_table.append(block_id)
        request.marks.took += block_ids
        self.totals.peak_blocks = max(self.totals.peak_blocks, self.used_blocks)

    def _free(self, request: RequestState, block_ids: list[int], reason: str) -> None:
        for block_id in block_ids:
            request.block_table.remove(block_id)
            index = self.owners[block_id].pop(request.request_id)
            if not self.owners[block_id]:
                del self.owners[block_id]
                void = self._inside(request.marks.rolled_back, index)
                self.freed[block_id] = Freed(request.request_id, reason, void)
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
        self.history.append(StepFigures(event.step, self.used_blocks, self.waste_slots))
        self.totals.seconds += event.seconds
        self.totals.draft_seconds += event.draft_seconds
        self.totals.target_seconds += event.target_seconds
