"""What the steps of a run with drafts did: tokens, drafts judged and accepted by position, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.trace import Event


@dataclass
class Counts:
    """What the rounds of one run did."""

    tokens: int = 0
    forwards: int = 0
    """Requests, summed over the steps that gained tokens."""
    judged: list[int] = field(default_factory=list)
    """By position: drafts whose predecessors were all accepted."""
    accepted: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    """Per step with drafts: seconds of drafting."""
    verify_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    """Per step without drafts: seconds of the forward and its sampling."""

    @classmethod
    def of(cls, events: Sequence[Event]) -> Counts:
        """Count the steps in which every request decodes."""
        from minillm.trace import DraftProposed, StepFinished, StepRan, TokensCommitted

        counts, kinds, committed = cls(), set(), []
        trees: dict[str, list[int]] = {}
        """The parents of this step's draft trees, by request."""
        for event in events:
            if isinstance(event, DraftProposed) and event.parents is not None:
                trees[event.request_id] = event.parents
            elif isinstance(event, StepRan):
                kinds, committed = {work.kind for work in event.work}, []
            elif isinstance(event, TokensCommitted):
                committed.append(event)
            elif isinstance(event, StepFinished):
                if "prefill" not in kinds:
                    counts._add(event, committed, "verify" in kinds, trees)
                trees = {}
        return counts

    def _add(self, step: Any, committed: Sequence[Any], has_drafts: bool, trees: Mapping[str, list[int]]) -> None:
        if has_drafts:
            self.draft_s.append(step.draft_seconds)
            self.verify_s.append(step.target_seconds)
        else:
            self.plain_s.append(step.target_seconds)
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
