"""`LossLimit`: drafting that has cost more time than it saved rests until that is paid back."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from minillm.request import Request
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.step_times import LARGEST_CHANGE, PlainTimes
from minillm.trace import DraftReason

PLAIN_STEPS = 10
"""So many steps at a time go without drafts, to be compared."""
FIRST_PLAIN, PLAIN_EVERY = 8, 512
"""Drafting goes on for as long as so many steps without drafts take before the next `PLAIN_STEPS` of them: 8 at first,
doubled each time up to 512."""
COMPARED_KEPT = 32
"""Steps with drafts are judged by the median of so many of the latest that were compared."""
LOSS_SHARE = 0.01
"""What the measured loss comes to in the long run, as a share of the time of the steps without drafts."""
MOST_LOST = 8
"""Drafting rests once it has cost this many steps without drafts, and no step counts as a larger loss: it may have been
interrupted. The first drafts of a request take as long as some five, while a draft model or an index reads the
prompt."""
MOST_SAVED = 32
"""At most this many steps without drafts count as saved: when the text changes, drafting may lose them again."""
SAVED_BY_OTHERS = 8
"""When a new request comes, at most this many count as saved: its text is another."""


@dataclass
class LossLimit(DraftPolicy):
    """A `DraftPolicy` that asks another, and limits what its drafts may lose, whatever it predicts.

        saved  =  tokens per request · seconds of a step without drafts - seconds          each step with drafts
               =  `LOSS_SHARE` · seconds                                                   each step without

    A step in which a model ran and had no draft counts as one with drafts.

    Once `MOST_LOST` steps without drafts are lost, drafting rests until `saved` is back at zero. To know what steps
    without drafts take, some go without now and then. A step with drafts is compared only with steps that went without
    shortly before it, because the speed of a machine changes. If there are none, it counts with the duration that the
    policy predicts, times how much longer than predicted the compared steps took. Such steps can lose, but save no more
    than they lost: else a policy that predicts too little would be believed most of the time.

    Not counted are steps that compute a prompt, and those with a request that samples with a seed of its own, which
    always gets all its drafts.
    """

    policy: DraftPolicy
    plain_times: PlainTimes
    """What steps without drafts take. The policy keeps it."""
    _exceeded: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=COMPARED_KEPT))
    """What the latest compared steps with drafts took, over what the policy predicted."""
    _usually_exceeded: float = field(init=False, default=1.0)
    """The median of `_exceeded`. It is asked for more often than it changes."""
    _requests: Sequence[Request] = field(init=False, default=())
    """Those of the latest plan."""
    _seeded: Sequence[bool] = field(init=False, default=())
    """Which of them sample with a seed of their own."""
    _saved: float = field(init=False, default=0.0)
    """Seconds."""
    _most: float = field(init=False, default=0.0)
    """What `_saved` was after the latest step that was compared or went without drafts. The others do not raise it."""
    _plain: float = field(init=False, default=0.0)
    """Seconds of a step with the same requests, without drafts; 0 before that was measured."""
    _accepted: int = field(init=False, default=0)
    """Drafts accepted in this step."""
    _drafted: float = field(init=False, default=0.0)
    """How long steps with drafts took since some went without, in steps without."""
    _plain_after: int = field(init=False, default=FIRST_PLAIN)
    """How long until the next steps without."""
    _compared_left: int = field(init=False, default=0)
    """Steps without drafts that are left of those to be compared."""
    _rests: bool = field(init=False, default=False)
    """Whether drafting rests until the loss is paid back."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`. A request that samples with a seed of its own always gets all its drafts."""
        self._accepted = 0
        self._plain = self.plain_times.seconds(len(requests), sum(r.num_tokens for r in requests)) or 0.0
        if self._requests != requests:
            if not set(requests) <= set(self._requests):
                self.plain_times.other_work()
                self._saved = self._most = min(self._saved, SAVED_BY_OTHERS * self._plain)
            self._requests = list(requests)
            self._seeded = [request.samples_with_own_seed for request in requests]
        if self._rests or self._saved < -MOST_LOST * self._plain:
            self._rests = self._saved < 0
        if not self._rests and self._drafted >= self._plain_after:
            self._drafted, self._compared_left = 0.0, PLAIN_STEPS
            self._plain_after = min(2 * self._plain_after, PLAIN_EVERY)
        any_seeded = any(self._seeded)
        if not self._rests and (any_seeded or not self._compared_left):
            return self.policy.plan(requests, num_rows)
        if any_seeded:
            plan = self.policy.plan(requests, num_rows)
            num_drafts = [n * own for n, own in zip(plan.num_drafts, self._seeded, strict=True)]
            return replace(plan, num_drafts=num_drafts, reason="loss")
        # The last steps of a rest are told one by one: the drafts behind them are compared with them.
        left = 0 if self._compared_left else round(-self._saved / self._plain / LOSS_SHARE)
        reason: DraftReason = "loss" if self._rests else "compared"
        return DraftPlan([0] * len(requests), num_steps=max(1, left - PLAIN_STEPS), reason=reason)

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        self._add_saved(LOSS_SHARE * self._plain * num_steps)
        self.policy.plan_held(0 if self._rests else num_steps)

    def _add_saved(self, saved: float, is_compared: bool = True) -> None:
        most = MOST_SAVED * self._plain if is_compared else self._most
        self._saved = min(self._saved + max(saved, -MOST_LOST * self._plain), most)
        if is_compared:
            self._most = self._saved

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self._accepted += num_accepted
        self.policy.judged(request, num_asked, num_drafts, num_accepted)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        self.policy.step_finished(drafts, num_rows, num_context, seconds)
        num_requests = num_rows - sum(drafts.values())
        if not drafts:
            self._add_saved(LOSS_SHARE * self._plain)
            self._compared_left = max(0, self._compared_left - 1)
            return
        self._drafted += max(1.0, seconds / self._plain) if self._plain else 1.0
        if not self._plain or any(self._seeded):
            return
        predicted = 1 + self.policy.added_seconds(drafts, num_rows, num_context) / self._plain
        ratio = self.plain_times.ratio(num_requests, num_context, seconds)
        gained = 1 + self._accepted / num_requests
        if ratio is not None:
            self._exceeded.append(ratio / predicted)
            self._usually_exceeded = statistics.median_low(self._exceeded)
            ratio = min(ratio, LARGEST_CHANGE * self._usually_exceeded * predicted)
            self._add_saved((gained - ratio) * self._plain)
        elif self._exceeded:
            self._add_saved((gained - self._usually_exceeded * predicted) * self._plain, is_compared=False)

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        return self.policy.added_seconds(drafts, num_rows, num_context)

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        more_without = self._rests or self._compared_left > 1
        if more_without and not any(request.samples_with_own_seed for request in requests):
            return False
        return self.policy.may_draft_next(requests)
