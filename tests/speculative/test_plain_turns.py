"""Steps that go without drafts now and then."""

from __future__ import annotations

from itertools import groupby

import pytest

from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.speculative.draft_policy import AdaptiveDrafts, DraftPlan, FixedDrafts
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.fallback_policy import FallbackDrafts
from minillm.speculative.plain_turns import FIRST_PLAIN, FIRST_REST, PLAIN_EVERY, PLAIN_STEPS, PlainTurns
from minillm.speculative.step_costs import StepCosts
from tests.speculative.test_fallback_policy import Some


def a_request(name: str = "a", **params: object) -> Request:
    return Request(name, "", [1, 2, 3], 3, SamplingParams(**{"temperature": 0, **params}), 100, seed=0)


def test_now_and_then_a_step_goes_without_drafts() -> None:
    """Otherwise what steps without them take would be known from long ago only."""
    policy, request, counts = PlainTurns(FixedDrafts(4)), a_request(), []
    for _ in range(4 * PLAIN_EVERY):
        counts += policy.plan([request], 1).num_drafts
        policy.step_finished({request: counts[-1]} if counts[-1] else {}, 1 + counts[-1], 3, 1.0)
    runs = [(count > 0, len(list(run))) for count, run in groupby(counts)]
    drafted = [length for has_drafts, length in runs if has_drafts]
    assert drafted[:8] == [FIRST_PLAIN, 16, 32, 64, 128, 256, PLAIN_EVERY, PLAIN_EVERY]
    assert {length for has_drafts, length in runs if not has_drafts} == {PLAIN_STEPS}


def test_a_request_with_a_seed_of_its_own_always_gets_its_drafts() -> None:
    policy, seeded = PlainTurns(FixedDrafts(4)), a_request("seeded", temperature=1.0, seed=3)
    for _ in range(2 * PLAIN_EVERY):
        assert policy.plan([seeded], 1).num_drafts == [4]
        policy.step_finished({seeded: 4}, 5, 3, 1.0)
    assert policy.plan([a_request()], 1).num_drafts == [0]


def test_after_steps_for_which_nothing_was_planned_the_count_begins_anew() -> None:
    request, inner = a_request(), FixedDrafts(4)
    policy = PlainTurns(inner)
    for _ in range(3):
        for _ in range(FIRST_PLAIN - 1):
            assert policy.plan([request], 1).num_drafts == [4]
            policy.step_finished({request: 4}, 5, 3, 1.0)
        policy.policy = FixedDrafts(0)
        assert policy.plan([request], 1).num_drafts == [0]
        policy.policy = inner


@pytest.mark.parametrize("lengths", [(2, 2), (2, 0)])
def test_two_methods_that_lose_together_fall_silent(lengths: tuple[int, int]) -> None:
    """Both promise to gain, by costs that are much too low; each draft is accepted. If only one at a time went without
    drafts, each would be compared with the other."""
    costs = StepCosts({1: 1.0, 64: 1.0 + 63 * 0.05})
    drafter = FallbackDrafter(Some(*lengths), Some(2, 2), 2, 2, 1)
    policy = PlainTurns(FallbackDrafts(drafter, AdaptiveDrafts(2, costs), AdaptiveDrafts(2, costs)))
    requests, counts = [a_request("one"), a_request("other")], []
    for _ in range(400):
        limits = policy.plan(requests, 2).num_drafts
        made = drafter.propose(requests, limits)
        drafts = {r: len(d.token_ids) for r, d in zip(requests, made, strict=True) if d.token_ids}
        for request, count in drafts.items():
            policy.judged(request, count, count, count)
        policy.step_finished(drafts, 2 + sum(drafts.values()), 6, 1.0 + 1.2 * sum(drafts.values()))
        counts.append(sum(drafts.values()))
    assert counts[0] == 4 and counts[100:].count(0) > 240


def steps(policy: PlainTurns, request: Request, accepted: int, seconds: float, num_steps: int) -> list[int]:
    """The drafts of each step, if so many of four are accepted and a step with drafts takes `seconds`, others 1."""
    counts, held, plan = [], 0, DraftPlan([0])
    for _ in range(num_steps):
        if held:
            held -= 1
            counts.append(0)
            if not held:
                policy.plan_held(plan.num_steps - 1)
            continue
        plan = policy.plan([request], 1)
        [count] = plan.num_drafts
        held = plan.num_steps - 1
        if count:
            policy.judged(request, count, count, accepted)
        policy.step_finished({request: count} if count else {}, 1 + count, 3, seconds if count else 1.0)
        counts.append(count)
    return counts


@pytest.mark.parametrize(
    ("accepted", "seconds", "gains"), [(2, 2.5, True), (2, 3.5, False), (0, 1.03, True), (0, 1.2, False)]
)
def test_drafting_rests_where_it_was_measured_to_lose(accepted: int, seconds: float, gains: bool) -> None:
    """Whatever is predicted: here always four drafts."""
    policy, request = PlainTurns(FixedDrafts(4)), a_request()
    counts = steps(policy, request, accepted, seconds, 4000)
    assert (sum(map(bool, counts)) > 3800) is gains
    if not gains:
        assert sum(map(bool, counts)) < 200 and not policy.may_draft_next([request])
        rests = [len(list(run)) for count, run in groupby(counts) if not count]
        assert rests[1:4] == [FIRST_REST + PLAIN_STEPS, 2 * FIRST_REST + PLAIN_STEPS, 4 * FIRST_REST + PLAIN_STEPS]


def test_a_gain_that_comes_later_is_found() -> None:
    policy, request = PlainTurns(FixedDrafts(4)), a_request()
    before = steps(policy, request, 0, 1.5, 1000)
    after = steps(policy, request, 3, 1.5, 3000)
    assert sum(map(bool, before)) < 120 and sum(map(bool, after)) > 1500


def test_steps_with_another_number_of_requests_are_not_compared() -> None:
    policy, requests = PlainTurns(FixedDrafts(1)), [a_request(str(i)) for i in range(8)]
    for turn in range(6):
        some = requests[: 8 if turn % 2 else 4]
        for _ in range(policy._plain_after):
            assert any(policy.plan(some, len(some)).num_drafts)
            for request in some:
                policy.judged(request, 1, 1, 1)
            policy.step_finished(dict.fromkeys(some, 1), 2 * len(some), 3, float(len(some)))
        for _ in range(PLAIN_STEPS):  # all but one have ended
            assert not any(policy.plan(some[:1], 1).num_drafts)
            policy.step_finished({}, 1, 3, 1.0)
    assert not policy._ratio.count


def test_drafts_accepted_beside_a_prompt_are_no_gain_of_the_next_step() -> None:
    """Such a step is not told, so its tokens must not count for a step that is."""
    policy, request = PlainTurns(FixedDrafts(4)), a_request()
    for step in range(2 * FIRST_PLAIN):
        if any(policy.plan([request], 1).num_drafts):
            policy.judged(request, 4, 4, 4 * (step % 2))
            if step % 2 == 0:
                policy.step_finished({request: 4}, 5, 3, 1.0)
    assert policy._tokens.value == 1.0
