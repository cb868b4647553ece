"""Two methods in turn, each with its own number of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from minillm import LLM, SamplingParams
from minillm.request import Request
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import FixedDrafts
from minillm.speculative.drafter import NO_DRAFT, Draft, Drafter
from minillm.speculative.fallback import FallbackDrafter
from minillm.speculative.fallback_policy import FallbackDrafts
from minillm.speculative.step_costs import StepCosts
from minillm.speculative.step_times import SETTLING_STEPS
from minillm.trace import DraftProposed, DraftsPlanned
from tests.conftest import TinyPair

CHEAP, DEAR = StepCosts({1: 1.0, 64: 2.0}), StepCosts({1: 1.0, 64: 2.0}, 0.0, 1.0, 1.0)


class Some(Drafter):
    """Proposes a given number of drafts for each request, if it may."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.asked = lengths, []

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        self.asked.append((len(requests), list(num_drafts)))
        return [Draft([7] * min(n, m)) for n, m in zip(self.lengths, num_drafts, strict=False)]


def a_request(name: str = "a") -> Request:
    return Request(name, "", [1, 2, 3], 3, SamplingParams(temperature=0), 100, seed=0)


def both(*lengths: int, max_second: int = 3) -> tuple[FallbackDrafter, FallbackDrafts]:
    drafter = FallbackDrafter(Some(*lengths), Some(2, 2), 4, max_second, 1)
    return drafter, FallbackDrafts(drafter, AdaptiveDrafts(4, CHEAP), AdaptiveDrafts(max_second, DEAR))


def test_a_method_that_does_not_pay_leaves_the_other_alone() -> None:
    drafter, policy = both(4)
    request = a_request()
    policy.second.judged(request, 3, 3, 0)
    plan = policy.plan([request], 1)
    assert plan.num_drafts == [4] and drafter.limits[request] == (4, 0)
    assert max(plan.speedups) > 1 and len(plan.survival[0]) == 4  # those of the method that pays
    assert [len(d.token_ids) for d in drafter.propose([request], plan.num_drafts)] == [4]
    drafter.first.lengths = (0,)
    assert drafter.propose([request], plan.num_drafts) == [Draft([])]
    assert drafter.second.asked == []


def test_a_plan_against_drafts_holds_as_long_as_those_of_both_methods() -> None:
    policy = FallbackDrafts(both(4)[0], AdaptiveDrafts(4, CHEAP), AdaptiveDrafts(3, CHEAP))
    request = a_request()
    for method in (policy.first, policy.second):
        for _ in range(40):
            method.judged(request, 3, 3, 0)
    plan, alone = policy.plan([request], 1), policy.second.plan([request], 1)
    assert plan.num_drafts == [0] and 1 < plan.num_steps == alone.num_steps + 1
    policy.plan_held(5)
    assert policy.second.plan([request], 1).num_steps == alone.num_steps - 6
    assert policy.first.plan([request], 1).num_steps == alone.num_steps - 5


def test_a_new_decision_of_one_method_counts_while_that_of_the_other_holds() -> None:
    drafter, policy = both(4)
    request = a_request()
    for _ in range(3):
        assert policy.plan([request], 1).num_drafts == [4] and drafter.limits[request] == (4, 3)
    policy.second.judged(request, 3, 3, 0)
    policy.second._steps_left = 0
    assert policy.plan([request], 1).num_drafts == [4] and drafter.limits[request] == (4, 0)


def test_a_verdict_counts_for_the_method_that_proposed() -> None:
    drafter, policy = both(2, 0)
    one, other = a_request("one"), a_request("other")
    before = [p.survival(one)[0] for p in (policy.first, policy.second)]
    drafter.limits.update({one: (4, 3), other: (4, 3)})
    drafter.propose([one, other], [4, 4])
    policy.judged(one, 4, 2, 2)
    assert policy.first._made(one)[3] < policy.first._made(one)[1] == 1.0
    assert policy.first.survival(one)[0] > before[0] and policy.second.survival(one)[0] == before[1]
    policy.judged(other, 4, 2, 0)
    assert policy.second.survival(other)[0] < before[1]
    assert policy.second._made(other)[1] == 1.0 > policy.second._made(other)[2]  # of at most three


def test_a_round_without_drafts_counts_for_a_model_that_ran_and_never_for_a_lookup() -> None:
    drafter, policy = both(0, 0)
    drafter.second.lengths, drafter.second.runs_model = (0, 0), True
    one, other = a_request("one"), a_request("other")
    before = policy.first.survival(one)
    drafter.limits.update({one: (4, 3), other: (4, 0)})
    drafts = drafter.propose([one, other], [4, 4])
    assert [draft is NO_DRAFT for draft in drafts] == [False, True]
    policy.judged(one, 4, 0, 0)
    assert policy.second.survival(one)[0] < before[0] and policy.first.survival(one) == before
    told: list[Mapping[Request, int]] = []
    policy.first.step_finished = lambda drafts, *_: told.append(drafts)
    policy.second.step_finished = lambda drafts, *_: told.append(drafts)
    policy.step_finished({one: 0}, 2, 0, 9.0)
    assert told == [{one: 0}]
    added = DEAR.draft(1, 1) / DEAR.target(2, 0)
    assert policy.added_seconds({one: 0}, 2, 0) == pytest.approx(added * DEAR.target(2, 0))


@pytest.mark.parametrize("model_first", [True, False])
def test_a_model_that_had_no_draft_is_told_so_where_the_other_method_had_one(model_first: bool) -> None:
    """Else it would be asked on, and its time would count as that of the other, a lookup."""
    model, lookup = (Some(0), AdaptiveDrafts(4, DEAR)), (Some(1), AdaptiveDrafts(4, CHEAP))
    model[0].runs_model = True
    first, second = (model, lookup) if model_first else (lookup, model)
    drafter, request = FallbackDrafter(first[0], second[0], 4, 4, below=3), a_request()
    policy = FallbackDrafts(drafter, first[1], second[1])
    drafter.limits[request] = (4, 4)
    assert drafter.propose([request], [4]) == [Draft([7])]
    told: list[tuple[Mapping[Request, int], float]] = []
    lookup[1].step_finished = lambda drafts, rows, context, seconds: told.append((drafts, seconds))
    model[1].step_finished = lambda drafts, *_: told.append((drafts, 0.0))
    policy.step_finished({request: 1}, 2, 0, 9.0)
    of_lookup = {request: 1}, pytest.approx(9.0 - DEAR.draft(1, 1))
    assert sorted(told, key=lambda each: each[1]) == [({request: 0}, 0.0), of_lookup]
    before = model[1].survival(request)[0]
    policy.judged(request, 4, 1, 1)
    assert model[1].survival(request)[0] < before < lookup[1].survival(request)[0]


def test_the_one_that_is_silenced_is_not_asked_for_the_requests_of_the_other() -> None:
    drafter, _ = both(1, 1)
    requests = [a_request(name) for name in "ab"]
    drafter.limits.update({requests[0]: (0, 3), requests[1]: (2, 0)})
    drafts = drafter.propose(requests, [3, 2])
    assert drafter.first.asked == [(1, [2])] and drafter.second.asked == [(1, [3])]
    assert [len(d.token_ids) for d in drafts] == [2, 1]


def test_a_step_is_told_to_the_method_that_drafted_and_without_drafts_to_the_first() -> None:
    drafter, policy = both(1, 1)
    one, other = a_request("one"), a_request("other")
    drafter.limits.update({one: (2, 0), other: (0, 2)})
    drafter.propose([one, other], [2, 2])

    told: list[tuple[int, dict[Request, int], int, float]] = []
    for i, each in enumerate((policy.first, policy.second)):
        each.step_finished = lambda drafts, rows, context, seconds, i=i: told.append((i, drafts, rows, seconds))
    dear = DEAR.draft(1, 2)
    rows = {n: CHEAP.target(n, 0) for n in (2, 3, 4, 5)}
    assert policy.added_seconds({one: 1, other: 2}, 5, 0) == pytest.approx(dear + rows[4] - rows[2] + rows[3] - rows[2])
    for drafts, expected in (
        ({}, [(0, {}, 5, 9.0)]),
        ({one: 1}, [(0, {one: 1}, 5, 9.0)]),
        ({other: 2}, [(1, {other: 2}, 5, 9.0)]),
        (
            {one: 1, other: 2},
            [
                (0, {one: 1}, 3, pytest.approx(9.0 - dear - (rows[5] - rows[3]))),
                (1, {other: 2}, 4, pytest.approx(9.0 - (rows[5] - rows[4]))),
            ],
        ),
    ):
        policy.step_finished(drafts, 5, 0, 9.0)
        assert told == expected
        told.clear()


def test_both_methods_compare_with_the_same_steps_without_drafts() -> None:
    _, policy = both(1, 1)
    for _ in range(SETTLING_STEPS + 1):
        policy.step_finished({}, 1, 0, 3.0)
    assert policy.second.plain_times.seconds(1, 0) == pytest.approx(3.0)
    outer = FallbackDrafts(policy.drafter, AdaptiveDrafts(4, CHEAP), policy)
    assert outer.plain_times is policy.plain_times is policy.first.plain_times is policy.second.plain_times


class Wrong(Drafter):
    """Proposes tokens that are never accepted."""

    right: ClassVar[set[int]] = set()

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[Draft]:
        return [Draft([next(t for t in range(300) if t not in self.right)] * most) for most in num_drafts]


@pytest.mark.parametrize("wrong_first", [True, False])
def test_in_the_engine_the_useless_method_falls_silent_and_the_useful_one_goes_on(
    tiny: TinyPair, wrong_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the target: all its drafts are accepted. The other's never are. Costs are given, because those
    of a machine vary."""
    monkeypatch.setattr("minillm.engine.assembly.measure", lambda *_: StepCosts({1: 1.0, 64: 8.0}))
    monkeypatch.setattr(AdaptiveDrafts, "step_finished", lambda *_: None)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    plain = LLM(str(tiny.target), enforce_eager=True).generate("def f(", params, use_tqdm=False)[0]
    monkeypatch.setattr(Wrong, "right", set(plain.outputs[0].token_ids))
    methods = [{"method": Wrong}, {"method": "draft_model", "model": str(tiny.target)}]
    first, second = methods if wrong_first else methods[::-1]
    options = {**first, "adaptive": True, "num_speculative_tokens": 4}
    second = {**second, "num_speculative_tokens": 4}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config={**options, "fallback": second})
    with llm.trace() as trace:
        output = llm.generate("def f(", params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    last = [event.token_ids for event in trace.of(DraftProposed)][-8:]
    useful = [ids for ids in last if ids and set(ids) <= Wrong.right]
    assert len(useful) >= 7  # one may be the other's next try
    assert any(event.speedups for event in trace.of(DraftsPlanned))


def test_fixed_numbers_ask_both_for_all(tiny: TinyPair) -> None:
    fallback = {"method": "draft_model", "model": str(tiny.draft)}
    speculative = {"method": "suffix", "adaptive": False, "fallback": fallback}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=speculative)
    assert isinstance(llm.engine.scheduler.draft_policy, FixedDrafts)
