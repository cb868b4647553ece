"""`PlainTurns`: now and then some steps go without drafts, so that it is known what drafts add to a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.request import Request
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.step_costs import COMPARED_STEPS

PLAIN_STEPS = COMPARED_STEPS
"""So many steps at a time go without drafts."""
FIRST_PLAIN, PLAIN_EVERY = 8, 512
"""Steps with drafts before the next `PLAIN_STEPS` steps without: 8 at first, doubled each time up to 512."""


class PlainTurns:
    """A `DraftPolicy` that asks another, except in some steps.

    The other compares steps with drafts and without. Of a `FallbackDrafts` no method drafts in these steps: otherwise
    each would be compared with the other only, and nobody would see that both lose.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self._drafted_steps = 0
        """Steps with drafts since some went without."""
        self._plain_after, self._plain_left = FIRST_PLAIN, 0
        """Steps with drafts before the next steps without, and how many of those are left."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`. A request that samples with a seed of its own always gets all its drafts."""
        if self._drafted_steps >= self._plain_after:
            self._drafted_steps, self._plain_left = 0, PLAIN_STEPS
            self._plain_after = min(2 * self._plain_after, PLAIN_EVERY)
        if self._plain_left and not any(request.samples_with_own_seed for request in requests):
            self._plain_left -= 1
            return DraftPlan([0] * len(requests))
        found = self.policy.plan(requests, num_rows)
        if not any(found.num_drafts):
            self._drafted_steps = 0
        return found

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        self.policy.plan_held(num_steps)

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self.policy.judged(request, num_asked, num_drafts, num_accepted)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        self._drafted_steps += bool(drafts)
        self.policy.step_finished(drafts, num_rows, num_context, seconds)

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        return self.policy.added_seconds(drafts, num_rows, num_context)

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return self.policy.may_draft_next(requests)
