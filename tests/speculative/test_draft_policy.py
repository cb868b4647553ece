"""How many drafts a request gets: as many as pay, by the costs and the acceptance that are known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, product
from typing import ClassVar
from weakref import WeakKeyDictionary

import pytest

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.speculative.adaptive_drafts import (
    IDLE_PLAN_STEPS,
    LONG_PAUSE,
    MIN_GAIN,
    PLAN_STEPS,
    SHORTEST_PAUSE,
    TRIES_SHARE,
    TRY_STEPS,
    AdaptiveDrafts,
)
from minillm.speculative.draft_policy import DraftPlan, FixedDrafts
from minillm.speculative.drafter import NO_DRAFT, Draft, Drafter, checked_drafts
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.step_costs import StepCosts, isotonic_costs
from minillm.speculative.step_times import SETTLING_STEPS
from minillm.speculative.suffix import SuffixDrafter, SuffixOptions
from minillm.trace import DraftProposed, DraftsPlanned, StepRan
from tests.conftest import TinyPair
from tests.speculative.three_tokens import expected_triples, p_of_triples

FREE_ROWS = StepCosts({1: 1.0, 64: 1.0})
"""As on a GPU with one request: more rows cost nothing."""
EACH_ROW = StepCosts({1: 1.0, 64: 64.0})
"""As where the processor is saturated: every row costs the same."""
CHEAP_ROWS = StepCosts({1: 1.0, 64: 1.0 + 63 * 0.02})
"""As of a large model: its weights are read once."""
CHEAP_SECOND_ROW = StepCosts({1: 1.0, 2: 1.1, 64: 63.1})
"""A try with one draft may come after the shortest pause."""
STEPS_IN_TURN = 8
"""Steps without drafts, and then as many with them."""


def a_request(name: str = "a", **params: object) -> Request:
    return Request(name, "", [1, 2, 3], 3, SamplingParams(**{"temperature": 0, **params}), 100, seed=0)


def judged(policy: AdaptiveDrafts, request: Request, rate: float, rounds: int = 200) -> None:
    """Rounds of all drafts, each accepted with probability `rate`."""
    rng = random.Random(0)
    for _ in range(rounds):
        accepted = 0
        while accepted < policy.max_drafts and rng.random() < rate:
            accepted += 1
        policy.judged(request, policy.max_drafts, policy.max_drafts, accepted)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("slot", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("guess", [0.0, 0.05, 0.3])
def test_the_number_is_the_best_of_the_speed_up_formula(rate: float, slot: float, guess: float) -> None:
    """E / (γc + v), for every γ: the number of drafts with the largest quotient."""
    policy = AdaptiveDrafts(8, StepCosts({1: 1.0, 64: 1 + 63 * slot}, 0.0, guess, guess))
    request = a_request()
    judged(policy, request, rate)
    seen = policy.survival(request)
    by_formula = [(1 + sum(seen[:n])) / (n * guess + 1 + n * slot) for n in range(9)]
    best = max(range(9), key=by_formula.__getitem__)
    plan = policy.plan([request], 1)
    assert plan.speedups == pytest.approx(by_formula)
    assert plan.num_drafts == [best if by_formula[best] >= MIN_GAIN else 0]


def test_the_estimate_comes_close_to_the_rate() -> None:
    policy, request = AdaptiveDrafts(4, FREE_ROWS), a_request()
    judged(policy, request, 0.6, rounds=400)
    assert policy.survival(request)[0] == pytest.approx(0.6, abs=0.15)


def test_free_rows_take_every_draft_and_dear_rows_none() -> None:
    for costs, expected in ((FREE_ROWS, 4), (EACH_ROW, 0)):
        policy, request = AdaptiveDrafts(4, costs), a_request()
        judged(policy, request, 0.6)
        assert policy.plan([request], 1).num_drafts == [expected]


def test_drafts_go_to_the_requests_whose_drafts_are_accepted() -> None:
    policy, good, bad = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1 + 63 * 0.15})), a_request("good"), a_request("bad")
    judged(policy, good, 0.95)
    judged(policy, bad, 0.05)
    judged(policy, good, 0.95)
    most, least = policy.plan([good, bad], 2).num_drafts
    assert most == 4 and least == 0


def test_no_other_choice_of_slots_is_predicted_to_be_faster() -> None:
    """Every way to give 0 to 3 drafts to three requests with texts of unequal length, against the plan."""
    costs = StepCosts({1: 1.0, 4: 1.2, 8: 2.0, 16: 4.5}, 0.0005, 0.05, 0.02, 0.01)
    rng = random.Random(1)
    for _ in range(30):
        policy, requests = AdaptiveDrafts(3, costs), [a_request(str(i)) for i in range(3)]
        for request, num_tokens in zip(requests, (3, 100, 300), strict=True):
            request.token_ids = [1] * num_tokens
            judged(policy, request, rng.random(), rounds=30)
        plan = policy.plan(requests, 3)

        def speed(counts: tuple[int, ...], survival: list[list[float]] = plan.survival) -> float:
            tokens = 3 + sum(sum(s[:n]) for s, n in zip(survival, counts, strict=True))
            drafting = costs.draft(sum(n > 0 for n in counts), max(counts)) if any(counts) else 0.0
            return tokens / (drafting + costs.target(3 + sum(counts), 403))

        best = max(product(range(4), repeat=3), key=speed)
        # Drafting takes as long as the longest chain, so taking slots by survival alone may miss a little.
        plain, planned = speed((0, 0, 0)), speed(tuple(plan.num_drafts))
        assert planned >= (0.97 * speed(best) if speed(best) >= MIN_GAIN / 0.97 * plain else plain)
        assert plan.speedups[sum(plan.num_drafts)] == pytest.approx(planned / plain)


def test_a_large_step_leaves_no_room_where_rows_are_dear() -> None:
    policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 8: 1.1, 64: 8.0})), a_request()
    judged(policy, request, 0.6)
    assert policy.plan([request], 1).num_drafts[0] >= 3
    many = [request, *(a_request(str(i)) for i in range(31))]
    assert sum(policy.plan(many, 32).num_drafts) == 0


def test_a_decision_holds_for_some_steps_of_the_same_requests_only() -> None:
    policy, one, other = AdaptiveDrafts(4, FREE_ROWS), a_request("one"), a_request("other")
    decided = [bool(policy.plan([one], 1).speedups) for _ in range(2 * PLAN_STEPS)]
    assert decided == [*[True], *[False] * (PLAN_STEPS - 1)] * 2
    assert policy.plan([one], 1).speedups and policy.plan([one, other], 2).speedups
    assert policy.plan([one, other], 9).speedups and policy.plan([other], 9).speedups


def test_long_contexts_make_a_draft_cheap() -> None:
    """Reading the cache costs the same whatever number of rows reads it."""
    for num_tokens, expected in ((3, 0), (2000, 4)):
        policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 40.0}, context_token=0.01)), a_request()
        request.token_ids = [1] * num_tokens
        judged(policy, request, 0.6)
        assert policy.plan([request], 1).num_drafts == [expected]


@pytest.mark.parametrize("more", ["context_row", "context_draft"])
def test_rows_and_drafts_that_read_a_long_context_cost_more(more: str) -> None:
    for num_tokens, expected in ((3, 4), (2000, 0)):
        costs = StepCosts({1: 1.0, 64: 1.0}, context_token=0.001, **{more: 0.001})
        policy, request = AdaptiveDrafts(4, costs), a_request()
        request.token_ids = [1] * num_tokens
        judged(policy, request, 0.3)
        assert policy.plan([request], 1).num_drafts == [expected]


def test_drafts_cost_what_the_requests_that_have_some_read() -> None:
    costs = StepCosts({1: 1.0, 64: 1.0}, context_draft=0.01)
    assert costs.drafted(4, 4, 400, drafting=1, longest=3, extra=3) == pytest.approx(1.0 + 3 * 0.01 * 100)
    assert costs.drafted(4, 4, 400, drafting=4, longest=3, extra=12) == pytest.approx(1.0 + 3 * 0.01 * 400)


def test_after_a_pause_one_request_tries_again() -> None:
    """Twice as late after each that did not pay."""
    gaps = gaps_between_tries(CHEAP_ROWS, finds_drafts=True)
    assert gaps[:5] == [2 * SHORTEST_PAUSE + 1, 4 * SHORTEST_PAUSE + 1, *[LONG_PAUSE + 1] * 3]


def test_a_try_that_loses_more_than_its_share_comes_later() -> None:
    """One draft doubles a step: 5.4 of 540 steps; four take five times as long."""
    with_four, with_one, *_ = gaps_between_tries(EACH_ROW, finds_drafts=True)
    assert 450 < with_one < 600 and 1800 < with_four < 2400


def test_after_a_try_in_which_nothing_was_found_to_draft_the_pause_is_the_shortest() -> None:
    """A text that begins to repeat must not wait for as long as one whose drafts are always wrong."""
    assert set(gaps_between_tries(CHEAP_ROWS, finds_drafts=False)[1:]) == {SHORTEST_PAUSE + 1}


def gaps_between_tries(costs: StepCosts, finds_drafts: bool) -> list[int]:
    policy, request = AdaptiveDrafts(4, costs), a_request()
    judged(policy, request, 0.0)
    tried = []
    for step in range(120 * SHORTEST_PAUSE):
        [count] = policy.plan([request], 1).num_drafts
        if count:
            tried.append(step)
            if finds_drafts:
                policy.judged(request, count, count, 0)
    assert tried[0] >= SHORTEST_PAUSE and tried[:TRY_STEPS] == list(range(tried[0], tried[0] + TRY_STEPS))
    return [after - before for before, after in pairwise(tried) if after - before > 1]


@pytest.mark.parametrize(("costs", "expected"), [(CHEAP_ROWS, [4] * 5), (CHEAP_SECOND_ROW, [1, 4, 1, 4, 1])])
def test_tries_that_cost_much_have_one_draft_first(costs: StepCosts, expected: list[int]) -> None:
    """One draft says whether the first is accepted, at the least cost; only all say what the later ones are worth."""
    policy, request = AdaptiveDrafts(4, costs), a_request()
    judged(policy, request, 0.0)
    counts = []
    for _ in range(200 * SHORTEST_PAUSE):
        counts += policy.plan([request], 1).num_drafts
        if counts[-1]:
            policy.judged(request, counts[-1], counts[-1], 0)
    assert [count for count, _ in groupby(counts) if count][:5] == expected


@pytest.mark.parametrize(("batch", "accepted"), [(1, 0), (8, 0), (8, 4)])
def test_tries_cost_no_more_than_their_share(batch: int, accepted: int) -> None:
    """Of a target that drafts for itself a try takes several times as long as the steps around it. With eight requests
    that is a loss even where every draft is accepted, whether one of them drafts or all do."""
    policy = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1 + 63 * 0.2}, 0.0, 1.0, 1.0))
    requests = [a_request(str(i)) for i in range(batch)]
    costs, drafted, extra = policy.costs, 0, 0.0
    steps = 4000
    for _ in range(steps):
        counts = policy.plan(requests, batch).num_drafts
        if count := max(counts):
            policy.judged(requests[counts.index(count)], count, count, min(accepted, count))
            drafted += 1
            extra += costs.draft(1, count) + costs.target(batch + count, 0) - costs.target(batch, 0)
            extra -= costs.target(batch, 0) * min(accepted, count) / batch
    assert drafted >= 2 * TRY_STEPS
    one = TRY_STEPS * (costs.draft(1, 4) + costs.target(batch + 4, 0) - costs.target(batch, 0))
    assert extra <= 1.1 * TRIES_SHARE * steps * costs.target(batch, 0) + one  # its pause goes on after the last step


def test_a_try_goes_to_the_request_whose_drafts_are_accepted_most_often() -> None:
    policy, bad, good = AdaptiveDrafts(4, EACH_ROW), a_request("bad"), a_request("good")
    judged(policy, bad, 0.0)
    judged(policy, good, 0.5)
    plans = (policy.plan([bad, good], 2).num_drafts for _ in range(16 * SHORTEST_PAUSE))
    of_bad, of_good = next(counts for counts in plans if any(counts))
    assert of_bad == 0 < of_good


def test_drafts_that_nearly_pay_are_tried_sooner_than_those_that_lose_as_much_time_for_nothing() -> None:
    """Four drafts make a step 4.8 times as long. What they gain if three are accepted is no loss."""
    tries = {}
    for accepted in (0, 3):
        policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1.0 + 63 * 0.1}, 0.0, 1.0, 0.8)), a_request()
        counts = []
        for _ in range(4000):
            counts += policy.plan([request], 1).num_drafts
            if counts[-1]:
                policy.judged(request, counts[-1], counts[-1], min(accepted, counts[-1]))
        tries[accepted] = sum(count > 0 for count, _ in groupby(counts))
    assert tries[3] > 1.5 * tries[0] > 2


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_drafts_that_pay_only_if_nearly_all_are_accepted_are_found(rate: float) -> None:
    """As of a target that drafts for itself: nothing is gained with one draft, nor at the rate assumed first."""
    policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1.0 + 63 * 0.1}, 0.0, 1.0, 0.7)), a_request()
    assert max(policy.plan([request], 1).speedups) == 1.0
    rng, counts = random.Random(0), []
    policy = AdaptiveDrafts(4, policy.costs)
    for _ in range(400):
        [count] = policy.plan([request], 1).num_drafts
        if count:
            policy.judged(request, count, count, next((i for i in range(count) if rng.random() >= rate), count))
        counts.append(count)
    assert counts[:TRY_STEPS] == [4] * TRY_STEPS  # the first try
    assert (counts.count(4) > 300) is (rate == 1.0)


def test_text_that_becomes_predictable_is_noticed() -> None:
    policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1 + 63 * 0.3})), a_request()
    judged(policy, request, 0.05)
    drafted = 0
    for _ in range(12 * SHORTEST_PAUSE):
        if count := policy.plan([request], 1).num_drafts[0]:
            policy.judged(request, count, count, count)
            drafted += 1
    assert drafted > 4 * SHORTEST_PAUSE


def test_an_engine_that_runs_for_days_without_drafts_keeps_its_estimates() -> None:
    """Each try forgets half; a position that no try reaches would fade to 0 / 0 after a thousand of them."""
    policy, request = AdaptiveDrafts(4, EACH_ROW), a_request()
    for _ in range(3000):
        policy.judged(request, 1, 1, 0)
        policy._forget_half(request)
    assert all(0 <= chance < 0.7 for chance in policy.survival(request))
    assert policy.plan([request], 1).num_drafts == [0]


def test_a_request_with_a_seed_gets_every_draft() -> None:
    """The number of drafts changes which random numbers choose a token: a seeded text must not depend on the clock. No
    random number chooses those of a greedy request."""
    policy, seeded = AdaptiveDrafts(4, EACH_ROW), a_request(temperature=1.0, seed=3)
    judged(policy, seeded, 0.1)
    others = [a_request("plain", temperature=1.0), a_request("greedy", seed=3)]
    plans = [policy.plan([*others, seeded], 3) for _ in range(3 * SHORTEST_PAUSE)]
    assert all(plan.num_drafts[-1] == 4 and plan.num_steps == 1 for plan in plans)
    assert plans[0].num_drafts == [0, 0, 4]


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    for costs, expected in ((FREE_ROWS, 6), (EACH_ROW, 0)):
        policy, request = AdaptiveDrafts(6, costs, drafts_trees=True), a_request()
        for _ in range(50):
            policy.judged(request, 6, 6, 2)
        assert policy.plan([request], 1).num_drafts == [expected]
        assert policy.survival(request)[0] == pytest.approx(2 / 6, abs=0.05)


def test_a_tree_costs_as_many_rows_as_it_usually_has() -> None:
    """Of at most 12 nodes it has 3, two of them accepted: a gain at the price of 3 rows, not of 12."""
    policy, request = AdaptiveDrafts(12, StepCosts({1: 1.0, 64: 1.0 + 63 * 0.2}), drafts_trees=True), a_request()
    for _ in range(50):
        policy.judged(request, 12, 3, 2)
    assert policy.plan([request], 1).num_drafts == [12]


def test_a_request_without_drafts_is_tried_again_while_another_drafts() -> None:
    policy, one, other = (
        AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1.0 + 63 * 0.3})),
        a_request("one"),
        a_request("other"),
    )
    tried = []
    for step in range(3000):
        counts = policy.plan([one, other], 2).num_drafts
        for request, count in zip((one, other), counts, strict=True):
            if count:
                policy.judged(request, count, count, count if request is one or step > 2000 else 0)
        tried += [step] * bool(counts[1])
    early, late = [step for step in tried if 100 < step < 2000], [step for step in tried if step > 2500]
    assert 4 <= len(early) < 400 and len(late) > 450


def test_costs_lie_on_lines_between_and_beyond_the_measured_rows() -> None:
    costs = StepCosts({1: 1.0, 3: 2.0, 5: 6.0}, context_token=0.5, context_row=0.25)
    assert [costs.target(n, 0) for n in (1, 2, 3, 4, 5, 6)] == pytest.approx([1, 1.5, 2, 4, 6, 8])
    assert costs.target(1, 4) == pytest.approx(3.0)
    assert costs.target(3, 4, rows_per_request=3) == pytest.approx(2.0 + 4 * (0.5 + 2 * 0.25))


def test_a_measurement_that_was_disturbed_is_corrected() -> None:
    assert isotonic_costs({1: 1.0, 2: 2.2, 3: 2.0, 4: 3.0}) == pytest.approx({1: 1, 2: 2.1, 3: 2.1, 4: 3})
    assert isotonic_costs({1: 3.0, 2: 1.0, 4: 2.0, 8: 5.0}) == {1: 2.0, 2: 2.0, 4: 2.0, 8: 5.0}
    assert isotonic_costs({1: 1.0, 4: 2.0}) == {1: 1.0, 4: 2.0}


def ran(policy: AdaptiveDrafts, request: Request, plain: float, extra: float, turns: int = 100) -> None:
    """Some steps without drafts and some with four in turn: `plain` times as long as their costs, and what drafts add
    another `extra` times."""
    alone, drafts = policy.costs.target(1, 3), policy.costs.draft(1, 4) + policy.costs.target(5, 3)
    for _ in range(turns):
        for _ in range(STEPS_IN_TURN):
            policy.step_finished({}, 1, 3, plain * alone)
        for _ in range(STEPS_IN_TURN):
            policy.step_finished({request: 4}, 5, 3, plain * (alone + extra * (drafts - alone)))


@pytest.mark.parametrize(("plain", "extra", "pays"), [(1, 1, True), (3, 1, True), (1, 2.5, False), (0.5, 0.5, True)])
def test_drafts_stop_where_they_add_more_than_was_measured(plain: float, extra: float, pays: bool) -> None:
    """What slows both kinds of steps down changes nothing."""
    policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 10.0}, 0.0, 0.1, 0.1)), a_request()
    judged(policy, request, 0.6)
    policy.plan([request], 1)  # the next step: in the one before, the drafter read the prompt
    ran(policy, request, plain, extra)
    policy._steps_left = 0
    plan = policy.plan([request], 1)
    assert bool(plan.num_drafts[0]) is pays
    tokens = [1 + sum(plan.survival[0][:n]) for n in range(5)]
    added = [extra * (n * 0.1 + policy.costs.target(1 + n, 0) - 1.0) for n in range(5)]
    assert plan.speedups == pytest.approx([t / (1 + a) for t, a in zip(tokens, added, strict=True)], rel=0.1)


def test_what_drafts_add_is_right_for_any_number_of_them() -> None:
    """Costs of a forward that are the same with and without drafts are overestimated, as of a long context; one ratio
    of whole steps would be right for one number of drafts only."""
    policy = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 64.0}, 0.01))
    requests = [a_request("one"), a_request("other")]
    for turn in range(200):
        count = 1 + turn % 4
        for _ in range(STEPS_IN_TURN):
            policy.step_finished({}, 2, 100, 2.0)  # measured: 3.0
        for _ in range(STEPS_IN_TURN):
            policy.step_finished({requests[0]: count}, 2 + count, 100, 2.0 + count)
    for request in requests:
        request.token_ids = [1] * 50
    for count in range(1, 5):
        assert policy._step_ratio(1, count, requests, 2) == pytest.approx(1 + count / 2, rel=0.05)


class OwnLookup(Drafter):
    """Finds nothing, like a class that somebody writes for a first try."""

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [Draft([]) for _ in requests]


class OwnModel(OwnLookup):
    runs_model = True


def test_a_lookup_that_finds_nothing_does_not_count() -> None:
    for drafter in (NgramDrafter(2, 3), SuffixDrafter(SuffixOptions()), OwnLookup()):
        [draft] = checked_drafts(drafter, [a_request()], [4])
        assert draft is NO_DRAFT
    [draft] = checked_drafts(OwnModel(), [a_request()], [4])
    assert draft is not NO_DRAFT and draft.token_ids == []


class SeenSteps(FixedDrafts):
    """Fixed drafts, and what it was told about steps."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        object.__setattr__(self, "steps", [])

    def step_finished(self, drafts: Mapping[Request, int], num_rows: int, num_context: int, seconds: float) -> None:
        """See `DraftPolicy.step_finished`."""
        self.steps.append((sum(drafts.values()), num_rows, num_context))  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_only_steps_that_say_something_are_told(tiny: TinyPair, num_drafts: int) -> None:
    """None with a prompt, and none in which the drafter was asked and had no draft."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    llm = LLM(str(tiny.target), speculative_config=ngram)
    policy = llm.engine.scheduler.draft_policy = SeenSteps(num_drafts)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with llm.trace() as trace:
        llm.generate([{"prompt_token_ids": [*range(5, end)]} for end in (17, 12)], params, use_tqdm=False)
    steps = [event.work for event in trace.of(StepRan)]
    kind = "verify" if num_drafts else "decode"
    expected = []
    for work in steps:
        if any(part.kind == kind for part in work):
            num_rows = sum(part.num_tokens for part in work)
            expected.append((num_rows - len(work), num_rows, sum(part.start for part in work)))
    told = policy.steps  # type: ignore[attr-defined]
    assert {part.kind for part in steps[0]} == {"prefill"} and max(map(len, steps[1:])) == 2
    assert expected and told[: len(expected)] == expected
    last_has_room_for_none = num_drafts > 0 and steps[-1][0].kind == "decode"
    assert len(told) - len(expected) <= last_has_room_for_none


def test_a_decision_against_drafts_holds_until_the_next_try_but_not_for_ever() -> None:
    policy, request = AdaptiveDrafts(4, EACH_ROW), a_request()
    judged(policy, request, 0.1)
    plans = [policy.plan([request], 1) for _ in range(24 * SHORTEST_PAUSE)]
    against = [step for step, plan in enumerate(plans) if plan.speedups and not any(plan.num_drafts)]
    tries = [step for step, plan in enumerate(plans) if plan.speedups and any(plan.num_drafts)]
    assert against[0] == 0 and tries[0] > 8 * SHORTEST_PAUSE
    gaps = [after - before for before, after in pairwise(sorted([*against, *tries]))]
    assert max(gaps) == IDLE_PLAN_STEPS and len(gaps) < 24


def test_a_policy_that_is_asked_only_where_its_plans_end_tries_at_the_same_steps() -> None:
    def tries(heeds_num_steps: bool) -> tuple[list[int], int]:
        policy, request = AdaptiveDrafts(4, EACH_ROW), a_request()
        judged(policy, request, 0.1)
        drafted, held, skipped, num_asked = [], 0, 0, 0
        for step in range(80 * SHORTEST_PAUSE):
            if held:
                held, skipped = held - 1, skipped + 1
                continue
            if skipped:
                policy.plan_held(skipped)
            plan, skipped, num_asked = policy.plan([request], 1), 0, num_asked + 1
            held = plan.num_steps - 1 if heeds_num_steps else 0
            [count] = plan.num_drafts
            policy.step_finished({request: count} if count else {}, 1 + count, 3, 1.0 + count)
            if count:
                policy.judged(request, count, count, 0)
                drafted.append(step)
                assert plan.num_steps == 1
        return drafted, num_asked

    (asked_always, _), (asked_seldom, num_asked) = tries(False), tries(True)
    assert asked_seldom == asked_always and asked_always
    assert num_asked < 16 * SHORTEST_PAUSE


def test_the_policy_is_asked_again_once_its_plan_ends_or_requests_come_or_go(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Holding(FixedDrafts):
        """Plans nothing, for ten steps."""

        def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
            log.append(len(requests))
            return DraftPlan([0] * len(requests), num_steps=10)

        def plan_held(self, num_steps: int) -> None:
            held.append(num_steps)

        def step_finished(self, *_: object) -> None:
            log.append("told")

    log, held = list[object](), list[int]()
    config = {"method": "ngram", "num_speculative_tokens": 2}
    llm = LLM(str(tiny.target), speculative_config=config, max_num_seqs=2, max_num_batched_tokens=16)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.scheduler.draft_policy = Holding(2)
    [first] = llm.submit(["def add(a, b):"], params)
    engine.step()  # the prompt: there is nothing to plan
    for _ in range(22):
        engine.step()
    assert log == [1, "told"] * 3 and held == [9, 9]  # the steps 1, 11 and 21 that decode
    [second] = llm.submit([{"prompt_token_ids": [*range(5, 25)]}], params)
    engine.step()  # the plan for the first holds, beside the prompt of the second, and ends
    assert log[6:] == [] and held == [9, 9, 2]
    engine.step()  # what is planned for the first alone, beside the rest of the prompt, holds for this step
    assert log.pop(6) == 1 and log[6:] == []
    engine.step()
    assert log[6:] == [2, "told"]
    llm.submit(["import os"], params)  # there are seats for two
    for _ in range(10):
        engine.step()
    assert log[8:] == [2, "told"] and held == [9, 9, 2, 9]  # and the plan holds while it waits
    engine.abort(second.request_id)
    engine.step()  # plans for the first alone, beside the prompt of the third
    assert log[10:] == [1] and held == [9, 9, 2, 9]
    engine.step()
    assert log[11:] == [2, "told"]
    engine.step()
    engine.abort(first.request_id)
    assert held == [9, 9, 2, 9, 1] and not engine.scheduler._steps_since_plan  # nothing is left for another policy
    engine.step()
    engine.step()
    assert log[13:] == [1, "told"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.runner, "run", lambda segments: (_ for _ in ()).throw(KeyboardInterrupt))
        engine.step()
    assert held == [9, 9, 2, 9, 1, 2]
    engine.step()
    assert log[15:] == [1, "told"]


def test_a_step_is_shown_to_the_drafter_if_the_next_may_draft() -> None:
    policy, request, seeded = (
        AdaptiveDrafts(4, CHEAP_SECOND_ROW),
        a_request(),
        a_request("seeded", temperature=1.0, seed=3),
    )
    assert policy.may_draft_next([request])
    judged(policy, request, 0.1)
    shown = []
    for _ in range(SHORTEST_PAUSE):
        policy.plan([request], 1)
        shown.append(policy.may_draft_next([request]))
        assert policy.may_draft_next([request, seeded])
    assert shown == [False] * (SHORTEST_PAUSE - 1) + [True]
    eager = AdaptiveDrafts(4, FREE_ROWS)
    assert all(eager.plan([request], 1) and eager.may_draft_next([request]) for _ in range(9))


@pytest.mark.parametrize(
    ("method", "layout"),
    [("draft_model", "paged"), ("draft_model", "contiguous"), ("draft_tree", "paged"), ("ngram", "paged")]
    + [("staged", "paged"), ("self_sparse", "paged"), ("self_quant", "paged"), ("self_quant", "paged_two_level")]
    + [("suffix", layout) for layout in ("paged", "contiguous", "sinks", "window", "kivi")],
)
def test_the_engine_measures_adapts_and_says_what_it_decided(tiny: TinyPair, method: str, layout: str) -> None:
    options = {"model": str(tiny.draft)} if method.startswith(("draft", "staged")) else {}
    given = {"method": method, "num_speculative_tokens": 6, "adaptive": True, **options}
    llm = LLM(str(tiny.target), speculative_config=given, kv_cache_config={"layout": layout}, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(str(tiny.target), kv_cache_config={"layout": layout}).generate(
        ["a b a b a b", "def f"], params, use_tqdm=False
    )
    with llm.trace() as trace:
        texts = [out.outputs[0].token_ids for out in llm.generate(["a b a b a b", "def f"], params, use_tqdm=False)]
    assert texts == [out.outputs[0].token_ids for out in plain]
    plans = [event for event in trace.of(DraftsPlanned) if event.speedups]
    assert plans and all(len(p.num_drafts) == len(p.request_ids) == len(p.survival) for p in plans)
    assert plans[0].speedups[0] == 1.0


def test_without_adaptive_every_request_gets_the_same_number(tiny: TinyPair) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM(str(tiny.target), speculative_config=given)
    assert llm.engine.scheduler.draft_policy == FixedDrafts(3)


def test_a_decision_is_not_for_another_request_of_the_same_id() -> None:
    """One with a seed of its own always gets all drafts."""
    policy = AdaptiveDrafts(4, EACH_ROW)
    first = a_request("a")
    judged(policy, first, 0.1)
    assert policy.plan([first], 1).num_drafts == [0]
    assert policy.plan([a_request("a", temperature=1.0, seed=7)], 1).num_drafts == [4]


class AsTheTextSays(FixedDrafts):
    """From none to three drafts, as the last token and the number of accepted drafts so far say."""

    accepted: ClassVar[WeakKeyDictionary[Request, int]] = WeakKeyDictionary()

    def plan(self, requests: Sequence[Request], num_rows: int) -> DraftPlan:
        return DraftPlan([(r.token_ids[-1] + self.accepted.get(r, 0)) % 4 for r in requests])

    def judged(self, request: Request, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        self.accepted[request] = self.accepted.get(request, 0) + num_accepted


@pytest.mark.parametrize("method", ["draft_model", "suffix"])
def test_sampled_text_follows_the_target_however_the_number_of_drafts_depends_on_it(
    tiny: TinyPair, method: str
) -> None:
    """χ², without seeds of the requests' own; a correct engine fails with probability 1e-6 over the engine's seed."""
    config = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3}
    if method == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": 3, "fallback": config}
    assert p_of_triples(tiny, expected_triples(tiny), config, AsTheTextSays(3)) > 1e-6


def looked_up(policy: AdaptiveDrafts, request: Request, rounds: int = 200) -> None:
    """Rounds as of a lookup: three of four find one doubtful draft, the fourth as many as asked for, all accepted."""
    for i in range(rounds):
        [count] = policy.plan([request], 1).num_drafts
        if count:
            made = count if i % 4 == 0 else 1
            policy.judged(request, count, made, made if i % 4 == 0 else 0)


def test_drafts_that_are_seldom_made_cost_little() -> None:
    """A lookup makes several drafts only where it expects them to be accepted: then a limit of one loses these."""
    policy, request = AdaptiveDrafts(4, StepCosts({1: 1.0, 64: 1.0 + 63 * 0.12})), a_request()
    looked_up(policy, request)
    assert policy.survival(request) == pytest.approx([0.25] * 4, abs=0.07)
    policy._steps_left = 0
    plan = policy.plan([request], 1)
    assert plan.num_drafts == [4]
    assert plan.speedups[4] == pytest.approx(2 / (1 + 0.12 * 1.75), abs=0.15)


def test_a_position_that_was_not_asked_for_is_believed_to_be_like_the_one_before() -> None:
    policy, request = AdaptiveDrafts(4, FREE_ROWS), a_request()
    for _ in range(40):
        policy.judged(request, 4, 4, 1)
    before = policy.survival(request)
    assert before[1] < 0.2
    for _ in range(200):
        policy.judged(request, 1, 1, 1)
    first, second, *_ = policy.survival(request)
    assert first > 0.95 and second > 0.6


def test_estimates_survive_any_number_of_rounds() -> None:
    """The weight of a round grows, and is scaled down before it overflows."""
    policy, request = AdaptiveDrafts(2, FREE_ROWS), a_request()
    judged(policy, request, 0.5, rounds=300)
    for _ in range(30_000):
        policy.judged(request, 2, 2, 2)
    assert policy.survival(request) == pytest.approx([1.0, 1.0], abs=0.01)
    for _ in range(300):
        policy.judged(request, 2, 2, 0)
    assert policy.survival(request)[0] < 0.02
    for _ in range(3000):  # tries in which nothing was found to draft
        policy._forget_half(request)
    assert policy.survival(request)[0] < 0.3


def test_a_step_with_the_first_drafts_of_a_request_is_not_compared() -> None:
    """The drafter reads the prompt in it."""
    policy, request = AdaptiveDrafts(4, FREE_ROWS), a_request()
    for step in range(2 * STEPS_IN_TURN):
        policy.plan([request], 1)
        if step < STEPS_IN_TURN:
            policy.step_finished({}, 1, 3, 1.0)
            continue
        policy.judged(request, 4, 4, 4)
        policy.step_finished({request: 4}, 5, 3, 50.0 if step == STEPS_IN_TURN else 1.0)
    assert policy._overhead.num_steps == STEPS_IN_TURN - 1


@pytest.mark.parametrize("why", ["pause", "preemption"])
def test_a_step_in_which_the_drafter_reads_what_it_has_missed_is_not_compared(why: str) -> None:
    policy, request = AdaptiveDrafts(4, FREE_ROWS), a_request()
    for _ in range(STEPS_IN_TURN):
        policy.step_finished({}, 1, 3, 1.0)
    for step in range(2 * STEPS_IN_TURN):
        policy.plan([request], 1)
        if step == STEPS_IN_TURN and why == "pause":
            request.token_ids += [1] * SHORTEST_PAUSE
        if step == STEPS_IN_TURN and why == "preemption":
            request.drop_cache()
        request.token_ids += [1] * 5
        policy.judged(request, 4, 4, 4)
        policy.step_finished({request: 4}, 5, 3, 50.0 if step in (0, STEPS_IN_TURN) else 1.0)
    assert policy._overhead.num_steps == 2 * STEPS_IN_TURN - 2


@pytest.mark.parametrize("beside_prompts", [False, True])
def test_a_draft_model_that_makes_no_draft_is_soon_asked_no_more(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch, beside_prompts: bool
) -> None:
    """It never is as sure as `min_survival` wants, and each of its forwards is lost. `beside_prompts`: every step also
    computes a part of a prompt."""
    costs = StepCosts({1: 1.0, 64: 2.0}, 0.0, 0.2, 0.2)
    monkeypatch.setattr("minillm.engine.assembly.measure", lambda *_: costs)
    given = {"method": "draft_model", "model": str(tiny.draft), "min_survival": 1.0, "adaptive": True}
    llm = LLM(str(tiny.target), max_num_seqs=4, max_num_batched_tokens=16, speculative_config=given)
    asked, propose = list[int](), llm.engine.drafter.propose
    monkeypatch.setattr(llm.engine.drafter, "propose", lambda *args: asked.append(len(args[0])) or propose(*args))
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with llm.trace() as trace:
        for prompt in ("def f(", "import os"):
            others = [{"prompt_token_ids": [i] * 100} for i in range(20)] if beside_prompts else []
            one = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([prompt, *others], [params, *[one] * len(others)], use_tqdm=False)
    assert not any(event.token_ids for event in trace.of(DraftProposed))
    assert 0 < len(asked) <= 2 * PLAN_STEPS


def test_the_first_steps_behind_drafts_are_not_what_steps_without_take() -> None:
    policy, request = AdaptiveDrafts(4, FREE_ROWS), a_request()
    for _ in range(40):
        for step in range(STEPS_IN_TURN):
            policy.step_finished({}, 1, 3, 1.9 if step < SETTLING_STEPS else 1.0)
        policy.step_finished({request: 4}, 5, 3, 1.5)
    assert policy.plain_times.seconds(1, 3) == pytest.approx(1.0, abs=0.01)
