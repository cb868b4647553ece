"""How many drafts each request gets in a step, decided before they are drawn: so the output stays exact.

`FixedDrafts` gives every request the same number. `AdaptiveDrafts` gives as many as pay: a draft is worth the
probability that it and all drafts before it are accepted, and costs what another row of the forward costs. So it drafts
a lot where text repeats, a little where the draft model is often wrong, and not at all where verifying costs more than
it saves: a small model in INT8 on a CPU, or a large batch. vLLM's adaptive verification decides in a similar way how
many of the drafts already made are verified.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from minillm.request import Request
from minillm.speculative.step_costs import COMPARED_STEPS, SETTLING_STEPS, DraftingOverhead, StepCosts

MIN_GAIN = 1.05
"""Speed-up, as predicted, below which nothing is drafted: a smaller gain is within the error of a prediction."""
PLAN_STEPS, IDLE_PLAN_STEPS = COMPARED_STEPS, 64
"""Steps that a decision holds for while the same requests decode: if it is to draft, and at most if it is not.
Acceptance changes slowly, and deciding takes time."""
PLAIN_STEPS = COMPARED_STEPS
"""So many steps go without drafts now and then, so that both are known under the same conditions."""
BEFORE_DECISION = COMPARED_STEPS + SETTLING_STEPS
"""For so many steps before its next decision, a policy that drafts nothing is asked in every step and told about it, so
that a try is compared with the steps just before."""
FIRST_PLAIN, PLAIN_EVERY = 8, 128
"""Steps with drafts before the next `PLAIN_STEPS` steps without: 8 at first, doubled each time up to 128."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 2048
"""Least and most steps without any drafts before one request tries again. Every other try drafts the full length,
because one draft says nothing about later positions. Each try in which something was drafted doubles the pause before
the next; a decision to draft resets it. If no draft was judged yet, the first try is at once."""
TRIES_SHARE = 0.02
"""What a try may cost, as a share of the time that then passes before the next."""
TREE_GAIN = 2.0
"""Accepted drafts of a tree, before any was judged."""
PRIOR_WEIGHT = 4.0
"""How many of a request's own drafts at a position weigh as much as what is known from all requests."""


@dataclass(frozen=True)
class DraftPlan:
    """The decision of one step."""

    num_drafts: list[int]
    """Most drafts of each request."""
    survival: list[list[float]] = field(default_factory=list)
    """Per request, by position: the estimated probability that this draft and all before it are accepted."""
    speedups: list[float] = field(default_factory=list)
    """`speedups[m]`: predicted tokens per second with the m most promising drafts of all requests, as a multiple of
    plain decoding. Empty: nothing was predicted."""
    num_steps: int = 1
    """Steps that it holds for while the same requests decode and no other comes. More than one only without drafts."""


class DraftPolicy(Protocol):
    """Decides the number of drafts."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide for the decoding `requests`. `num_rows`: tokens of the step without any drafts, prefills included."""

    def plan_held(self, num_steps: int) -> None:
        """Called when a plan to draft nothing ends that has held for so many steps without another call of `plan`."""

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Called with each verdict on at least one draft."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """Called after each step for which `plan` was called, that computed no prompt, and that either has drafts or
        was not to have any: others take longer for other reasons.

        `drafts`: the number of drafts of the requests that had any; `num_rows`: all rows of the forward; `num_context`:
        tokens that its requests had in the cache; `seconds`: of the whole step."""

    def drafting_seconds(self, drafts: Mapping[Request, int]) -> float:
        """What drafting so many tokens, at least one, for each of at least one request should take; 0 if unknown."""

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """Whether the next step may have drafts for one of the `requests` of this one. If not, the drafter is not
        shown what this step leaves."""


@dataclass(frozen=True)
class FixedDrafts:
    """The same number for every request."""

    num_drafts: int

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        return DraftPlan([self.num_drafts] * len(requests))

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""

    def drafting_seconds(self, drafts: Mapping[Request, int]) -> float:
        """See `DraftPolicy.drafting_seconds`."""
        return 0.0

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return True


@dataclass
class Acceptance:
    """How often drafts at each position were accepted, given that all before them were; older rounds count less."""

    accepted: list[float]
    judged: list[float]

    @classmethod
    def prior(cls, num_positions: int, rate: float, weight: float) -> Acceptance:
        """What is believed before anything was judged: `weight` drafts at each position, of which `rate` accepted."""
        return cls([rate * weight] * num_positions, [weight] * num_positions)

    def add(self, num_drafts: int, num_accepted: int, memory: float) -> None:
        """Count one round. `memory`: the weight of earlier rounds, below 1."""
        for i in range(min(num_drafts, num_accepted + 1)):
            self.judged[i] = memory * self.judged[i] + 1
            self.accepted[i] = memory * self.accepted[i] + (i < num_accepted)


@dataclass
class AdaptiveDrafts:
    """As many drafts as raise the predicted number of tokens per second.

        tokens  =  requests + the sum of the chosen drafts' survival probabilities
        seconds =  drafting + one forward with a row for each request and each chosen draft

    Survival is estimated per request and position from its own verdicts and, while there are few, from those of all
    requests. Costs are measured (`StepCosts`), and corrected by how much more drafts turn out to add to a step
    (`DraftingOverhead`). A request that samples with a seed of its own gets all drafts, because the number of drafts
    changes which random numbers choose a token, and its text should not depend on the speed of the machine.
    """

    max_drafts: int
    costs: StepCosts
    drafts_trees: bool = False
    """Whether drafts come as trees: then all of them or none, worth the usual number of accepted ones."""
    memory: float = 0.97
    """Weight of a request's earlier rounds against the next; of all requests together the square root of it."""
    _all: Acceptance = field(init=False)
    _own: WeakKeyDictionary[Request, Acceptance] = field(init=False, default_factory=WeakKeyDictionary)
    _work: tuple[int, list[Request]] = field(init=False, default=(0, []))
    """What the latest decision was for: rows and requests. It holds for `_steps_left` more steps of the same work."""
    _counts: list[int] = field(init=False, default_factory=list)
    """What was decided, without regard to requests with a seed of their own."""
    _steps_left: int = field(init=False, default=0)
    _overhead: DraftingOverhead = field(init=False, default_factory=DraftingOverhead)
    _drafted_steps: int = field(init=False, default=0)
    """Steps with drafts since it was decided to go without."""
    _plain_after: int = field(init=False, default=FIRST_PLAIN)
    """Steps with drafts before some go without."""
    _plain_left: int = field(init=False, default=0)
    """Steps that still go without."""
    _idle_steps: int = field(init=False, default=0)
    """Steps since something was drafted."""
    _pause: int = field(init=False, default=0)
    """Idle steps before drafts are tried again."""
    _num_tries: int = field(init=False, default=0)
    _tried: list[tuple[int, int]] | None = field(init=False, default=None)
    """The drafts of each round of the latest try, and how many were accepted; None once that was looked at."""

    def __post_init__(self) -> None:
        rate = min(0.7, TREE_GAIN / self.max_drafts) if self.drafts_trees else 0.7
        self._all = Acceptance.prior(self.max_drafts, rate, weight=4)

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        if self._goes_without(requests):
            return DraftPlan([0] * len(requests))
        work = num_rows, list(requests)  # not their ids, which can be reused
        if self._steps_left and work == self._work:
            found = DraftPlan(self._counts)
        else:
            found = self._decide(requests, num_rows)
            self._work, self._counts = work, found.num_drafts
            until_try = min(max(1, self._pause - self._idle_steps), IDLE_PLAN_STEPS)
            self._steps_left = PLAN_STEPS if any(self._counts) else until_try
        self._steps_left -= 1
        if any(self._counts):
            self._idle_steps = 0
        else:
            self._idle_steps, self._drafted_steps = self._idle_steps + 1, 0
            if not self._overhead.compares and not any(request.samples_with_own_seed for request in requests):
                return replace(found, num_steps=max(1, self._steps_left + 1 - BEFORE_DECISION))
        return self._with_own_seeds(requests, found)

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        self._idle_steps += num_steps
        self._steps_left -= num_steps
        self._overhead.resume()

    def _goes_without(self, requests: Sequence[Request]) -> bool:
        """Whether this step is one of those that go without drafts now and then."""
        if any(request.samples_with_own_seed for request in requests):
            return False
        if self._drafted_steps >= self._plain_after:
            self._drafted_steps, self._plain_left = 0, PLAIN_STEPS
            self._plain_after = min(2 * self._plain_after, PLAIN_EVERY)
        if not self._plain_left:
            return False
        self._plain_left -= 1
        return True

    def _decide(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        survival = [self.survival(request) for request in requests]
        flat = np.array(survival).ravel()
        order = np.argsort(-flat, kind="stable")  # the most promising first; a request's own stay in order
        speedups = self._speedups(requests, flat[order], order % self.max_drafts, num_rows)
        best = int(speedups.argmax())
        if speedups[best] >= MIN_GAIN:
            self._pause, self._tried = FIRST_PAUSE, None
            counts = np.bincount(order[:best] // self.max_drafts, minlength=len(requests)).tolist()
        else:
            counts = [0] * len(requests)
            goes_on = self._latest_try_paid(requests, num_rows)
            if goes_on or self._idle_steps >= self._pause:
                index = int(order[0]) // self.max_drafts
                counts[index] = self._try(requests[index], requests, num_rows, goes_on)
        return DraftPlan(counts, survival, speedups.tolist())

    def _with_own_seeds(self, requests: Sequence[Request], plan: DraftPlan) -> DraftPlan:
        """`plan`, but all drafts for requests that sample with a seed of their own."""
        pairs = zip(requests, plan.num_drafts, strict=True)
        return replace(plan, num_drafts=[self.max_drafts if r.samples_with_own_seed else n for r, n in pairs])

    def _try(self, request: Request, requests: Sequence[Request], num_rows: int, goes_on: bool) -> int:
        """How many drafts `request` gets only to see whether they are accepted by now. `goes_on`: as many as before."""
        self._num_tries += not goes_on
        self._forget_half(request)
        count = self.max_drafts if self.drafts_trees or self._num_tries % 2 else 1
        extra = PLAN_STEPS * (self._step_ratio(1, count, requests, num_rows) - 1)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE, round(extra / TRIES_SHARE)), LONGEST_PAUSE)
        self._tried = []
        return count

    def _latest_try_paid(self, requests: Sequence[Request], num_rows: int) -> bool:
        """Whether all `requests` would gain from drafts that are accepted as often as those of the try that has just
        ended: then the next one follows at once. A try is judged only once."""
        tried, self._tried = self._tried, None
        if not tried:
            if tried is not None:  # the drafter found nothing to draft
                self._pause = max(FIRST_PAUSE, self._pause // 2)
            return False
        count = max(num_drafts for num_drafts, _ in tried)
        gained = 1 + statistics.mean(accepted for _, accepted in tried)
        return gained > MIN_GAIN * self._step_ratio(len(requests), count, requests, num_rows)

    def _step_ratio(self, drafting: int, count: int, requests: Sequence[Request], num_rows: int) -> float:
        """What a step takes in which so many of `requests` have `count` drafts each, in steps without drafts."""
        context = sum(request.num_tokens for request in requests)
        plain = self.costs.target(num_rows, context)
        drafted = self.costs.draft(drafting, count) + self.costs.target(num_rows + drafting * count, context)
        return 1 + self._overhead.ratio * (drafted / plain - 1)

    def _forget_half(self, request: Request) -> None:
        """Let the next verdicts on drafts of `request` weigh more than those so far."""
        for seen in (self._all, self._own.get(request)):
            for i, judged in enumerate(seen.judged if seen is not None else ()):
                if judged > 1:  # a position that is never judged must not fade to 0 / 0
                    seen.judged[i], seen.accepted[i] = judged / 2, seen.accepted[i] / 2

    def judged(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self._pause = max(self._pause, FIRST_PAUSE)
        if self._tried is not None:
            self._tried.append((num_drafts, num_accepted))
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = Acceptance.prior(self.max_drafts, 0, 0)
        if self.drafts_trees:  # a node's place in the tree says nothing; what a whole tree usually gains does
            share = num_accepted / self.max_drafts
            for seen, memory in ((own, self.memory), (self._all, self.memory**0.5)):
                seen.judged[0] = memory * seen.judged[0] + 1
                seen.accepted[0] = memory * seen.accepted[0] + share
            return
        own.add(num_drafts, num_accepted, self.memory)
        self._all.add(num_drafts, num_accepted, self.memory**0.5)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        plain, extra = self.costs.target(num_rows - sum(drafts.values()), num_context), 0.0
        if drafts:
            extra = self.drafting_seconds(drafts) + self.costs.target(num_rows, num_context) - plain
        self._overhead.add(bool(drafts), seconds, plain, extra)
        self._drafted_steps += bool(drafts)

    def drafting_seconds(self, drafts: Mapping[Request, int]) -> float:
        """See `DraftPolicy.drafting_seconds`."""
        return self.costs.draft(len(drafts), max(drafts.values()))

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return any(self._counts) or not self._steps_left or any(r.samples_with_own_seed for r in requests)

    def survival(self, request: Request) -> list[float]:
        """The estimated probability, by position, that a draft of `request` and all before it are accepted."""
        own, every = self._own.get(request), self._all
        chances, product = [], 1.0
        for i in range(self.max_drafts):
            rate = every.accepted[i] / every.judged[i]
            if own is not None:
                rate = (PRIOR_WEIGHT * rate + own.accepted[i]) / (PRIOR_WEIGHT + own.judged[i])
            if self.drafts_trees:
                return [rate] * self.max_drafts
            product *= rate
            chances.append(product)
        return chances

    def _speedups(
        self, requests: Sequence[Request], survival: np.ndarray, position: np.ndarray, num_rows: int
    ) -> np.ndarray:
        """See `DraftPlan.speedups`. `survival` and `position`: of each draft of all requests, in the order in which
        they are chosen."""
        context = sum(request.num_tokens for request in requests)
        num_drafts = np.arange(1, len(survival) + 1)
        tokens = len(requests) + survival.cumsum()
        drafting = self.costs.draft((position == 0).cumsum(), np.maximum.accumulate(position + 1))
        plain = self.costs.target(num_rows, context)
        extra = drafting + self.costs.target(num_rows + num_drafts, context) - plain
        found = tokens / len(requests) * plain / (plain + self._overhead.ratio * extra)
        if self.drafts_trees:
            found[num_drafts % self.max_drafts > 0] = 0.0
        return np.concatenate(([1.0], found))
