"""How many drafts each method of a `FallbackDrafter` may propose: each has estimates and costs of its own.

Lookup is nearly free and its drafts are accepted where text repeats. A model's drafts cost forwards. With one estimate
for both, a model that does not pay would silence the lookup, or a lookup that pays would keep the model drafting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.request import Request
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.step_times import PlainTimes


class FallbackDrafts(DraftPolicy):
    """A `DraftPolicy` for each of the two methods; a verdict is told to that of the method which proposed. A method
    that ran a model and had no draft is told so, whatever the other had."""

    def __init__(
        self, drafter: FallbackDrafter, first: AdaptiveDrafts | FallbackDrafts, second: AdaptiveDrafts | FallbackDrafts
    ) -> None:
        self.drafter, self.first, self.second = drafter, first, second
        second.plain_times = first.plain_times
        self._plans: tuple[DraftPlan | None, DraftPlan | None] = (None, None)
        """The latest of both methods, and what they make together."""
        self._plan = DraftPlan([])

    @property
    def plain_times(self) -> PlainTimes:
        """What steps without drafts take. Both methods are compared with the same."""
        return self.first.plain_times

    @plain_times.setter
    def plain_times(self, times: PlainTimes) -> None:
        self.first.plain_times = self.second.plain_times = times

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`. The plan has room for the longer of the two drafts of a request, and the predictions
        of the method that is predicted to gain more."""
        plans = self.first.plan(requests, num_rows), self.second.plan(requests, num_rows)
        if plans[0] is self._plans[0] and plans[1] is self._plans[1]:
            return self._plan  # both still hold
        self._plans = plans
        limits = list(zip(*(plan.num_drafts for plan in plans), strict=True))
        self.drafter.limits.update(zip(requests, limits, strict=True))
        better = max(plans, key=lambda plan: max(plan.speedups, default=0.0))
        num_steps = min(plan.num_steps for plan in plans)
        self._plan = DraftPlan(list(map(max, limits)), better.survival, better.speedups, num_steps)
        return self._plan

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        for policy in (self.first, self.second):
            policy.plan_held(num_steps)

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        limits, made = self.drafter.limits[request], self.drafter.made[request]
        for policy, limit, count in zip((self.first, self.second), limits, made, strict=True):
            if count is not None:
                policy.judged(request, min(num_asked, limit), count, num_accepted if count else 0)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`. Each policy is told of steps with its own drafts, without what the other's
        should have added; of steps without any the first, for both."""
        if not drafts:
            self.first.step_finished(drafts, num_rows, num_context, seconds)
            return
        of_first, of_second = self._by_method(drafts)
        for policy, own, other, others in (
            (self.first, of_first, self.second, of_second),
            (self.second, of_second, self.first, of_first),
        ):
            if own:
                beside = other.added_seconds(others, num_rows, num_context) if others else 0.0
                policy.step_finished(own, num_rows - sum(others.values()), num_context, seconds - beside)

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        of_first, of_second = self._by_method(drafts)
        second = self.second.added_seconds(of_second, num_rows, num_context)
        return second + self.first.added_seconds(of_first, num_rows - sum(of_second.values()), num_context)

    def _by_method(self, drafts: Mapping[Request, int]) -> tuple[dict[Request, int], dict[Request, int]]:
        """How many each method had, for the requests of `drafts` whose round says something of it."""
        made = {request: self.drafter.made[request] for request in drafts}
        of_first, of_second = ({r: n[i] for r, n in made.items() if n[i] is not None} for i in (0, 1))
        return of_first, of_second

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return any(policy.may_draft_next(requests) for policy in (self.first, self.second))
