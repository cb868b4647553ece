"""The typed events that the engine emits. Metrics, pictures, benchmarks and tests read them.

`engine/` reads none; `LLMEngine` asks the request metrics who has ended.

The order within a step is: `StepStarted`; `DraftsPlanned`; from scheduling any of `RequestPreempted`, `BlocksFreed`,
`BlocksShared`, `BlocksEvicted`, `BlocksAllocated`, `BlockCopied` and `BlocksCached`; `DraftProposed`; `StepRan`; then,
for each request, `TokensCommitted`, `BlocksCached` for blocks that accepted drafts have filled, `BlocksFreed` for
rollbacks and finished requests, `RequestFinished`; finally `StepFinished`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from minillm.errors import TraceError
from minillm.version import __version__

SCHEMA = 2
READABLE = (1, 2)
"""Schema 1 has fewer kinds of events and fewer fields; all of them have the same meaning in schema 2."""
WorkKind = Literal["prefill", "decode", "verify"]
TokenOrigin = Literal["sampled", "accepted", "recovered", "bonus"]
DraftReason = Literal["predicted", "compared", "loss", "batch_size", "fixed"]
"""Why requests may have so many drafts.

`predicted`: so many are predicted to be fastest, or are tried; `compared`: a few steps without drafts are timed, and
drafting is compared with them; `loss`: drafting has cost more time than it saved and rests, except for requests that
sample with a seed of their own; `batch_size`: there are more requests than `disable_by_batch_size`; `fixed`: always the
same number.
"""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A count or a step. These ranges hold for a trace that is loaded: pictures of it reserve what it says."""
Size = Annotated[int, Meta(ge=0, le=2**24)]
"""A number of tokens or blocks, or a block's id."""
Parent = Annotated[int, Meta(ge=-1, le=2**24)]
Measure = Annotated[float, Meta(ge=0, le=1e15)]
LONGEST = 300
"""Characters of a reason in an error message."""


@dataclass(frozen=True)
class Event:
    """Base class of all events. A subclass is registered under its class name."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls

    def to_json(self) -> str:
        """Return the event as one line of JSON; the key `event` holds the class name."""
        return json.dumps({"event": type(self).__name__, **asdict(self)}, ensure_ascii=False)

    def check(self) -> None:
        """Raise `TraceError` if fields contradict each other. `Trace.load` calls it; the engine does not, for speed."""


@dataclass(frozen=True)
class EngineStarted(Event):
    """First event of every trace: the configuration of the engine that wrote it."""

    model: str
    draft_model: str | None
    block_size: Annotated[int, Meta(ge=1, le=2**24)]
    num_blocks: Size
    bytes_per_block: Count
    """Bytes of one block over all layers, keys and values, including the draft model's cache."""
    num_speculative_tokens: Size
    cache_layout: str = "paged"
    """Name of the cache layout."""
    prefix_caching: bool = False
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    speculative_method: str | None = None
    keeps_every_token: bool = True
    """False for a layout that drops tokens: then a slot is a token that was computed, not memory in use."""
    cached_blocks: list[Size] = field(default_factory=list)
    """Blocks without an owner that were in the prefix cache already, because the engine had run before."""
    whole_sequences: bool | None = None
    """Whether a block holds one whole request instead of a page; None: an older trace, which does not say it."""

    @property
    def drafter(self) -> str | None:
        """The name of the draft model, or of the speculative method without a model; None without speculation."""
        return self.draft_model or self.speculative_method


@dataclass(frozen=True)
class RequestAdded(Event):
    """A request joined the waiting queue."""

    request_id: str
    prompt: str
    """The prompt as text; decoded if the prompt was given as token ids."""
    prompt_token_ids: list[Count]
    priority: int = 0
    """Lower values run first, if the engine schedules by priority."""


@dataclass(frozen=True)
class StepStarted(Event):
    """A step began; `step` counts from 1 over the lifetime of the engine."""

    step: Count
    num_running: Count
    num_waiting: Count


@dataclass(frozen=True)
class BlocksAllocated(Event):
    """`block_ids` were appended to the request's block table, in this order."""

    request_id: str
    block_ids: list[Size]


@dataclass(frozen=True)
class BlocksShared(Event):
    """`block_ids`, filled by other requests, were appended to the request's empty block table; it is a further owner.

    The request's first `num_tokens` tokens need no prefill. With source `prefix` the blocks were found in the prefix
    cache. With source `fork` they belong to another completion of the same prompt, and the last may be partly filled.
    """

    request_id: str
    block_ids: list[Size]
    num_tokens: Size
    source: Literal["prefix", "fork"]


@dataclass(frozen=True)
class BlockCopied(Event):
    """Copy on write: `target` replaced `source` in the request's block table, with the same contents.

    The request is the only owner of `target` and no longer owns `source`. There is no `BlocksAllocated` for `target`.
    """

    request_id: str
    source: Size
    target: Size


@dataclass(frozen=True)
class BlocksCached(Event):
    """These full blocks of the request entered the prefix cache; they keep their contents when freed."""

    request_id: str
    block_ids: list[Size]


@dataclass(frozen=True)
class BlocksEvicted(Event):
    """These blocks left the prefix cache: because they are needed for other contents, because the cache was reset, or
    because a step was interrupted."""

    block_ids: list[Size]


@dataclass(frozen=True)
class BlocksFreed(Event):
    """`block_ids` left the end of the request's block table. Cached blocks keep their contents until evicted."""

    request_id: str
    block_ids: list[Size]
    reason: Literal["rolled_back", "preempted", "finished", "aborted", "interrupted"]
    """`interrupted`: a step was, and the request is computed again if it had not ended."""


@dataclass(frozen=True)
class RequestPreempted(Event):
    """The pool had no free blocks: the request lost its blocks and waits to be recomputed."""

    request_id: str
    num_computed_tokens: Size
    """Tokens whose keys and values were discarded."""


@dataclass(frozen=True)
class DraftsPlanned(Event):
    """How many drafts each decoding request may have, from this step until the next such event.

    Emitted for each new prediction, and when a number or the reason changes or another request decodes. Numbers that
    are fixed are emitted only after a step over `disable_by_batch_size`.
    """

    request_ids: list[str]
    num_drafts: list[Size]
    """Per request."""
    survival: list[list[Measure]]
    """Per request, by position: the estimated probability that this draft is made and it and all before it are
    accepted."""
    speedups: list[Measure]
    """`speedups[m]`: predicted tokens per second with the m most promising drafts of all requests, as a multiple of
    plain decoding. Empty, as is `survival`: nothing was predicted in this step."""
    reason: DraftReason = "predicted"

    def check(self) -> None:
        """See `Event.check`."""
        _check_lengths(request_ids=self.request_ids, num_drafts=self.num_drafts)
        if self.survival:  # none if nothing was predicted
            _check_lengths(request_ids=self.request_ids, survival=self.survival)
        if self.reason in ("compared", "batch_size") and any(self.num_drafts):
            raise TraceError(f"num_drafts {self.num_drafts} with reason {self.reason!r}, which allows no drafts")


@dataclass(frozen=True)
class DraftProposed(Event):
    """The draft tokens that the drafter proposed for a request."""

    request_id: str
    token_ids: list[Count]
    texts: list[str]
    parents: list[Parent] | None = None
    """For a draft tree: the parent of each draft, -1 for the last committed token. None for a chain."""

    def check(self) -> None:
        """See `Event.check`: a draft's parent is one of those before it."""
        _check_lengths(token_ids=self.token_ids, texts=self.texts)
        if self.parents is not None:
            _check_lengths(token_ids=self.token_ids, parents=self.parents)
            if any(parent >= draft for draft, parent in enumerate(self.parents)):
                raise TraceError(f"parents {self.parents}: a draft must come after its parent")


@dataclass(frozen=True)
class Work:
    """The share of one request in a step: its tokens `start … start + num_tokens - 1` go through the model."""

    request_id: str
    kind: WorkKind
    start: Size
    num_tokens: Size
    """For `verify` this counts the last committed token and the drafts."""


@dataclass(frozen=True)
class StepRan(Event):
    """One target forward over a ragged batch; keys and values of every token in `work` were written."""

    step: Count
    work: list[Work]


@dataclass(frozen=True)
class TokensCommitted(Event):
    """Tokens that a request gained in this step.

    After `verify`, `num_drafts` drafts were judged and the first `num_accepted` (in a tree: `path`) were accepted.
    `origins` has the origin of each committed token. Fewer than `num_accepted + 1` tokens are committed if the request
    stops at an accepted draft.
    Keys and values beyond `num_computed_tokens` are invalid: they belong to rejected drafts.
    """

    request_id: str
    token_ids: list[Count]
    texts: list[str]
    origins: list[TokenOrigin]
    num_drafts: Size
    num_accepted: Size
    num_computed_tokens: Size
    path: list[Size] | None = None
    """For a draft tree: the accepted drafts, from the root down."""

    def check(self) -> None:
        """See `Event.check`."""
        _check_lengths(token_ids=self.token_ids, texts=self.texts, origins=self.origins)
        if self.num_accepted > self.num_drafts:
            raise TraceError(f"{self.num_accepted} of {self.num_drafts} drafts accepted; give at most all of them")
        if (kept := self.origins.count("accepted")) > self.num_accepted:
            raise TraceError(f"{kept} tokens are accepted drafts, but {self.num_accepted} drafts were accepted")
        if self.path and max(self.path) >= self.num_drafts:
            raise TraceError(f"path {self.path} names a draft that is none of the {self.num_drafts}")


@dataclass(frozen=True)
class RequestFinished(Event):
    """The request has ended and holds no blocks."""

    request_id: str
    reason: Literal["stop", "length", "abort"]
    num_prompt_tokens: Size
    num_output_tokens: Size


@dataclass(frozen=True)
class StepFinished(Event):
    """End of a step. `seconds`: drafting, the target's forward with the verdicts, and the rest: scheduling and
    committing."""

    step: Count
    seconds: Measure
    draft_seconds: Measure
    target_seconds: Measure
    num_free_blocks: Size


def token_origins(num_committed: int, num_drafts: int, num_accepted: int, ends_at_leaf: bool) -> list[TokenOrigin]:
    """Where each of `num_committed` tokens came from; a stop may have cut off the last ones. `ends_at_leaf`: whether no
    draft follows the last accepted one."""
    last: TokenOrigin = "sampled"
    if num_drafts:
        last = "bonus" if ends_at_leaf else "recovered"
    return [*["accepted"] * num_accepted, last][:num_committed]


def _check_lengths(**lists: Sequence[object]) -> None:
    """Raise `TraceError` unless all `lists` have the same length."""
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
        raise TraceError(f"{lengths}: give as many of each")


class Listeners(list[Callable[[Event], None]]):
    """The event listeners, in order of calls. The engine and its scheduler share it, so neither refers to the other."""

    def emit(self, event: Event) -> None:
        """Call every listener with `event`."""
        for listener in self:
            listener(event)


class Trace:
    """An event log that grows while the engine runs. It can be watched, saved to JSONL and loaded again."""

    def __init__(self, events: list[Event] | None = None) -> None:
        self.events: list[Event] = list(events or [])
        self._watchers: list[Callable[[Event], None]] = []

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def append(self, event: Event) -> None:
        """Record `event` and call every watcher."""
        self.events.append(event)
        for watcher in self._watchers:
            watcher(event)

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher(event)` for every event from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[Event], None]) -> None:
        """Stop calling `watcher`; without effect if it is not called."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def of(self, *kinds: type[Event]) -> list[Any]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    def save(self, path: str | Path) -> None:
        """Write one JSON object per line; the first line has the versions of schema and minillm."""
        lines = [json.dumps({"schema": SCHEMA, "minillm": __version__}), *(event.to_json() for event in self.events)]
        data = ("\n".join(lines) + "\n").encode()  # first, so that what cannot be written leaves an old file alone
        Path(path).write_bytes(data)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that `save` wrote, in this version or an older one. Raises `TraceError` with the invalid line."""
        try:
            # Not `splitlines`: a token may hold U+2028, which it takes for the end of a line.
            lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, ValueError) as problem:
            raise TraceError(f"{path} cannot be read as a trace: {problem}") from None
        try:
            header = json.loads(lines[0])
            schema = header["schema"]
        except (IndexError, KeyError, TypeError, ValueError, RecursionError):
            raise TraceError(f"{path} is not a minillm trace: line 1 must contain the schema") from None
        if schema not in READABLE:
            writer = f"minillm {str(header.get('minillm', 'of an unknown version'))[:LONGEST]}"
            raise TraceError(
                f"{path} was saved by {writer} with trace schema {str(schema)[:LONGEST]}; this is minillm "
                f"{__version__}, which reads schemas {' and '.join(map(str, READABLE))}: load it there, or record the "
                "trace again here"
            )
        return cls([_parse(line, number, path) for number, line in enumerate(lines[1:], start=2)])


def _parse(line: str, number: int, path: str | Path) -> Event:
    try:
        values = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair could be neither drawn nor saved
        kind = Event.kinds[values.pop("event")]
        unknown = values.keys() - {f.name for f in fields(kind)}
        if unknown:
            raise KeyError(", ".join(sorted(unknown)))
        event: Event = msgspec.convert(values, kind)
        event.check()
        return event
    except (msgspec.ValidationError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        reason = f"{type(problem).__name__}: {str(problem)[:LONGEST]}"
        raise TraceError(f"{path}, line {number}: not an event ({reason})") from None
