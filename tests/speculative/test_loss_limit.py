"""Drafting that costs more time than it saves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

import pytest

from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.speculative import step_times
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import DraftPlan, FixedDrafts
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.fallback_policy import FallbackDrafts
from minillm.speculative.loss_limit import (
    FIRST_PLAIN,
    LOSS_SHARE,
    MOST_LOST,
    MOST_SAVED,
    PLAIN_EVERY,
    PLAIN_STEPS,
    SAVED_BY_OTHERS,
    LossLimit,
)
from minillm.speculative.step_costs import StepCosts
from minillm.speculative.step_times import SETTLING_STEPS, PlainTimes
from tests.speculative.test_fallback_policy import Some


def a_request(name: str = "a", **params: object) -> Request:
    return Request(name, "", [1, 2, 3], 3, SamplingParams(**{"temperature": 0, **params}), 100, seed=0)


COSTS = StepCosts({n: float(n) for n in range(1, 65)})


class Always(FixedDrafts):
    """Fixed drafts, and what steps without take."""

    def __init__(self, num_drafts: int, costs: StepCosts) -> None:
        super().__init__(num_drafts)
        object.__setattr__(self, "plain_times", PlainTimes(costs))

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        if not drafts:
            self.plain_times.add(num_rows, num_context, seconds)


def limited(num_drafts: int = 4, costs: StepCosts = COSTS) -> LossLimit:
    """Around a policy that would always draft so many."""
    policy = Always(num_drafts, costs)
    return LossLimit(policy, policy.plain_times)


def test_now_and_then_a_step_goes_without_drafts() -> None:
    """Otherwise what steps without them take would be known from long ago only."""
    policy, request, counts = limited(), a_request(), []
    for _ in range(3 * PLAIN_EVERY + 80):
        counts += policy.plan([request], 1).num_drafts
        policy.step_finished({request: counts[-1]} if counts[-1] else {}, 1 + counts[-1], 3, 0.9 if counts[-1] else 1.0)
    runs = [(count > 0, len(list(run))) for count, run in groupby(counts)]
    drafted = [length for has_drafts, length in runs if has_drafts]
    assert drafted[:7] == [FIRST_PLAIN, 16, 32, 64, 128, 256, PLAIN_EVERY]
    assert {length for has_drafts, length in runs if not has_drafts} == {PLAIN_STEPS}


def test_steps_that_take_longer_are_compared_after_fewer() -> None:
    run = Run(limited())
    run.steps(6000, lambda: 4, 4.0)
    lengths = [len(list(steps)) for has_drafts, steps in groupby(run.drafts, key=bool) if has_drafts]
    assert lengths[:7] == [FIRST_PLAIN, 4, 8, 16, 32, 64, PLAIN_EVERY / 4]


def test_a_request_with_a_seed_of_its_own_always_gets_its_drafts() -> None:
    policy, seeded = limited(), a_request("seeded", temperature=1.0, seed=3)
    for _ in range(2 * PLAIN_EVERY):
        assert policy.plan([seeded], 1).num_drafts == [4]
        policy.step_finished({seeded: 4}, 5, 3, 1.0)
    assert policy.plan([a_request()], 1).num_drafts == [0]


def test_what_its_drafts_cost_is_not_booked() -> None:
    """Nobody else rests for it."""
    policy, seeded, others = limited(), a_request("seeded", temperature=1.0, seed=3), [a_request("one")]
    run = Run(policy)
    run.steps(20, lambda: 4, 2.0)  # so that it is known what steps without drafts take
    for _ in range(1000):
        assert policy.plan([seeded], 1).num_drafts == [4]
        policy.step_finished({seeded: 4}, 5, 3, 9.0)
    run.steps(100, lambda: 4, 2.0)
    assert sum(map(bool, run.drafts[-100:])) > 80
    run.steps(200, lambda: 0, 2.0)
    assert policy._rests and policy.plan([*others, seeded], 2).num_drafts == [0, 4]


def test_steps_of_a_rest_are_not_those_that_the_policy_planned() -> None:
    class Held(Always):
        def plan_held(self, num_steps: int) -> None:
            """See `DraftPolicy.plan_held`."""
            held.append(num_steps)

    held: list[int] = []
    own = Held(4, COSTS)
    policy = LossLimit(own, own.plain_times)
    run = Run(policy)
    policy.plan_held(3)
    while not policy._rests:
        run.steps(1, lambda: 0, 2.0)
    held_before = len(held)
    policy.plan_held(3)
    assert held[0] == 3 and held[held_before:] == [0]


def test_a_rest_ends_once_the_loss_is_paid_back() -> None:
    """Sixteen requests lose what is much for one, and are back before it is paid by one."""
    policy = limited(costs=StepCosts({1: 1.0, 16: 8.0, 256: 128.0}))
    run = Run(policy, lambda: 0.5)
    while not policy._rests:
        run.steps(1, lambda: 0, 2.0, num_requests=16)
    run.steps(10, lambda: 0, 1.0, num_requests=1)
    run.drafts.clear()
    run.steps(2000, lambda: 4, 1.5, num_requests=16)
    assert policy._rests is False and sum(map(bool, run.drafts)) > 800


def test_steps_for_which_nothing_was_planned_do_not_put_off_those_to_be_compared() -> None:
    """Two requests draft in eight steps of ten and take four times as long as one, not twice: what they take without
    drafts is known from the steps in which they had to go without, and no others."""
    policy = limited()
    inner, none = policy.policy, Always(0, COSTS)
    object.__setattr__(none, "plain_times", policy.plain_times)
    one, two = [a_request("one")], [a_request("one"), a_request("other")]
    drafted = 0
    for step in range(1000):
        requests = two if step % 10 < 8 else one
        policy.policy = inner if requests is two else none
        counts = policy.plan(requests, len(requests)).num_drafts
        drafted += bool(counts[0])
        drafts = dict.fromkeys(requests, 4) if counts[0] else {}
        slow = 2.0 if step < 20 else 1.0  # the first steps of an engine
        took = slow * (6.0 if drafts else 4.0 if requests is two else 1.0)
        policy.step_finished(drafts, len(requests) + sum(drafts.values()), 3 * len(requests), took)
    assert drafted < 320


@pytest.mark.parametrize("lengths", [(2, 2), (2, 0)])
def test_two_methods_that_lose_together_fall_silent(lengths: tuple[int, int]) -> None:
    """Both promise to gain, by costs that are much too low; each draft is accepted. If only one at a time went without
    drafts, each would be compared with the other."""
    costs = StepCosts({1: 1.0, 64: 1.0 + 63 * 0.05})
    drafter = FallbackDrafter(Some(*lengths), Some(2, 2), 2, 2, 1)
    first, second = AdaptiveDrafts(2, costs), AdaptiveDrafts(2, costs)
    policy = LossLimit(FallbackDrafts(drafter, first, second), first.plain_times)
    requests, counts = [a_request("one"), a_request("other")], []
    for _ in range(400):
        limits = policy.plan(requests, 2).num_drafts
        made = drafter.propose(requests, limits)
        drafts = {r: len(d.token_ids) for r, d in zip(requests, made, strict=True) if d.token_ids}
        for request, num_drafts in drafts.items():
            policy.judged(request, num_drafts, num_drafts, num_drafts)
        policy.step_finished(drafts, 2 + sum(drafts.values()), 6, 1.0 + 1.2 * sum(drafts.values()))
        counts.append(sum(drafts.values()))
    assert counts[0] == 4 and counts[100:].count(0) > 240


@dataclass
class Run:
    """Steps of a policy: a step without drafts takes 1 s for each request, times `noise()`."""

    policy: LossLimit
    noise: Callable[[], float] = lambda: 1.0
    drafts: list[int] = field(default_factory=list)
    """Of each step."""
    seconds: float = 0.0
    tokens: int = 0
    """Of one request."""
    requests: list[Request] = field(default_factory=list)
    """Of the latest step."""

    def steps(self, num_steps: int, accepted: Callable[[], int], seconds: float, num_requests: int = 1) -> None:
        """`accepted`: of the drafts of a request; `seconds`: of a step with drafts, per request."""
        held, plan = 0, DraftPlan([])
        if len(self.requests) != num_requests:
            self.requests = [a_request(str(i)) for i in range(num_requests)]
        requests = self.requests
        for _ in range(num_steps):
            count, took = 0, num_requests * self.noise()
            if held:
                held -= 1
                if not held:
                    self.policy.plan_held(plan.num_steps - 1)
            else:
                plan = self.policy.plan(requests, num_requests)
                count, held = plan.num_drafts[0], plan.num_steps - 1
                if count:
                    took *= seconds
                    gained = accepted()
                    for request in requests:
                        self.policy.judged(request, count, count, gained)
                    self.tokens += gained
                drafts = dict.fromkeys(requests, count) if count else {}
                self.policy.step_finished(drafts, num_requests * (1 + count), 3 * num_requests, took)
            self.drafts.append(count)
            self.tokens += 1
            self.seconds += took / num_requests


@pytest.mark.parametrize(("accepted", "seconds"), [(2, 3.2), (2, 4.5), (0, 1.1), (0, 1.5), (0, 6.0)])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_whatever_is_predicted_drafting_loses_little(accepted: int, seconds: float, num_requests: int) -> None:
    run = Run(limited(costs=StepCosts(COSTS.forward, context_token=0.1)))
    run.steps(4000, lambda: accepted, seconds, num_requests)
    assert run.policy._plain == pytest.approx(num_requests)
    before_compared = (FIRST_PLAIN + 1) * seconds
    assert run.seconds < (1 + 1.1 * LOSS_SHARE) * run.tokens + MOST_LOST + before_compared
    assert 0 < sum(map(bool, run.drafts)) < 1000


@pytest.mark.parametrize(("accepted", "seconds"), [(2, 2.5), (0, 0.97), (3, 3.6)])
def test_drafting_that_gains_never_rests(accepted: int, seconds: float) -> None:
    run = Run(limited())
    run.steps(4000, lambda: accepted, seconds)
    assert not run.policy._rests
    assert sum(map(bool, run.drafts)) > 3650 and run.seconds < run.tokens


@pytest.mark.parametrize("interrupted", [FIRST_PLAIN + PLAIN_STEPS + 1, 100])
def test_a_single_interruption_does_not_end_drafting_that_gains(interrupted: int) -> None:
    """Another program took the processor for as long as fifty steps."""
    times = iter([*[1.0] * interrupted, 50.0, *[1.0] * 999])
    run = Run(limited(), lambda: next(times))
    run.steps(1000, lambda: 2, 2.5)
    assert run.drafts[interrupted] and sum(map(bool, run.drafts)) > 900


def test_an_interruption_of_the_first_compared_step_costs_one_rest() -> None:
    """Nothing yet says that it is unusual."""
    first = FIRST_PLAIN + PLAIN_STEPS
    times = iter([*[1.0] * first, 50.0, *[1.0] * 2999])
    run = Run(limited(), lambda: next(times))
    run.steps(3000, lambda: 2, 2.5)
    assert run.drafts[first] and run.drafts[first + 1 :].index(4) <= MOST_LOST / LOSS_SHARE
    assert sum(map(bool, run.drafts[-2000:])) > 1900


@dataclass
class Machine:
    """Whose clock stands still between steps."""

    speeds: Sequence[float] = (1.0,)
    """What a step takes: one of these, another whenever requests come, every 40 steps and a while after the others."""
    now: float = 0.0
    speed: float = 1.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    steps: Iterator[int] = field(default_factory=count)

    def noise(self) -> float:
        """For a `Run`."""
        if next(self.steps) % 40 == 0:
            self.now, self.speed = self.now + 1000.0, self.draw.choice(self.speeds)
        self.now += self.speed
        return self.speed


@pytest.mark.parametrize(("seconds", "least", "most"), [(2.5, 6800, 8000), (3.4, 20, 500)])
def test_the_machine_has_another_speed_whenever_requests_come(
    monkeypatch: pytest.MonkeyPatch, seconds: float, least: int, most: int
) -> None:
    """A gain of 3 in 2.5 is kept, a loss of 3 in 3.4 is limited. Against steps without drafts from when the machine was
    slower it would look like one of 3 in 2."""
    machine = Machine((1.0, 1.7))
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: machine.now)
    run = Run(limited(), machine.noise)
    run.steps(8000, lambda: 2, seconds)
    assert least < sum(map(bool, run.drafts)) < most


@pytest.mark.parametrize("seed", [1, 2])
def test_a_policy_that_predicts_too_little_is_not_believed_while_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Drafting gives 0.86 of plain speed for short texts and long ones. What it adds to a step is measured for short
    ones, and grows with the text more than predicted, so a policy that learns is wrong whenever the texts change."""
    machine, share = Machine(), 0.003
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: machine.now)
    policy = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1.0}, share, 0.75, 0.75))
    limit, draw = LossLimit(policy, policy.plain_times), random.Random(seed)
    held, plan, seconds, plain_seconds, drafted = 0, DraftPlan([]), 0.0, 0.0, 0
    for number in range(200):
        length = 60 if number // 40 % 2 == 0 else 1500
        request = Request(str(number), "", [1] * length, length, SamplingParams(temperature=0), 400, seed=0)
        machine.now += 1000.0
        if held:
            limit.plan_held(plan.num_steps - 1 - held)
        held, plan = 0, DraftPlan([])
        while request.num_output_tokens < 160:
            plain = (1 + share * request.num_tokens) * draw.uniform(0.95, 1.05)
            took, accepted, drafts = plain, 0, {}
            if held:
                held -= 1
                if not held:
                    limit.plan_held(plan.num_steps - 1)
            else:
                plan = limit.plan([request], 1)
                held, [count] = plan.num_steps - 1, plan.num_drafts
                if count:
                    accepted = next((i for i in range(count) if draw.random() > 0.985), count)
                    took, drafts = plain * (1 + 4.65 * count / 4), {request: count}
                    limit.judged(request, count, count, accepted)
                limit.step_finished(drafts, 1 + sum(drafts.values()), request.num_tokens, took)
            request.token_ids += [1] * (1 + accepted)
            machine.now, seconds, drafted = machine.now + took, seconds + took, drafted + bool(drafts)
            plain_seconds += plain * (1 + accepted)
    assert drafted and 0.98 < plain_seconds / seconds < 1.0


def test_drafts_that_cost_less_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what drafts cost right behind a rest can show it."""
    machine = Machine()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: machine.now)
    run = Run(limited(), machine.noise)
    run.steps(4000, lambda: 2, 4.5)
    run.steps(2000, lambda: 2, 2.0)
    assert sum(map(bool, run.drafts[-400:])) > 350


def test_unequal_times_and_gains() -> None:
    """Times that differ by a factor of up to 1.4, and drafts that are all accepted in half of the steps: a gain of 3 in
    2.4 is kept, a loss of 3 in 3.6 is limited."""
    draw = random.Random(0)
    gains, losses = (Run(limited(), lambda: draw.uniform(0.8, 1.2)) for _ in range(2))
    for run, seconds in ((gains, 2.4), (losses, 3.6)):
        run.steps(4000, lambda: draw.choice((0, 4)), seconds)
    assert sum(map(bool, gains.drafts)) > 3500 and gains.seconds < 0.85 * gains.tokens
    assert losses.seconds < 1.03 * losses.tokens + MOST_LOST


def test_what_was_gained_before_is_not_lost_when_the_text_changes() -> None:
    run = Run(limited())
    run.steps(4000, lambda: 4, 2.0)
    before = run.seconds - run.tokens
    run.steps(1000, lambda: 0, 2.0)
    assert run.seconds - run.tokens < before + MOST_SAVED + MOST_LOST + 1 + LOSS_SHARE * 1000


def test_a_new_request_may_lose_less_of_it() -> None:
    run = Run(limited())
    run.steps(4000, lambda: 4, 2.0)
    before = run.seconds - run.tokens
    run.requests = []
    run.steps(1000, lambda: 0, 2.0)
    assert run.seconds - run.tokens < before + SAVED_BY_OTHERS + MOST_LOST + 1 + LOSS_SHARE * 1000


def test_what_two_requests_have_saved_stays_when_one_ends() -> None:
    run = Run(limited())
    run.steps(100, lambda: 4, 2.0, num_requests=2)
    saved = run.policy._saved
    run.policy.plan(run.requests[:1], 1)
    assert run.policy._saved == saved > 2 * SAVED_BY_OTHERS


def test_a_gain_that_comes_later_is_found() -> None:
    run = Run(limited())
    run.steps(1000, lambda: 0, 1.5)
    assert sum(map(bool, run.drafts)) < 150
    run.steps(2000, lambda: 3, 1.5)
    assert sum(map(bool, run.drafts[-500:])) > 460


def test_another_number_of_requests_is_compared_with_the_same() -> None:
    """Four requests take six times as long as one, not four times; drafts are the same gain for both."""
    costs = StepCosts({n: 1.0 + 0.1 * n for n in range(1, 65)})
    run = Run(limited(costs=costs))
    for _ in range(20):
        run.steps(50, lambda: 1, 1.8, num_requests=4)
        run.steps(50, lambda: 1, 1.8, num_requests=1)
    assert sum(map(bool, run.drafts)) > 1850


def test_what_is_gained_with_one_request_pays_for_less_with_many() -> None:
    """A step of sixteen requests takes eight times as long as one of one, so it weighs as much."""
    run = Run(limited(costs=StepCosts({1: 1.0, 16: 8.0, 80: 40.0})))
    for _ in range(400):
        run.steps(10, lambda: 1, 1.5, num_requests=1)
        run.steps(10, lambda: 0, 1.5, num_requests=16)
    assert sum(map(bool, run.drafts)) < 2000


def test_drafts_accepted_beside_a_prompt_are_no_gain_of_the_next_step() -> None:
    """Such a step is not told, so its tokens must not count for a step that is."""
    policy, request, counts = limited(), a_request(), []
    for step in range(400):
        counts += policy.plan([request], 1).num_drafts
        if counts[-1]:
            policy.judged(request, 4, 4, 4 * (step % 2))
        if step % 2 == 0 or not counts[-1]:
            policy.step_finished({request: 4} if counts[-1] else {}, 1 + counts[-1], 3, 2.0 if counts[-1] else 1.0)
    assert sum(map(bool, counts)) < 60


def test_the_first_steps_behind_drafts_are_not_what_steps_without_take() -> None:
    policy, request, without = limited(), a_request(), 0
    for _ in range(400):
        [count] = policy.plan([request], 1).num_drafts
        without = 0 if count else without + 1
        took = 1.2 if count else 1.9 if without < 3 else 1.0
        policy.step_finished({request: 4} if count else {}, 1 + count, 3, took)
    assert policy._plain == pytest.approx(1.0) and policy._rests


def test_while_drafting_rests_the_drafter_is_shown_nothing() -> None:
    policy, request = limited(), a_request()
    run = Run(policy)
    while not policy._rests:
        run.steps(1, lambda: 0, 3.0)
    assert not policy.may_draft_next([request])
    assert policy.may_draft_next([a_request("seeded", temperature=1.0, seed=3)])


def test_the_first_steps_of_a_request_are_not_what_steps_without_drafts_take() -> None:
    """They find the processor's caches as the prompt has left them. While drafting rests, only the first is told."""
    policy, request = limited(), a_request()
    for _ in range(SETTLING_STEPS + 4):
        policy.plan([request], 1)
        policy.step_finished({}, 1, 3, 1.0)
    for number in range(20):
        policy.plan([a_request(str(number))], 1)
        policy.step_finished({}, 1, 3, 2.6)
    policy.plan([request], 1)
    assert policy._plain == 1.0


def test_steps_that_are_compared_are_not_shown_to_the_drafter_but_for_the_last() -> None:
    """Else they would take longer than steps without a drafter."""
    policy, request, seeded = limited(), a_request(), a_request("seeded", temperature=1.0, seed=3)
    shown = []
    for _ in range(FIRST_PLAIN + PLAIN_STEPS + 1):
        [count] = policy.plan([request], 1).num_drafts
        shown.append(policy.may_draft_next([request]))
        assert policy.may_draft_next([seeded])
        policy.step_finished({request: count} if count else {}, 1 + count, 3, 1.0)
    assert shown == [*[True] * FIRST_PLAIN, *[False] * (PLAIN_STEPS - 1), True, True]
