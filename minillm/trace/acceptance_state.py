"""The rounds of speculative decoding in a trace: which drafts were accepted, and which token the target added.

draft      a token that the drafter proposed
accepted   a draft that the target accepted and that was committed
rejected   the first draft that the target rejected
discarded  a draft after the rejected one, on another branch of a tree, or after the end of the text: it is not used
recovered  the target's own token in place of the rejected draft
bonus      the target's own token after all drafts were accepted
alone      a forward of the target without drafts

A round may verify a tree of drafts. Then there are several drafts per position, and the target follows one branch.
"""

from __future__ import annotations

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
from minillm.trace.trace_state import TraceState

DraftOutcome = Literal["accepted", "rejected", "discarded"]


@dataclass(frozen=True)
class Round:
    """One target forward that verified at least one draft of one request."""

    step: int
    drafts: tuple[str, ...]
    verdicts: tuple[DraftOutcome, ...]
    target_token: str | None
    """The target's own token; `None` if the text ended at an accepted draft."""
    added_origin: TokenOrigin | None
    parents: tuple[int, ...] | None = None
    """For a tree: the parent of each draft, -1 for the last committed token. None for a chain."""

    @property
    def candidates_by_position(self) -> list[list[int]]:
        """The drafts at each position along the accepted branch, including the position where none was accepted.

        A chain has one draft per position, and all positions are included.
        """
        if self.parents is None:
            return [[i] for i in range(len(self.drafts))]
        candidates, node = [], -1
        while children := [i for i, parent in enumerate(self.parents) if parent == node]:
            candidates.append(children)
            node = next((i for i in children if self.verdicts[i] == "accepted"), len(self.drafts))
        return candidates

    @property
    def num_positions(self) -> int:
        """The length of the longest branch, in tokens."""
        if self.parents is None:
            return len(self.drafts)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return max(depths, default=0)

    @property
    def num_accepted(self) -> int:
        """The number of drafts that became part of the text."""
        return self.verdicts.count("accepted")

    @property
    def tokens(self) -> int:
        """The number of tokens that the request gained."""
        return self.num_accepted + (self.target_token is not None)


@dataclass(frozen=True)
class Token:
    """A committed token and where it came from."""

    text: str
    origin: TokenOrigin


@dataclass
class Acceptance:
    """The rounds of one request (or of several, see `AcceptanceState.total`), and metrics derived from them."""

    rounds: list[Round] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """All committed tokens, including those of forwards without drafts."""
    undrafted_forwards: int = 0
    """Decoding forwards without drafts; each gains one token. (A prefill does not count.)"""

    @property
    def drafted(self) -> int:
        """The number of drafts in all rounds."""
        return sum(len(r.drafts) for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """The number of drafts that became part of the text."""
        return sum(r.num_accepted for r in self.rounds)

    @property
    def added(self) -> int:
        """The number of the target's own tokens (recovered or bonus) in all rounds."""
        return sum(r.target_token is not None for r in self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; `None` before the first round.

        Drafts after the end of the text count as not accepted, unlike in `RequestMetrics.acceptance_rate`, which takes
        the verdicts of the target.
        """
        return self.num_accepted / self.drafted if self.rounds else None

    @property
    def tokens_per_forward(self) -> float | None:
        """τ = (accepted + added + undrafted) / (rounds + undrafted): the mean number of tokens per decoding forward of
        the target; `None` before the first round."""
        return self.gained / self.forwards if self.rounds else None

    @property
    def gained(self) -> int:
        """The number of tokens gained by decoding."""
        return self.num_accepted + self.added + self.undrafted_forwards

    @property
    def forwards(self) -> int:
        """The number of decoding forwards of the target."""
        return len(self.rounds) + self.undrafted_forwards

    def accepted_by_position(self) -> list[tuple[int, int]]:
        """Return for each draft position how many drafts were accepted, out of how many.

        The rate is marginal: a draft after a rejected one, or after the end of the text, counts as not accepted.
        """
        longest = max((r.num_positions for r in self.rounds), default=0)
        return [
            (sum(r.num_accepted > i for r in self.rounds), sum(r.num_positions > i for r in self.rounds))
            for i in range(longest)
        ]


@dataclass
class RequestAcceptance(Acceptance):
    """The rounds of one request."""

    request_id: str = ""
    index: int = 0
    """As in `RequestState`: it determines the letter and colour in pictures."""
    prompt: str = ""
    finished: bool = False


@dataclass
class AcceptanceState(TraceState):
    """Folds events, in order, into the rounds of each request."""

    engine: EngineStarted | None = None
    step: int = 0
    requests: dict[str, RequestAcceptance] = field(default_factory=dict)
    """By id, which may be used again once a request has ended: the newest."""
    _all: list[RequestAcceptance] = field(default_factory=list)
    _proposed: dict[str, DraftProposed] = field(default_factory=dict)
    _prefilled: set[str] = field(default_factory=set)
    """Requests with a prefill in this step."""

    def fold(self, event: Event) -> None:
        """Update the state with one event."""
        match event:
            case EngineStarted():
                self.engine = event
            case RequestAdded(request_id=request_id, prompt=prompt):
                added = RequestAcceptance(request_id=request_id, index=len(self._all), prompt=prompt)
                self.requests.pop(request_id, None)  # an id that is used again is a new request, and comes last
                self.requests[request_id] = added
                self._all.append(added)
            case StepStarted(step=step):
                self.step = step
                self._proposed.clear()
            case DraftProposed(request_id=request_id):
                self._proposed[request_id] = event
            case StepRan(work=work):
                self._prefilled = {part.request_id for part in work if part.kind == "prefill"}
            case TokensCommitted(request_id=request_id):
                self._commit(self.requests[request_id], event)
            case RequestFinished(request_id=request_id):
                self.requests[request_id].finished = True

    def total(self) -> Acceptance:
        """Return the rounds of all requests together, in the order of their steps."""
        requests = self._all
        rounds = sorted(chain.from_iterable(r.rounds for r in requests), key=lambda r: r.step)
        tokens = list(chain.from_iterable(r.tokens for r in requests))
        return Acceptance(rounds, tokens, sum(r.undrafted_forwards for r in requests))

    def _commit(self, request: RequestAcceptance, event: TokensCommitted) -> None:
        request.tokens += map(Token, event.texts, event.origins)
        if not event.num_drafts:
            request.undrafted_forwards += event.request_id not in self._prefilled
            return
        proposed = self._proposed.get(event.request_id)
        texts = tuple(proposed.texts) if proposed else ()
        if len(texts) < event.num_drafts:
            raise TraceError(f"{event.num_drafts} drafts were verified, but only {len(texts)} were proposed")
        drafts, kept = texts[: event.num_drafts], event.origins.count("accepted")
        added = next((pair for pair in zip(event.texts, event.origins, strict=True) if pair[1] != "accepted"), None)
        if proposed is None or proposed.parents is None:
            verdicts, parents = _chain_verdicts(len(drafts), kept, added is not None), None
        else:
            parents = tuple(proposed.parents)
            verdicts = _tree_verdicts(parents, (event.path or [])[:kept], added is not None)
        request.rounds.append(Round(self.step, drafts, verdicts, *(added or (None, None)), parents))


def _chain_verdicts(count: int, kept: int, has_added: bool) -> tuple[DraftOutcome, ...]:
    """Return the verdicts of a chain. `has_added`: whether the target added a token of its own."""
    verdicts: list[DraftOutcome] = ["discarded"] * count
    verdicts[:kept] = ["accepted"] * kept
    if has_added and kept < count:
        verdicts[kept] = "rejected"
    return tuple(verdicts)


def _tree_verdicts(parents: tuple[int, ...], path: list[int], has_added: bool) -> tuple[DraftOutcome, ...]:
    """Return the verdicts of a tree. `has_added`: whether the target added a token of its own.

    Siblings are judged in order, so those before an accepted one were rejected. If the target added a token, all
    children of the last accepted draft were rejected as well.
    """
    verdicts: list[DraftOutcome] = ["discarded"] * len(parents)
    for node, parent in zip(path, [-1, *path], strict=False):
        verdicts[node] = "accepted"
        for sibling in range(node):
            if parents[sibling] == parent:
                verdicts[sibling] = "rejected"
    last = path[-1] if path else -1
    for child, parent in enumerate(parents):
        if has_added and parent == last:
            verdicts[child] = "rejected"
    return tuple(verdicts)
