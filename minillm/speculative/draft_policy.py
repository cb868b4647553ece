"""How many drafts each request gets in a step, decided before they are drawn: so the output stays exact.

`FixedDrafts` gives every request the same number. `AdaptiveDrafts` gives as many as pay: a draft is worth the
probability that it and all drafts before it are accepted, and costs what another row of the forward costs. So it drafts
a lot where text repeats, a little where the draft model is often wrong, and not at all where verifying costs more than
it saves: a small model in INT8 on a CPU, or a large batch. vLLM's adaptive verification decides in a similar way how
many of the drafts already made are verified.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from minillm.request import Request
from minillm.speculative.step_costs import StepCosts
from minillm.speculative.step_times import DraftingOverhead, PlainTimes

MIN_GAIN = 1.05
"""Speed-up, as predicted, below which nothing is drafted: a smaller gain is within the error of a prediction."""
TRY_STEPS, PLAN_STEPS, IDLE_PLAN_STEPS = 6, 16, 64
"""Steps that a decision holds for while the same requests decode: to try drafts, to draft, and at most to draft
nothing. Acceptance changes slowly, and deciding takes time."""
BEFORE_DECISION = 8
"""For so many steps before its next decision, a policy that drafts nothing is asked in every step and told about it: so
it knows what steps take just before a try."""
SHORTEST_PAUSE, LONG_PAUSE = 32, 256
"""Steps without any drafts, at least, before one request tries again: 32 at first, twice as many after each try that
did not pay, up to 256. Texts change, so even a method that never paid is tried. If no draft was judged yet, the first
try is at once. A try has all drafts, because one says nothing about later positions; but where that would have to wait
for longer than `LONG_PAUSE`, only every other has, and the first has one."""
TRIES_SHARE = 0.01
"""What a try may lose, as predicted, as a share of the steps since the one before. Where it loses more, it waits for
longer."""
WITHOUT_DRAFTS = 0.997
"""What a step in which others have drafts leaves of what is known of a request that has none. So it is believed to be
like the others after some hundred steps, and gets drafts again: its text, too, may have changed."""
MANY_ROUNDS = 8
"""So many rounds and fewer are not forgotten before a try."""
LARGEST_WEIGHT = 1e100
"""Of a round, before all are scaled down."""
FIRST_RATE = 0.7
"""Share of first drafts that are accepted, before any was judged."""
TREE_GAIN = 2.0
"""Accepted drafts of a tree, before any was judged."""
PRIOR_WEIGHT = 4.0
"""How many rounds weigh as much as what is believed before them: of a request what is known from all, of all what is
known from the position before."""


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


class DraftPolicy(Protocol):
    """Decides the number of drafts."""

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide for the decoding `requests`. `num_rows`: tokens of the step without any drafts, prefills included."""

    def plan_held(self, num_steps: int) -> None:
        """Called when a plan to draft nothing ends that has held for so many steps without another call of `plan`."""

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """Called with each verdict on at least one draft. `num_asked`: the most drafts that there could have been."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """Called after each step for which `plan` was called, that computed no prompt, and that either has drafts or
        was not to have any: others take longer for other reasons.

        `drafts`: the number of drafts of the requests that had any; `num_rows`: all rows of the forward; `num_context`:
        tokens that its requests had in the cache; `seconds`: of the whole step."""

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """What so many drafts of each request should have added to a step, `num_rows` and `num_context` as in
        `step_finished`; 0 if unknown."""

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

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        return 0.0

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return True


class Acceptance:
    """How far drafts reach, of the rounds that have any; older rounds count less.

    A drafter may make fewer drafts than it was asked for: a lookup does where it finds a short or doubtful match. So a
    position counts only in rounds that asked for it. If none did lately, what is known of it gets old.
    """

    def __init__(self, num_positions: int, memory: float) -> None:
        """`memory`: the weight of a round against the next, below 1."""
        self.memory = memory
        self.asked, self.made = [0.0] * num_positions, [0.0] * num_positions
        """By position: the rounds that asked for a draft there, and those that had one."""
        self.reached, self.accepted = [0.0] * num_positions, [0.0] * num_positions
        """The rounds that asked for a draft there and in which all before it were accepted, and those in which there
        was one that was accepted, too."""
        self._weight = 1.0
        """Of the latest round. It grows, which is the same as if those before it faded."""

    def add(self, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """Count one round."""
        weight = self._next_weight()
        for i in range(num_asked):
            self.asked[i] += weight
        for i in range(num_drafts):
            self.made[i] += weight
        for i in range(min(num_asked, num_accepted + 1)):
            self.reached[i] += weight
        for i in range(num_accepted):
            self.accepted[i] += weight

    def add_tree(self, size: float, share: float) -> None:
        """Count one round with a tree. `size` and `share`: its drafts and the accepted ones, of the most that there can
        be."""
        weight = self._next_weight()
        self.asked[0] += weight
        self.made[0] += weight * size
        self.reached[0] += weight
        self.accepted[0] += weight * share

    def fade(self, share: float) -> None:
        """Let the rounds so far count so much less."""
        self._scale(share)

    def forget_half(self) -> None:
        """Let the rounds so far count half as much, if there are many: a drafter that finds nothing adds none, and what
        is known of it must not fade."""
        if self.reached[0] > MANY_ROUNDS * self._weight:
            self._scale(0.5)

    def rates(self, usual: Sequence[float] | float) -> list[float]:
        """By position: the share of rounds with an accepted draft there, of those with all before it accepted. `usual`:
        what is believed before any round, as in `_estimates`."""
        return self._estimates(self.accepted, self.reached, usual)

    def shares_made(self, usual: Sequence[float] | float) -> list[float]:
        """By position: the share of rounds with a draft there."""
        return self._estimates(self.made, self.asked, usual)

    def _estimates(
        self, happened: Sequence[float], rounds: Sequence[float], usual: Sequence[float] | float
    ) -> list[float]:
        """Quotients by position. What is believed before any round weighs as much as `PRIOR_WEIGHT` rounds: `usual` by
        position or, if it is one number, of the first; then a position is believed to be like the one before it."""
        prior, found = PRIOR_WEIGHT * self._weight, []
        belief = usual if isinstance(usual, float) else 0.0
        for i, (some, total) in enumerate(zip(happened, rounds, strict=True)):
            if not isinstance(usual, float):
                belief = usual[i]
            belief = (prior * belief + some) / (prior + total)
            found.append(belief)
        return found

    def _next_weight(self) -> float:
        self._weight /= self.memory
        if self._weight > LARGEST_WEIGHT:
            self._scale(1 / self._weight)
            self._weight = 1.0
        return self._weight

    def _scale(self, factor: float) -> None:
        for values in (self.asked, self.made, self.reached, self.accepted):
            values[:] = [factor * value for value in values]


class Candidate(NamedTuple):
    """A draft that could be asked for."""

    survival: float
    """The probability that it is made and accepted."""
    made: float
    """The probability that it is made, and adds a row to the forward."""
    request: int
    """Which request it is of."""
    position: int


@dataclass
class AdaptiveDrafts:
    """As many drafts as raise the predicted number of tokens per second.

        tokens  =  requests + the sum of the chosen drafts' survival probabilities
        seconds =  drafting + one forward with a row for each request and each chosen draft that will be made

    How many are made and survive is estimated per request and position from its own rounds and, while there are few,
    from those of all requests. Costs are measured (`StepCosts`), and corrected by how much more drafts turn out to add
    to a step (`DraftingOverhead`). A request that samples with a seed of its own gets all drafts for which a step has
    room, because the number of drafts changes which random numbers choose a token, and its text should not depend on
    the speed of the machine.
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
    _held: DraftPlan = field(init=False, default_factory=lambda: DraftPlan([]))
    """What was decided, for the steps after the first."""
    _drafts: bool = field(init=False, default=False)
    """Whether it gives drafts to any request, without regard to those with a seed of their own."""
    _has_own_seeds: bool = field(init=False, default=False)
    """Whether any of its requests has one."""
    _steps_left: int = field(init=False, default=0)
    _steps_since_decision: int = field(init=False, default=0)
    """Steps that the latest decision has held for, without those for which `plan` was not called."""
    plain_times: PlainTimes = field(init=False)
    _overhead: DraftingOverhead = field(init=False, default_factory=DraftingOverhead)
    _has_first_drafts: bool = field(init=False, default=False)
    """Whether this step had the first drafts of a request. It is not counted: the drafter reads the prompt in it."""
    _idle_steps: int = field(init=False, default=0)
    """Steps since something was drafted."""
    _pause: int = field(init=False, default=0)
    """Idle steps before drafts are tried again."""
    _latest_try: int = field(init=False)
    """How many drafts the latest try had; all, if drafts have paid since."""
    _least_pause: int = field(init=False, default=SHORTEST_PAUSE)
    """What the next pause takes at least."""
    _tried: list[tuple[int, int]] | None = field(init=False, default=None)
    """The drafts of each round of the latest try, and how many were accepted; None once that was looked at."""
    _found_nothing: bool = field(init=False, default=False)
    """Whether the drafter had no draft in the latest try, which therefore cost next to nothing."""

    def __post_init__(self) -> None:
        self._all, self._latest_try = Acceptance(self.max_drafts, self.memory**0.5), self.max_drafts
        self.plain_times = PlainTimes(self.costs)

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        self._has_first_drafts = False
        if self._steps_left and self._work == (num_rows, requests):
            found = self._held
        else:
            found = self._new_plan(requests, num_rows)
        self._steps_left -= 1
        self._steps_since_decision += 1
        if self._drafts:
            self._idle_steps = 0
            return found
        self._idle_steps += 1
        if self._has_own_seeds or self._steps_left < BEFORE_DECISION:
            return found
        return replace(found, num_steps=self._steps_left + 1 - BEFORE_DECISION)

    def _new_plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide, and for how many steps."""
        found = self._decide(requests, num_rows)
        self._drafts = any(found.num_drafts)
        self._steps_since_decision = 0
        self._work = num_rows, list(requests)  # not their ids, used again later
        until_try = min(max(1, self._pause - self._idle_steps), IDLE_PLAN_STEPS)
        tries = self._tried is not None
        self._steps_left = (TRY_STEPS if tries else PLAN_STEPS) if self._drafts else until_try
        self._has_own_seeds = any(request.samples_with_own_seed for request in requests)
        if self._has_own_seeds:
            found = self._with_own_seeds(requests, found)
        self._held = DraftPlan(found.num_drafts)
        return found

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        self._idle_steps += num_steps
        self._steps_left -= num_steps

    def _decide(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        survival = [self.survival(request) for request in requests]
        drafts = [
            Candidate(chance, made, index, position)
            for index, request in enumerate(requests)
            for position, (chance, made) in enumerate(zip(survival[index], self._made(request), strict=True))
        ]
        drafts.sort(key=lambda draft: -draft.survival)  # the most promising first; a request's own stay in order
        speedups = self._speedups(requests, drafts, num_rows)
        best = max(range(len(speedups)), key=speedups.__getitem__)
        counts = [0] * len(requests)
        if speedups[best] >= MIN_GAIN:
            self._tried, self._latest_try, self._least_pause = None, self.max_drafts, SHORTEST_PAUSE
            for draft in drafts[:best]:
                counts[draft.request] += 1
            for request, count in zip(requests, counts, strict=True):
                if not count and (own := self._own.get(request)):
                    own.fade(WITHOUT_DRAFTS**self._steps_since_decision)
        else:
            goes_on = self._latest_try_paid(requests, num_rows)
            index = next((d.request for d in drafts if not requests[d.request].samples_with_own_seed), None)
            if index is not None:
                count = self._latest_try
                if not goes_on:
                    count, self._pause = self._next_try(requests[index], requests, num_rows)
                if goes_on or self._idle_steps >= self._pause:
                    counts[index] = self._latest_try = count
                    self._tried = []
                    self._forget_half(requests[index])
        return DraftPlan(counts, survival, speedups)

    def _with_own_seeds(self, requests: Sequence[Request], plan: DraftPlan) -> DraftPlan:
        """`plan`, but all drafts for requests that sample with a seed of their own."""
        pairs = zip(requests, plan.num_drafts, strict=True)
        return replace(plan, num_drafts=[self.max_drafts if r.samples_with_own_seed else n for r, n in pairs])

    def _next_try(self, request: Request, requests: Sequence[Request], num_rows: int) -> tuple[int, int]:
        """How many drafts `request` gets in the next try, and the pause before it."""
        pause = self._pause_before(self.max_drafts, request, requests, num_rows)
        if self.drafts_trees or self._latest_try == 1 or pause <= LONG_PAUSE:
            return self.max_drafts, pause
        return 1, self._pause_before(1, request, requests, num_rows)

    def _pause_before(self, count: int, request: Request, requests: Sequence[Request], num_rows: int) -> int:
        """How many steps without drafts there must be before a try with `count` drafts for `request`."""
        if not self._all.asked[0]:
            return 0
        if self._found_nothing:
            return SHORTEST_PAUSE
        gained = 1 + sum(self.survival(request)[:count]) / len(requests)
        lost = TRY_STEPS * (self._step_ratio(1, count, requests, num_rows) - gained)
        return max(self._least_pause, round(lost / TRIES_SHARE))

    def _latest_try_paid(self, requests: Sequence[Request], num_rows: int) -> bool:
        """Whether all `requests` would gain from drafts that are accepted as often as those of the try that has just
        ended: then the next one follows at once. A try is judged only once."""
        tried, self._tried = self._tried, None
        if tried is not None:
            self._found_nothing = not tried
        if not tried:
            return False
        count, accepted = (statistics.mean(column) for column in zip(*tried, strict=True))
        paid = 1 + accepted > MIN_GAIN * self._step_ratio(len(requests), count, requests, num_rows)
        if not paid:
            self._least_pause = min(2 * self._least_pause, LONG_PAUSE)
        return paid

    def _step_ratio(self, drafting: int, count: float, requests: Sequence[Request], num_rows: int) -> float:
        """What a step takes in which so many of `requests` have `count` drafts each, on average, in steps without."""
        context = sum(request.num_tokens for request in requests)
        plain = self.costs.target(num_rows, context)
        drafted = self.costs.drafted(num_rows, len(requests), context, drafting, count, drafting * count)
        return 1 + self._overhead.added(drafted / plain - 1)

    def _forget_half(self, request: Request) -> None:
        """Let the next verdicts on drafts of `request` weigh more than those so far."""
        for seen in (self._all, self._own.get(request)):
            if seen is not None:
                seen.forget_half()
        self._overhead.forget_half()

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self._found_nothing = False
        if self._tried is not None:
            self._tried.append((num_drafts, num_accepted))
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = Acceptance(self.max_drafts, self.memory)
            self._has_first_drafts = True
        for seen in (own, self._all):
            if self.drafts_trees:  # a node's place in the tree says nothing; what a whole tree usually gains does
                seen.add_tree(num_drafts / self.max_drafts, num_accepted / self.max_drafts)
            else:
                seen.add(num_asked, num_drafts, num_accepted)

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        num_requests = num_rows - sum(drafts.values())
        if not drafts:
            self.plain_times.add(num_requests, num_context, seconds)
            return
        self.plain_times.other_work()
        ratio = self.plain_times.ratio(num_requests, num_context, seconds)
        if ratio is not None and not self._has_first_drafts:
            self._overhead.add(ratio - 1, self._expected(drafts, num_requests, num_context))

    def added_seconds(self, drafts: Mapping[Request, int], num_rows: int, num_context: int) -> float:
        """See `DraftPolicy.added_seconds`."""
        if not drafts:
            return 0.0
        num_requests = num_rows - sum(drafts.values())
        plain = self.plain_times.seconds(num_requests, num_context) or self.costs.target(num_requests, num_context)
        return plain * self._overhead.added(self._expected(drafts, num_requests, num_context))

    def _expected(self, drafts: Mapping[Request, int], num_requests: int, num_context: int) -> float:
        """By `costs` alone: what `drafts` add to a step, as a share of one without."""
        each = drafts.values()
        drafted = self.costs.drafted(num_requests, num_requests, num_context, len(drafts), max(each), sum(each))
        return drafted / self.costs.target(num_requests, num_context) - 1

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return self._drafts or not self._steps_left or any(r.samples_with_own_seed for r in requests)

    def survival(self, request: Request) -> list[float]:
        """The estimated probability, by position, that there is a draft of `request` and it and all before it are
        accepted, in a round that has any drafts."""
        own = self._own.get(request)
        usual = self._all.rates(min(FIRST_RATE, TREE_GAIN / self.max_drafts) if self.drafts_trees else FIRST_RATE)
        rates = usual if own is None else own.rates(usual)
        return rates[:1] * self.max_drafts if self.drafts_trees else list(accumulate(rates, operator.mul))

    def _made(self, request: Request) -> list[float]:
        """The estimated probability, by position, that there is a draft of `request`, in a round that has any."""
        own, usual = self._own.get(request), self._all.shares_made(1.0)
        shares = usual if own is None else own.shares_made(usual)
        return shares[:1] * self.max_drafts if self.drafts_trees else shares

    def _speedups(self, requests: Sequence[Request], drafts: Sequence[Candidate], num_rows: int) -> list[float]:
        """See `DraftPlan.speedups`. `drafts`: in the order in which they are chosen."""
        context = sum(request.num_tokens for request in requests)
        plain = self.costs.target(num_rows, context)
        tokens, extra, drafting, longest = float(len(requests)), 0.0, 0, 0
        found = [1.0]
        for draft in drafts:
            tokens += draft.survival
            extra += draft.made
            drafting += draft.position == 0
            longest = max(longest, draft.position + 1)
            drafted = self.costs.drafted(num_rows, len(requests), context, drafting, longest, extra)
            found.append(tokens / len(requests) / (1 + self._overhead.added(drafted / plain - 1)))
        if self.drafts_trees:
            found = [speedup if i % self.max_drafts == 0 else 0.0 for i, speedup in enumerate(found)]
        return found
