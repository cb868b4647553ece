"""`PlainTurns`: now and then some steps go without drafts, so that it is known what drafts bring and what they add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minillm.request import Request
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.step_costs import COMPARED_STEPS, SETTLING_STEPS

PLAIN_STEPS = COMPARED_STEPS
"""So many steps at a time go without drafts."""
FIRST_PLAIN, PLAIN_EVERY = 8, 512
"""Steps with drafts before the next `PLAIN_STEPS` steps without: 8 at first, doubled each time up to 512."""
LEAST_GAIN = 0.95
"""Measured speed-up below which drafting rests: a smaller loss is within the error of the measurement."""
FIRST_REST, LONGEST_REST = 64, 512
"""Steps that a rest lasts: 64 at first, doubled each time up to 512, until a gain is measured."""
TOKENS_WEIGHT, STEPS_WEIGHT, TURNS_WEIGHT = 0.01, 0.1, 0.3
"""What the latest value weighs in the means of tokens per request, of seconds per step, and of the ratios of seconds,
one for each time that some steps went without drafts."""


@dataclass
class Mean:
    """Of values of which the latest weighs at least a given share."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, weight: float) -> None:
        """Count a value. `weight`: its share, once there are enough."""
        self.count += 1
        self.value += max(weight, 1 / self.count) * (value - self.value)


@dataclass
class StepTimes:
    """Seconds of the latest steps of one kind with the same number of requests."""

    num_requests: int = 0
    seconds: Mean = field(default_factory=Mean)
    _skipped: int = 0
    """The first steps are not counted: they find other code and data in the processor's caches."""

    def add(self, num_requests: int, seconds: float) -> None:
        """Count a step; one with another number of requests begins anew."""
        if num_requests != self.num_requests:
            self.num_requests, self.seconds, self._skipped = num_requests, Mean(), 0
        if self._skipped < SETTLING_STEPS:
            self._skipped += 1
        else:
            self.seconds.add(seconds, STEPS_WEIGHT)


class PlainTurns:
    """A `DraftPolicy` that asks another, except in some steps.

    The other compares the times of steps with drafts and without. Of a `FallbackDrafts` no method drafts in these
    steps: otherwise each would be compared with the other only, and nobody would see that both lose. And here it is
    measured, whatever was predicted, how many times as many tokens per second the steps with drafts gave as those
    without. Below `LEAST_GAIN`, drafting rests for a while.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.policy = policy
        self._drafted_steps = 0
        """Steps with drafts since some went without."""
        self._plain_after, self._plain_left = FIRST_PLAIN, 0
        """Steps with drafts before the next steps without, and how many of those are left."""
        self._is_turn = False
        """Whether this step goes without drafts to be compared."""
        self._drafted, self._plain = StepTimes(), StepTimes()
        self._accepted = 0
        """Drafts accepted in this step."""
        self._tokens, self._ratio = Mean(), Mean()
        """Tokens per request of a step with drafts, and its seconds over those of a step without."""
        self._rest, self._rest_left = FIRST_REST, 0
        """Steps of the next rest, and those that are left of this one."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`. A request that samples with a seed of its own always gets all its drafts."""
        self._accepted = 0
        if self._drafted_steps >= self._plain_after:
            self._drafted_steps, self._plain_left = 0, PLAIN_STEPS
            self._plain_after = min(2 * self._plain_after, PLAIN_EVERY)
        has_own_seeds = any(request.samples_with_own_seed for request in requests)
        if self._plain_left and not has_own_seeds:
            self._plain_left, self._is_turn = self._plain_left - 1, True
            return DraftPlan([0] * len(requests))
        if self._is_turn:
            self._is_turn = False
            self._compare()
        if self._rest_left and not has_own_seeds:
            self._rest_left -= 1
            return DraftPlan([0] * len(requests), num_steps=self._rest_left + 1)
        found = self.policy.plan(requests, num_rows)
        if not any(found.num_drafts):
            self._drafted_steps = 0
        return found

    def _compare(self) -> None:
        """Compare the steps that went without drafts with those before them, and let drafting rest if it loses."""
        drafted, plain = self._drafted, self._plain
        self._drafted, self._plain = StepTimes(), StepTimes()
        if not (drafted.seconds.count and plain.seconds.count and drafted.num_requests == plain.num_requests):
            return
        self._ratio.add(drafted.seconds.value / plain.seconds.value, TURNS_WEIGHT)
        gain = self._tokens.value / self._ratio.value
        if gain >= 1:
            self._rest = FIRST_REST
        elif gain < LEAST_GAIN and self._ratio.count > 1:
            self._rest_left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._plain_after = 2 * FIRST_PLAIN  # then it is measured again soon

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        if self._rest_left:
            self._rest_left = max(0, self._rest_left - num_steps)
        else:
            self.policy.plan_held(num_steps)

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self._accepted += num_accepted
        self.policy.judged(request, num_asked, num_drafts, num_accepted)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        num_requests = num_rows - sum(drafts.values())
        if drafts:
            self._drafted_steps += 1
            self._drafted.add(num_requests, seconds)
            self._tokens.add(1 + self._accepted / num_requests, TOKENS_WEIGHT)
        elif self._is_turn:
            self._plain.add(num_requests, seconds)
        self.policy.step_finished(drafts, num_rows, num_context, seconds)

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        return self.policy.added_seconds(drafts, num_rows, num_context)

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        if self._rest_left and not any(request.samples_with_own_seed for request in requests):
            return False
        return self.policy.may_draft_next(requests)
