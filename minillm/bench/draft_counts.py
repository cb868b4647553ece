"""What the steps of runs with drafts did: tokens, drafts judged and accepted by position, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minillm.bench.harness import Counted

if TYPE_CHECKING:
    from minillm.trace import Event


@dataclass
class Counts:
    """What the rounds did."""

    num_requests: int | None = None
    """Only steps of so many requests count. None: all."""
    tokens: int = 0
    forwards: int = 0
    """Requests, summed over the steps that gained tokens."""
    judged: list[int] = field(default_factory=list)
    """By position: drafts whose predecessors were all accepted."""
    accepted: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    """Per step with drafts: seconds of drafting."""
    verify_s: list[float] = field(default_factory=list)
    """Per step with drafts: seconds of everything else, scheduling and verdicts included."""
    plain_s: list[float] = field(default_factory=list)
    """Seconds per step without drafts."""

    def count(self, events: Sequence[Event]) -> Counted:
        """Count the steps of one run in which every request decodes, `num_requests` of them. Returns their sum."""
        from minillm.trace import DraftProposed, StepFinished, StepRan, TokensCommitted

        before, took = self.tokens, 0.0
        kinds: list[str] = []
        committed: list[Any] = []
        trees: dict[str, list[int]] = {}
        """The parents of this step's draft trees, by request."""
        for event in events:
            if isinstance(event, DraftProposed) and event.parents is not None:
                trees[event.request_id] = event.parents
            elif isinstance(event, StepRan):
                kinds, committed = [work.kind for work in event.work], []
            elif isinstance(event, TokensCommitted):
                committed.append(event)
            elif isinstance(event, StepFinished):
                if "prefill" not in kinds and self.num_requests in (None, len(kinds)):
                    self._add(event, committed, "verify" in kinds, trees)
                    took += event.seconds
                trees = {}
        return Counted(took, self.tokens - before)

    def _add(self, step: Any, committed: Sequence[Any], has_drafts: bool, trees: Mapping[str, list[int]]) -> None:
        if has_drafts:
            self.draft_s.append(step.draft_seconds)
            self.verify_s.append(step.seconds - step.draft_seconds)
        else:
            self.plain_s.append(step.seconds)
        for event in committed:
            self.tokens += len(event.token_ids)
            self.forwards += 1
            for i in range(event.num_accepted + self._was_one_rejected(event, trees.get(event.request_id))):
                if i == len(self.judged):
                    self.judged.append(0)
                    self.accepted.append(0)
                self.judged[i] += 1
                self.accepted[i] += i < event.num_accepted

    @staticmethod
    def _was_one_rejected(event: Any, parents: Sequence[int] | None) -> bool:
        """Whether drafts were judged behind the accepted ones. In a tree these are children of the last accepted draft,
        or of the root, -1."""
        if parents is None:
            return bool(event.num_accepted < event.num_drafts)
        return (event.path[-1] if event.path else -1) in parents
