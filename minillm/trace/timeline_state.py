"""The timeline of a run: what each request did in each step, from a trace or from a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from minillm.trace import (
    BlocksShared,
    EngineStarted,
    Event,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepRan,
    StepStarted,
    TokensCommitted,
    Work,
)
from minillm.trace.trace_state import TraceState

CellKind = Literal["waiting", "prefill", "recompute", "decode", "verify", "preempted", "idle"]
WORKING: tuple[CellKind, ...] = ("prefill", "recompute", "decode", "verify")
"""The kinds in which the request went through the model."""
USEFUL: tuple[CellKind, ...] = ("prefill", "decode", "verify")
"""The working kinds that advance the request: a recomputation only repairs a preemption or an interrupt."""


@dataclass(slots=True)
class Cell:
    """One request in one step."""

    kind: CellKind = "waiting"
    """`idle`: the request occupies a slot of the batch without work, as in static batching."""
    num_tokens: int = 0
    """Tokens that went through the model."""
    num_cached: int = 0
    """Tokens found in the prefix cache or shared by a fork, which did not go through the model."""
    num_drafts: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    """Tokens that the request gained."""


WAITING = Cell()
"""The cell of every request in every step in which nothing happens to it."""


@dataclass
class Row:
    """One request. `cells` has an entry for every step from arrival to end, none if it never ran."""

    index: int
    """Requests are numbered from 0 in the order they were added; determines the letter and colour in pictures."""
    prompt: str
    arrival: int
    """The first step that could have run it."""
    num_prompt_tokens: int
    cells: dict[int, Cell] = field(default_factory=dict)
    end: int | None = None
    """The step in which it finished, `arrival` if it never ran; `None` if it has not finished."""
    reason: str | None = None
    computed_tokens: int = 0
    """Most tokens that it has had in the cache; a prefill of these is a recomputation."""

    def steps_by_kind(self) -> Counter[CellKind]:
        """Return how many steps were spent in each kind."""
        return Counter(map(attrgetter("kind"), self.cells.values()))

    def num_steps(self, *kinds: CellKind) -> int:
        """Return the number of steps spent in one of `kinds`."""
        counts = self.steps_by_kind()
        return sum(counts[kind] for kind in kinds)


@dataclass
class Load:
    """The requests and tokens that went through the model in one step."""

    requests: int = 0
    tokens: int = 0
    prefills: int = 0
    """Requests among them that computed or recomputed their prompt."""
    prefill_tokens: int = 0


@dataclass
class Timeline:
    """Requests × steps, with the limits of the engine that ran them or is modelled."""

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    modelled: bool = False
    """Whether the timeline comes from a model instead of a trace."""
    first_step: int = 1
    num_steps: int = 0
    rows: list[Row] = field(default_factory=list)

    @property
    def steps(self) -> range:
        """The steps, by number."""
        return range(self.first_step, self.first_step + self.num_steps)

    def loads(self) -> list[Load]:
        """Return the load of each step, in order."""
        loads = [Load() for _ in self.steps]
        for row in self.rows:
            for step, cell in row.cells.items():
                if cell is not WAITING and cell.kind in WORKING:  # almost all cells of a long run are WAITING
                    load, prefill = loads[step - self.first_step], cell.kind in ("prefill", "recompute")
                    load.requests += 1
                    load.tokens += cell.num_tokens
                    load.prefills += prefill
                    load.prefill_tokens += cell.num_tokens * prefill
        return loads

    @property
    def useful_slots(self) -> int:
        """The number of request-steps that advanced a request."""
        return sum(row.num_steps(*USEFUL) for row in self.rows)

    @property
    def slots(self) -> int:
        """The number of available request-steps: `max_num_seqs` × steps."""
        return self.max_num_seqs * self.num_steps

    @property
    def batch_slot_utilisation(self) -> float:
        """Useful / available request-steps; 0 without steps."""
        return self.useful_slots / self.slots if self.slots else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that went through the model in a step; 0 without steps."""
        return sum(load.tokens for load in self.loads()) / self.num_steps if self.num_steps else 0.0

    @property
    def committed_tokens(self) -> int:
        """The number of output tokens of all requests."""
        return sum(cell.num_committed for row in self.rows for cell in row.cells.values())


@dataclass
class TimelineState(TraceState):
    """Folds events, in order, into a `Timeline`."""

    timeline: Timeline = field(default_factory=Timeline)
    _rows: dict[str, Row] = field(default_factory=dict)
    _step: int = 0

    def fold(self, event: Event) -> None:
        """Update the timeline with one event."""
        match event:
            case EngineStarted():
                self.timeline.max_num_seqs = event.max_num_seqs
                self.timeline.max_num_batched_tokens = event.max_num_batched_tokens
            case RequestAdded(request_id=request_id, prompt=prompt, prompt_token_ids=ids):
                row = Row(len(self.timeline.rows), prompt, self._step + 1, len(ids))
                self._rows[request_id] = row
                self.timeline.rows.append(row)
            case StepStarted(step=step):
                self._start(step)
            case BlocksShared(request_id=request_id, num_tokens=num_tokens):
                self._cell(request_id).num_cached += num_tokens
            case RequestPreempted(request_id=request_id):
                self._cell(request_id).kind = "preempted"
            case StepRan(work=parts):
                for work in parts:
                    self._run(work)
            case TokensCommitted():
                cell, row = self._cell(event.request_id), self._rows[event.request_id]
                row.computed_tokens = max(row.computed_tokens, event.num_computed_tokens)
                cell.num_drafts, cell.num_accepted = event.num_drafts, event.num_accepted
                cell.num_committed += len(event.token_ids)
            case RequestFinished(request_id=request_id, reason=reason):
                row = self._rows[request_id]
                # It may be aborted before the first step that could have run it.
                row.end, row.reason = max(self._step, row.arrival), reason

    def _start(self, step: int) -> None:
        if not self.timeline.num_steps:
            self.timeline.first_step = step
            for row in self.timeline.rows:
                row.arrival = max(row.arrival, step)
                row.end = None if row.end is None else max(row.end, step)
        if step != self.timeline.first_step + self.timeline.num_steps:
            raise ValueError(f"step {step} follows step {self._step}")
        self._step = step
        self.timeline.num_steps += 1
        for row in self.timeline.rows:
            if row.end is None:
                row.cells[step] = WAITING

    def _cell(self, request_id: str) -> Cell:
        """The request's cell of this step, which may be changed."""
        cells = self._rows[request_id].cells
        if cells[self._step] is WAITING:
            cells[self._step] = Cell()
        return cells[self._step]

    def _run(self, work: Work) -> None:
        cell, row = self._cell(work.request_id), self._rows[work.request_id]
        cell.kind, cell.num_tokens = work.kind, work.num_tokens
        if work.kind == "prefill":
            cell.kind = "recompute" if work.start < row.computed_tokens else "prefill"
            row.computed_tokens = max(row.computed_tokens, work.start + work.num_tokens)
