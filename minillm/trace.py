"""What the engine did, as typed events. Metrics, pictures, benchmarks and tests read these; the engine reads none.

The order within one step is: `StepStarted`; then of scheduling any `RequestPreempted`, `BlocksFreed`, `BlocksShared`,
`BlocksEvicted`, `BlocksAllocated`, `BlockCopied` and `BlocksCached`; `DraftProposed`; `StepRan`; `TokensCommitted`,
`BlocksFreed` of roll-backs and finished requests, `RequestFinished`; and at last `StepFinished`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from minillm import __version__
from minillm.errors import TraceError

SCHEMA = 2
READABLE = (1, 2)
"""Schema 1 had fewer kinds of events and fewer fields, all of which mean the same today."""
WorkKind = Literal["prefill", "decode", "verify"]
TokenOrigin = Literal["sampled", "accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class Event:
    """Base of all events. A subclass is registered under its class name."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def to_json(self) -> str:
        """One line of JSON; `event` holds the class name."""
        return json.dumps({"event": type(self).__name__, **asdict(self)}, ensure_ascii=False)


@dataclass(frozen=True)
class EngineStarted(Event):
    """First event of every trace: the shape of the engine that wrote it."""

    model: str
    draft_model: str | None
    block_size: int
    num_blocks: int
    bytes_per_block: int
    """Bytes of one block over all layers, keys and values, the draft's pool included."""
    num_speculative_tokens: int
    cache_layout: str = "paged"
    """Name of the cache layout. If it keeps whole sequences, a block is a request's place, `block_size` the context."""
    prefix_caching: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    speculative_method: str | None = None

    @property
    def drafter(self) -> str | None:
        """What guesses, in a word: the draft model, or how it is done without one; None: nothing does."""
        return self.draft_model or self.speculative_method


@dataclass(frozen=True)
class RequestAdded(Event):
    """A request joined the waiting queue."""

    request_id: str
    prompt: str
    """The prompt as text; decoded from the ids if it was given as ids."""
    prompt_token_ids: list[int]
    priority: int = 0
    """Lower runs first, if the engine schedules by priority."""


@dataclass(frozen=True)
class StepStarted(Event):
    """A new step; `step` counts from 1 over the life of the engine."""

    step: int
    num_running: int
    num_waiting: int


@dataclass(frozen=True)
class BlocksAllocated(Event):
    """`block_ids` were appended to the request's block table, in this order."""

    request_id: str
    block_ids: list[int]


@dataclass(frozen=True)
class BlocksShared(Event):
    """`block_ids`, filled before by others, were appended to the request's empty block table; it is one more owner.

    Its first `num_tokens` tokens need not be computed again. A `prefix` was found in the prefix cache; a `fork` took
    the blocks of another completion of the same prompt, the last of them perhaps filled in part.
    """

    request_id: str
    block_ids: list[int]
    num_tokens: int
    source: Literal["prefix", "fork"]


@dataclass(frozen=True)
class BlockCopied(Event):
    """Copy on write: `target` took the place of `source` in the request's block table, with the same contents.

    The request is the only owner of `target` (which no `BlocksAllocated` announced) and owns `source` no more.
    """

    request_id: str
    source: int
    target: int


@dataclass(frozen=True)
class BlocksCached(Event):
    """These full blocks of the request can be found by their contents from now on; they keep them when freed."""

    request_id: str
    block_ids: list[int]


@dataclass(frozen=True)
class BlocksEvicted(Event):
    """These blocks without owners can no longer be found by their contents: they are needed for something else."""

    block_ids: list[int]


@dataclass(frozen=True)
class BlocksFreed(Event):
    """`block_ids` left the tail of the request's block table. Cached ones keep their contents until evicted."""

    request_id: str
    block_ids: list[int]
    reason: Literal["rolled_back", "preempted", "finished", "aborted"]


@dataclass(frozen=True)
class RequestPreempted(Event):
    """The pool ran dry: the request lost its blocks and waits to be recomputed."""

    request_id: str
    num_computed_tokens: int
    """Tokens whose keys and values were thrown away."""


@dataclass(frozen=True)
class DraftProposed(Event):
    """What the drafter guesses the next tokens are."""

    request_id: str
    token_ids: list[int]
    texts: list[str]


@dataclass(frozen=True)
class Work:
    """The part of one request in one step: tokens `start … start + num_tokens - 1` go through the model."""

    request_id: str
    kind: WorkKind
    start: int
    num_tokens: int
    """For `verify`: the last committed token and the drafts."""


@dataclass(frozen=True)
class StepRan(Event):
    """One target forward over a ragged batch; keys and values of every token in `work` were written."""

    step: int
    work: list[Work]


@dataclass(frozen=True)
class TokensCommitted(Event):
    """Tokens that a request really gained in this step.

    After `verify`, `num_drafts` drafts were judged and the first `num_accepted` were right. `origins` tells for each
    committed token where it came from. A stop inside an accepted run can commit fewer than `num_accepted + 1` tokens.
    Keys and values beyond `num_computed_tokens` are void: they belong to rejected drafts.
    """

    request_id: str
    token_ids: list[int]
    texts: list[str]
    origins: list[TokenOrigin]
    num_drafts: int
    num_accepted: int
    num_computed_tokens: int


@dataclass(frozen=True)
class RequestFinished(Event):
    """The request is done and holds no blocks."""

    request_id: str
    reason: Literal["stop", "length", "abort"]
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class StepFinished(Event):
    """End of a step. `seconds` splits into drafting, the target's forward, and the rest."""

    step: int
    seconds: float
    draft_seconds: float
    target_seconds: float
    num_free_blocks: int


class Listeners(list[Callable[[Event], None]]):
    """Who is told of events, in order. The engine and its scheduler share one, so neither refers to the other."""

    def tell(self, event: Event) -> None:
        """Call every listener with `event`."""
        for listener in self:
            listener(event)


class Trace:
    """An event log that grows while the engine runs, can be watched, saved to JSONL and loaded again."""

    def __init__(self, events: list[Event] | None = None) -> None:
        self.events: list[Event] = list(events or [])
        self._watchers: list[Callable[[Event], None]] = []

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def append(self, event: Event) -> None:
        """Record `event` and tell every watcher."""
        self.events.append(event)
        for watcher in self._watchers:
            watcher(event)

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher(event)` for every event from now on."""
        self._watchers.append(watcher)

    def of(self, *kinds: type[Event]) -> list[Any]:
        """The events of these kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    def save(self, path: str | Path) -> None:
        """Write one JSON object per line; the first names the schema and the minillm that wrote it."""
        lines = [json.dumps({"schema": SCHEMA, "minillm": __version__}), *(event.to_json() for event in self.events)]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote, in this version or an older one. Raises `TraceError` with the line that is wrong."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as problem:
            raise TraceError(f"{path} cannot be read as a trace: {problem}") from None
        try:
            header = json.loads(lines[0])
            schema = header["schema"]
        except (IndexError, KeyError, TypeError, ValueError, RecursionError):
            raise TraceError(f"{path} is no minillm trace: line 1 must hold the schema") from None
        if schema not in READABLE:
            writer = f"minillm {header.get('minillm', 'of an unknown version')}"
            raise TraceError(
                f"{path} was saved by {writer} with trace schema {schema}; this is minillm {__version__}, which reads "
                f"{' and '.join(map(str, READABLE))}: load it there, or record the trace again here"
            )
        return cls([_parse(line, number, path) for number, line in enumerate(lines[1:], start=2)])


def _parse(line: str, number: int, path: str | Path) -> Event:
    try:
        values = json.loads(line)
        kind = Event.kinds[values.pop("event")]
        unknown = values.keys() - {f.name for f in fields(kind)}
        if unknown:
            raise KeyError(", ".join(sorted(unknown)))
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise TraceError(f"{path}, line {number}: not an event ({type(problem).__name__}: {problem})") from None
