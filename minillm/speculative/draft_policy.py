"""How many drafts each request gets in a step, decided before they are drawn: so the output stays exact.

`FixedDrafts` gives every request the same number, `AdaptiveDrafts` as many as pay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minillm.request import Request
from minillm.trace import DraftReason


@dataclass(frozen=True)
class DraftPlan:
    """The decision of one step."""

    num_drafts: list[int]
    """Most drafts of each request."""
    survival: list[list[float]] = field(default_factory=list)
    """Per request, by position: the estimated probability that this draft is made and it and all before it are
    accepted."""
    speedups: list[float] = field(default_factory=list)
    """`speedups[m]`: predicted tokens per second with the m most promising drafts of all requests, as a multiple of
    plain decoding. Empty: nothing was predicted."""
    num_steps: int = 1
    """Steps that it holds for while the same requests decode and no other comes. More than one only without drafts."""
    reason: DraftReason = "predicted"


class DraftPolicy(ABC):
    """Decides the number of drafts. A policy that learns nothing from verdicts and durations has only `plan`."""

    @abstractmethod
    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide for the decoding `requests`. `num_rows`: tokens of the step without any drafts, prefills included."""

    def plan_held(self, num_steps: int) -> None:  # noqa: B027
        """Called when a plan to draft nothing ends that has held for so many steps without another call of `plan`."""

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:  # noqa: B027
        """Called with each verdict; where a model ran and had no draft, with 0. It is not called for `NO_DRAFT`, which
        costs next to no time. `num_asked`: the most drafts that there could have been."""

    def step_finished(  # noqa: B027
        self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float
    ) -> None:
        """Called after each step for which `plan` was called, that computed no prompt, and that either has drafts or
        was not to have any: others take longer for other reasons.

        `drafts`: how many each request had; 0 where a model ran and had none, no entry for `NO_DRAFT`; `num_rows`: all
        rows of the forward; `num_context`: tokens that its requests had in the cache; `seconds`: of the whole step."""

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """What so many drafts of each request should have added to a step, `num_rows` and `num_context` as in
        `step_finished`; 0 if unknown."""
        return 0.0

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """Whether the next step may have drafts for one of the `requests` of this one. If not, the drafter is not
        shown what this step leaves."""
        return True


@dataclass(frozen=True)
class FixedDrafts(DraftPolicy):
    """The same number for every request."""

    num_drafts: int

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        return DraftPlan([self.num_drafts] * len(requests), reason="fixed")
