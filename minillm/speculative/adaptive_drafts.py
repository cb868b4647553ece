"""As many drafts as pay.

A draft is worth the probability that it and all drafts before it are accepted, and costs what another row of the
forward costs. So `AdaptiveDrafts` drafts a lot where text repeats, a little where the draft model is often wrong, and
not at all where verifying costs more than it saves: a small model in INT8 on a CPU, or a large batch. vLLM's adaptive
verification decides in a similar way how many of the drafts already made are verified.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

from minillm.request import Request
from minillm.speculative.acceptance_history import AcceptanceHistory
from minillm.speculative.draft_policy import DraftPlan, DraftPolicy
from minillm.speculative.step_costs import StepCosts
from minillm.speculative.step_times import DraftingOverhead, PlainTimes

MIN_GAIN = 1.05
"""Speed-up, as predicted, below which nothing is drafted: a smaller gain is within the error of a prediction."""
TRY_STEPS, PLAN_STEPS, IDLE_PLAN_STEPS = 6, 16, 64
"""Steps that a decision holds for while the same requests decode: to try drafts, to draft, and at most to draft
nothing. Acceptance changes slowly, and deciding takes time."""
BEFORE_DECISION = 8
"""In the last 8 steps before its next decision the policy sees every step, so its plain step time is recent."""
SHORTEST_PAUSE, LONG_PAUSE = 32, 256
"""Steps without any drafts, at least, before one request tries again: 32 at first, twice as many after each try that
did not pay, up to 256. Texts change, so even a method that never paid is tried. If no draft was judged yet, the first
try is at once. A try has all drafts, because one says nothing about later positions; but where that would have to wait
for longer than `LONG_PAUSE`, only every other has, and the first has one."""
TRIES_SHARE = 0.01
"""What a try may lose, as predicted, as a share of the steps since the one before. Where it loses more, it waits for
longer."""
WITHOUT_DRAFTS = 0.997
"""Factor on a request's acceptance history for each step in which it has no drafts and others do. So it is believed to
be like the others after some hundred steps, and gets drafts again: its text, too, may have changed."""
FIRST_RATE = 0.7
"""Share of first drafts that are accepted, before any was judged."""
TREE_GAIN = 2.0
"""Accepted drafts of a tree, before any was judged."""


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
class Trials:
    """When drafts are tried that are not predicted to pay, and how many. See `SHORTEST_PAUSE` and `TRIES_SHARE`."""

    max_drafts: int
    always_all: bool
    """Whether a try always has all drafts."""
    idle_steps: int = 0
    """Steps since something was drafted."""
    pause: int = 0
    """Idle steps before drafts are tried again."""
    latest_size: int = field(init=False)
    """How many drafts the latest try had; all, if drafts have paid since."""
    _least_pause: int = field(init=False, default=SHORTEST_PAUSE)
    """What the next pause takes at least."""
    _rounds: list[tuple[int, int]] | None = field(init=False, default=None)
    """The drafts of each round of the latest try that counts, and how many were accepted; None once that was looked
    at."""
    _found_nothing: bool = field(init=False, default=False)
    """Whether no round of the latest try counts: the drafter had no draft, which cost next to nothing."""

    def __post_init__(self) -> None:
        self.latest_size = self.max_drafts

    @property
    def is_running(self) -> bool:
        """Whether a try has begun that was not looked at yet."""
        return self._rounds is not None

    def begin(self, size: int) -> None:
        """A try with `size` drafts begins."""
        self.latest_size, self._rounds = size, []

    def drafts_pay(self) -> None:
        """Called when drafts are predicted to pay: the next try will be like the first."""
        self._rounds, self.latest_size, self._least_pause = None, self.max_drafts, SHORTEST_PAUSE

    def judged(self, num_drafts: int, num_accepted: int) -> None:
        """Called with each round that counts."""
        self._found_nothing = False
        if self._rounds is not None:
            self._rounds.append((num_drafts, num_accepted))

    def latest_paid(self, step_ratio: Callable[[float], float]) -> bool:
        """Whether all requests would gain from drafts that are accepted as often as those of the try that has just
        ended: then the next one follows at once. A try is judged only once. `step_ratio`: what a step takes in which
        each has so many drafts, in steps without."""
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            self._found_nothing = not rounds
        if not rounds:
            return False
        count, accepted = (statistics.mean(column) for column in zip(*rounds, strict=True))
        paid = 1 + accepted > MIN_GAIN * step_ratio(count)
        if not paid:
            self._least_pause = min(2 * self._least_pause, LONG_PAUSE)
        return paid

    def next_size(self, lost_by: Callable[[int], float] | None) -> int:
        """How many drafts the next try has; sets the pause before it. `lost_by`: predicted steps that a try with so
        many drafts loses; None before any draft was judged."""
        self.pause = self._pause_before(self.max_drafts, lost_by)
        if self.always_all or self.latest_size == 1 or self.pause <= LONG_PAUSE:
            return self.max_drafts
        self.pause = self._pause_before(1, lost_by)
        return 1

    def _pause_before(self, size: int, lost_by: Callable[[int], float] | None) -> int:
        """How many steps without drafts there must be before a try with `size` drafts."""
        if lost_by is None:
            return 0
        if self._found_nothing:
            return SHORTEST_PAUSE
        return max(self._least_pause, round(lost_by(size) / TRIES_SHARE))


@dataclass
class AdaptiveDrafts(DraftPolicy):
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
    _all: AcceptanceHistory = field(init=False)
    _own: WeakKeyDictionary[Request, AcceptanceHistory] = field(init=False, default_factory=WeakKeyDictionary)
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
    _judged_at: WeakKeyDictionary[Request, int] = field(init=False, default_factory=WeakKeyDictionary)
    """How many tokens a request had after its latest verdict."""
    _catches_up: bool = field(init=False, default=False)
    """Whether this step had the first verdict on a request, the first after a preemption, or the first for
    `SHORTEST_PAUSE` tokens. It is not counted: the drafter may have read the prompt in it, or what it had missed."""
    _trials: Trials = field(init=False)

    def __post_init__(self) -> None:
        self._all = AcceptanceHistory(self.max_drafts, self.memory**0.5)
        self._trials = Trials(self.max_drafts, self.drafts_trees)
        self.plain_times = PlainTimes(self.costs)

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """See `DraftPolicy.plan`."""
        self._catches_up = False
        if self._steps_left and self._work == (num_rows, requests):
            found = self._held
        else:
            found = self._new_plan(requests, num_rows)
        self._steps_left -= 1
        self._steps_since_decision += 1
        if self._drafts:
            self._trials.idle_steps = 0
            return found
        self._trials.idle_steps += 1
        if self._has_own_seeds or self._steps_left < BEFORE_DECISION:
            return found
        return replace(found, num_steps=self._steps_left + 1 - BEFORE_DECISION)

    def _new_plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        """Decide, and for how many steps."""
        found = self._decide(requests, num_rows)
        self._drafts = any(found.num_drafts)
        self._steps_since_decision = 0
        self._work = num_rows, list(requests)  # not their ids, used again later
        until_try = min(max(1, self._trials.pause - self._trials.idle_steps), IDLE_PLAN_STEPS)
        self._steps_left = (TRY_STEPS if self._trials.is_running else PLAN_STEPS) if self._drafts else until_try
        self._has_own_seeds = any(request.samples_with_own_seed for request in requests)
        if self._has_own_seeds:
            found = self._with_own_seeds(requests, found)
        self._held = DraftPlan(found.num_drafts)
        return found

    def plan_held(self, num_steps: int) -> None:
        """See `DraftPolicy.plan_held`."""
        self._trials.idle_steps += num_steps
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
            self._trials.drafts_pay()
            for draft in drafts[:best]:
                counts[draft.request] += 1
            for request, count in zip(requests, counts, strict=True):
                if not count and (own := self._own.get(request)):
                    own.fade(WITHOUT_DRAFTS**self._steps_since_decision)
        else:
            goes_on = self._trials.latest_paid(lambda count: self._step_ratio(len(requests), count, requests, num_rows))
            index = next((d.request for d in drafts if not requests[d.request].samples_with_own_seed), None)
            if index is not None:
                size = self._trials.latest_size if goes_on else self._next_size(requests[index], requests, num_rows)
                if goes_on or self._trials.idle_steps >= self._trials.pause:
                    counts[index] = size
                    self._trials.begin(size)
                    self._forget_half(requests[index])
        return DraftPlan(counts, survival, speedups)

    def _with_own_seeds(self, requests: Sequence[Request], plan: DraftPlan) -> DraftPlan:
        """`plan`, but all drafts for requests that sample with a seed of their own."""
        pairs = zip(requests, plan.num_drafts, strict=True)
        return replace(plan, num_drafts=[self.max_drafts if r.samples_with_own_seed else n for r, n in pairs])

    def _next_size(self, request: Request, requests: Sequence[Request], num_rows: int) -> int:
        """How many drafts `request` gets in the next try."""

        def lost_by(size: int) -> float:
            gained = 1 + sum(self.survival(request)[:size]) / len(requests)
            return TRY_STEPS * (self._step_ratio(1, size, requests, num_rows) - gained)

        return self._trials.next_size(lost_by if self._all.asked[0] else None)

    def _step_ratio(self, drafting: int, count: float, requests: Sequence[Request], num_rows: int) -> float:
        """What a step takes in which so many of `requests` have `count` drafts each, on average, in steps without."""
        context = sum(request.num_tokens for request in requests)
        plain = self.costs.target(num_rows, context)
        drafted = self.costs.drafted(num_rows, len(requests), context, drafting, max(1, count), drafting * count)
        return 1 + self._overhead.added(drafted / plain - 1)

    def _forget_half(self, request: Request) -> None:
        """Let the next verdicts on drafts of `request` weigh more than those so far."""
        for seen in (self._all, self._own.get(request)):
            if seen is not None:
                seen.forget_half()
        self._overhead.forget_half()

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """See `DraftPolicy.judged`."""
        self._trials.judged(num_drafts, num_accepted)
        own = self._own.get(request)
        if own is None:
            own = self._own[request] = AcceptanceHistory(self.max_drafts, self.memory)
        before, self._judged_at[request] = self._judged_at.get(request, 0), request.num_tokens
        num_missed = request.num_tokens - num_accepted - 1 - before
        self._catches_up |= request.num_dropped_tokens >= before or num_missed >= SHORTEST_PAUSE
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
        if ratio is not None and not self._catches_up:
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
        longest, extra = max(1, *drafts.values()), sum(drafts.values())
        drafted = self.costs.drafted(num_requests, num_requests, num_context, len(drafts), longest, extra)
        return drafted / self.costs.target(num_requests, num_context) - 1

    def may_draft_next(self, requests: Sequence[Request]) -> bool:
        """See `DraftPolicy.may_draft_next`."""
        return self._drafts or not self._steps_left or any(r.samples_with_own_seed for r in requests)

    def survival(self, request: Request) -> list[float]:
        """The estimated probability, by position, that there is a draft of `request` and it and all before it are
        accepted, in a round that counts."""
        own = self._own.get(request)
        usual = self._all.rates(min(FIRST_RATE, TREE_GAIN / self.max_drafts) if self.drafts_trees else FIRST_RATE)
        rates = usual if own is None else own.rates(usual)
        return rates[:1] * self.max_drafts if self.drafts_trees else list(accumulate(rates, operator.mul))

    def _made(self, request: Request) -> list[float]:
        """The estimated probability, by position, that there is a draft of `request`, in a round that counts."""
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
