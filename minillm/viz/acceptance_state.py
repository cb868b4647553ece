"""Speculative decoding as a trace tells it: round by round what was guessed, kept and added.

draft      a token that the drafter guessed
accepted   a draft that the target agreed with and that stayed
rejected   the first draft that the target did not agree with
discarded  a draft behind the rejected one, or behind the end of the text: nobody needed its verdict
recovered  the target's own token in place of the rejected draft
bonus      the target's own token after all drafts were accepted
alone      a forward of the target that had no draft to judge
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from minillm.errors import TraceError
from minillm.trace import (
    DraftProposed,
    EngineStarted,
    Event,
    RequestAdded,
    RequestFinished,
    StepRan,
    StepStarted,
    TokenOrigin,
    TokensCommitted,
)

Verdict = Literal["accepted", "rejected", "discarded"]


@dataclass(frozen=True)
class Round:
    """One target forward that judged at least one draft of one request."""

    step: int
    drafts: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    added: str | None
    """The target's own token; `None` if the text ended inside the accepted drafts."""
    added_origin: TokenOrigin | None

    @property
    def kept(self) -> int:
        """Drafts that became part of the text."""
        return self.verdicts.count("accepted")

    @property
    def tokens(self) -> int:
        """Tokens that the request gained."""
        return self.kept + (self.added is not None)


@dataclass(frozen=True)
class Token:
    """A committed token and where it came from."""

    text: str
    origin: TokenOrigin


@dataclass
class Acceptance:
    """The rounds of one request (or of several, see `AcceptanceState.total`) and the figures that follow from them."""

    rounds: list[Round] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """All committed tokens, those of rounds without a draft included."""
    alone: int = 0
    """Decoding forwards that had no draft to judge, and gained one token each. (A prefill is none.)"""

    @property
    def drafted(self) -> int:
        """Drafts that the target judged."""
        return sum(len(r.drafts) for r in self.rounds)

    @property
    def kept(self) -> int:
        """Drafts that became part of the text."""
        return sum(r.kept for r in self.rounds)

    @property
    def added(self) -> int:
        """Tokens of the target's own in the rounds."""
        return sum(r.added is not None for r in self.rounds)

    @property
    def kept_share(self) -> float | None:
        """Kept / drafted; `None` before the first draft was judged."""
        return self.kept / self.drafted if self.rounds else None

    @property
    def tokens_per_forward(self) -> float | None:
        """τ = (kept + added + alone) / (rounds + alone): what a decoding forward of the target yields, on average;
        `None` before the first draft was judged."""
        return self.gained / self.forwards if self.rounds else None

    @property
    def gained(self) -> int:
        """Tokens that came of decoding."""
        return self.kept + self.added + self.alone

    @property
    def forwards(self) -> int:
        """Decoding forwards of the target."""
        return len(self.rounds) + self.alone

    def kept_by_position(self) -> list[tuple[int, int]]:
        """Per draft position (from the first): how many were kept, out of how many. A marginal rate: a draft behind a
        rejected one counts as not kept."""
        longest = max((len(r.drafts) for r in self.rounds), default=0)
        return [
            (sum(r.kept > i for r in self.rounds), sum(len(r.drafts) > i for r in self.rounds)) for i in range(longest)
        ]


@dataclass
class RequestAcceptance(Acceptance):
    """The rounds of one request."""

    request_id: str = ""
    index: int = 0
    """As in `RequestState`: letter and colour follow from it."""
    prompt: str = ""
    finished: bool = False


@dataclass
class AcceptanceState:
    """Folds events, in order, into the rounds of every request."""

    engine: EngineStarted | None = None
    step: int = 0
    requests: dict[str, RequestAcceptance] = field(default_factory=dict)
    _proposed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _prefilled: set[str] = field(default_factory=set)
    """Requests whose prompt is computed in this step."""

    def fold_all(self, events: Iterable[Event]) -> AcceptanceState:
        """Fold many events; returns self."""
        for event in events:
            self.fold(event)
        return self

    def fold(self, event: Event) -> None:
        """Take one event into account."""
        match event:
            case EngineStarted():
                self.engine = event
            case RequestAdded(request_id=request_id, prompt=prompt):
                index = len(self.requests)
                self.requests[request_id] = RequestAcceptance(request_id=request_id, index=index, prompt=prompt)
            case StepStarted(step=step):
                self.step = step
                self._proposed.clear()
            case DraftProposed(request_id=request_id, texts=texts):
                self._proposed[request_id] = tuple(texts)
            case StepRan(work=work):
                self._prefilled = {part.request_id for part in work if part.kind == "prefill"}
            case TokensCommitted(request_id=request_id):
                self._commit(self.requests[request_id], event)
            case RequestFinished(request_id=request_id):
                self.requests[request_id].finished = True

    def total(self) -> Acceptance:
        """All requests taken together, rounds in the order of the steps."""
        requests = self.requests.values()
        rounds = sorted(chain.from_iterable(r.rounds for r in requests), key=lambda r: r.step)
        tokens = list(chain.from_iterable(r.tokens for r in requests))
        return Acceptance(rounds, tokens, sum(r.alone for r in requests))

    def _commit(self, request: RequestAcceptance, event: TokensCommitted) -> None:
        request.tokens += map(Token, event.texts, event.origins)
        if not event.num_drafts:
            request.alone += event.request_id not in self._prefilled
            return
        proposed = self._proposed.get(event.request_id, ())
        if len(proposed) < event.num_drafts:
            raise TraceError(f"{event.num_drafts} drafts were judged, but only {len(proposed)} proposed")
        drafts, kept = proposed[: event.num_drafts], event.origins.count("accepted")
        added = next((pair for pair in zip(event.texts, event.origins, strict=True) if pair[1] != "accepted"), None)
        verdicts: list[Verdict] = ["discarded"] * len(drafts)
        verdicts[:kept] = ["accepted"] * kept
        if added and kept < len(drafts):
            verdicts[kept] = "rejected"
        request.rounds.append(Round(self.step, drafts, tuple(verdicts), *(added or (None, None))))
