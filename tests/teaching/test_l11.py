"""Lesson 11: the references agree with the engine, with enumeration, and with the figures that the lesson quotes."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import LLM
from minillm.batch import Segment
from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.speculative import adaptive_drafts, loss_limit
from minillm.speculative.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.draft_policy import FixedDrafts
from minillm.speculative.ngram import NgramDrafter
from minillm.speculative.step_costs import StepCosts
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l11_speculative_speed import (
    best_gamma,
    choose_drafts,
    distil_loss,
    expected_tokens,
    ngram_propose,
    tree_mask,
)
from minillm.teaching.exercises.l15_under_100_ms import choose_gamma
from minillm.teaching.workshop import l11_drafting as drafting
from minillm.trace import DraftsPlanned
from tests.conftest import TinyPair

SOURCE = Path(__file__).parents[2] / "solutions/11_speculative_speed.py"
RATES = st.lists(st.floats(0, 1), max_size=6)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(alphas=RATES)
def test_tokens_of_a_round_are_those_of_all_its_outcomes(alphas: list[float]):
    total, reached = 0.0, 1.0
    for i, alpha in enumerate(alphas):
        total += reached * (1 - alpha) * (i + 1)
        reached *= alpha
    assert expected_tokens(alphas) == pytest.approx(total + reached * (len(alphas) + 1))


@pytest.mark.parametrize(("c", "gamma", "speed"), [(0.02, 11, 3.82), (0.1, 6, 2.47), (0.2, 4, 1.87)])
def test_the_textbook_table(c: float, gamma: int, speed: float):
    assert best_gamma([0.8] * 20, c, [1.0] * 21) == gamma
    assert expected_tokens([0.8] * gamma) / (1 + gamma * c) == pytest.approx(speed, abs=0.005)


@given(alpha=st.floats(0, 1), c=st.floats(0, 1), more=st.lists(st.floats(0, 1), max_size=6))
def test_equal_acceptances_give_the_speed_that_lesson_15_chooses(alpha: float, c: float, more: list[float]):
    v = [1.0, *(1.0 + sum(more[: i + 1]) for i in range(len(more)))]
    mine, other = best_gamma([alpha] * len(more), c, v), choose_gamma(alpha, c, v)
    speeds = [expected_tokens([alpha] * g) / (g * c + v[g]) for g in (mine, other)]
    assert speeds[0] == pytest.approx(speeds[1])


@given(text=TEXTS, shortest=st.integers(1, 4), more=st.integers(0, 3), count=st.integers(1, 6))
def test_ngrams_are_those_of_the_engine(text: list[int], shortest: int, more: int, count: int):
    request = Request("a", "", text, len(text), SamplingParams(temperature=0), 99, seed=0)
    [draft] = NgramDrafter(shortest, shortest + more).propose([request], [count])
    assert ngram_propose(text, shortest, shortest + more, count) == draft.token_ids


@given(choices=st.lists(st.integers(0, 99), max_size=12))
def test_masks_are_those_of_the_engine(choices: list[int]):
    parents = [choice % (i + 1) - 1 for i, choice in enumerate(choices)]
    bits = [sum(1 << j for j, seen in enumerate(row) if seen) for row in tree_mask(parents).tolist()]
    assert bits == Segment([0] * (len(parents) + 1), 5, [0], parents=parents).masks


@given(
    survival=st.lists(
        st.lists(st.integers(0, 64), max_size=3).map(lambda c: sorted((x / 64 for x in c), reverse=True)),
        min_size=1,
        max_size=3,
    ),
    extra=st.lists(st.integers(0, 8), min_size=9, max_size=9),
)
def test_no_other_choice_gives_more_tokens_per_second(survival: list[list[float]], extra: list[int]):
    seconds = [1.0]
    for step in extra:
        seconds.append(seconds[-1] + step / 16)

    def rate(counts: tuple[int, ...]) -> float:
        return sum(1 + sum(c[:n]) for c, n in zip(survival, counts, strict=True)) / seconds[sum(counts)]

    every = list(product(*(range(len(chances) + 1) for chances in survival)))
    best = max(map(rate, every))
    chosen = tuple(choose_drafts(survival, seconds))
    assert rate(chosen) == pytest.approx(best)
    assert sum(chosen) == min(sum(counts) for counts in every if rate(counts) >= best - 1e-12)


def test_the_exercise_decides_as_the_engine_does():
    rng, policy = random.Random(3), AdaptiveDrafts(5, StepCosts({1: 1.0, 64: 1 + 63 * 0.15}))
    requests = [Request(str(i), "", [1], 1, SamplingParams(temperature=0), 9, seed=0) for i in range(4)]
    for _ in range(30):
        for i, request in enumerate(requests):
            policy.judged(request, 5, 5, sum(rng.random() < 0.9 - 0.2 * i for _ in range(1)) * rng.randint(1, 5))
    plan = policy.plan(requests, 4)
    seconds = [policy.costs.target(4 + m, 0) for m in range(21)]
    assert choose_drafts(plan.survival, seconds) == plan.num_drafts and any(plan.num_drafts)
    assert drafting.speedups(plan.survival, seconds) == pytest.approx(plan.speedups)


def test_the_loss_is_zero_for_a_perfect_draft_and_minus_the_log_of_acceptance():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    assert distil_loss(p, p).abs() < 1e-6
    assert distil_loss(p, q) == pytest.approx(-torch.tensor(0.75).log().item())


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("expected_tokens", lambda alphas: 1 + sum(alphas), "a draft counts only if all drafts before it"),
        ("best_gamma", lambda alphas, c, v: best_gamma(alphas, 0.0, v), "counts drafts as free"),
        ("tree_mask", lambda parents: torch.ones(len(parents) + 1, len(parents) + 1).tril().bool(), "mask of a chain"),
        ("expected_tokens", lambda alphas: expected_tokens(alphas) / 2, "fewer than one token"),
        ("ngram_propose", lambda ids, low, high, count: [0] * count, "draft 1 is 0, not 3"),
        (
            "best_gamma",
            lambda a, c, v: max(1, best_gamma(a, c, v)) if len(a) == 4 else best_gamma(a, c, v),
            "equally fast",
        ),
        ("best_gamma", lambda alphas, c, v: min(1, len(alphas)), "γ = 1 gives a speed-up of"),
        ("distil_loss", lambda p, q: distil_loss(p, q.detach()), "without a gradient"),
        ("distil_loss", lambda p, q: 2 * distil_loss(p, q) - distil_loss(p, q).detach(), "its gradient is not"),
        ("choose_drafts", lambda survival, seconds: [9] * len(survival), "from 0 to all of its drafts"),
        (
            "choose_drafts",
            lambda survival, seconds: [2] if seconds == [1.0, 1.5, 2.0] else choose_drafts(survival, seconds),
            "of equally fast numbers of drafts, the fewest is wanted",
        ),
        (
            "choose_drafts",
            lambda survival, seconds: (
                {(1.0, 1.0, 1.1, 4.0): [1, 1], (1.0, 1.5, 2.0): [2]}.get(tuple(seconds))
                or choose_drafts(survival, seconds)
            ),
            "of equally probable drafts, those of an earlier request come first",
        ),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str):
    result = check_function(f"l11.{name}", answer)
    assert not result.passed and cause in str(result), str(result)


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, q: -(1 - (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2).log().mean(),
        lambda p, q: -torch.minimum(p.softmax(-1), q.log_softmax(-1).exp()).sum(-1).log().mean(),
        lambda p, q: -torch.minimum(p.log_softmax(-1), q.log_softmax(-1)).logsumexp(-1).mean(),
        lambda p, q: -torch.where(p.softmax(-1) < q.softmax(-1), p.softmax(-1), q.softmax(-1)).sum(-1).log().mean(),
    ],
)
def test_other_ways_to_write_the_loss_pass(loss):
    """Where p = q its gradient depends on rounding, so it is not compared there."""
    result = check_function("l11.distil_loss", loss)
    assert result.passed, str(result)


@pytest.fixture
def engine(tiny: TinyPair) -> LLM:
    given = {"method": "draft_model", "model": str(tiny.draft), "num_speculative_tokens": 3, "adaptive": False}
    return LLM(str(tiny.target), num_kv_blocks=64, block_size=4, enforce_eager=True, speculative_config=given)


def test_a_run_leaves_the_engine_as_it_was_and_its_counts_agree(engine: LLM):
    policy, listeners = engine.engine.scheduler.draft_policy, list(engine.engine.listeners)
    prompts = ["a b a b", "def f"]
    plain = drafting.run(engine, prompts, FixedDrafts(0), batch=2, new_tokens=9)
    found = drafting.run(engine, prompts, FixedDrafts(3), batch=2, new_tokens=9)
    assert engine.engine.scheduler.draft_policy is policy and list(engine.engine.listeners) == listeners
    assert found.outputs == plain.outputs and [len(ids) for ids in found.outputs] == [9, 9]
    assert plain.tokens_per_forward == 1 and plain.share_with_drafts == 0
    assert [step.drafts for step in plain.steps] == [0] * 8 and [s.requests for s in plain.steps] == [2] * 8
    assert sum(len(event.token_ids) for event in found.decoded) == 16
    assert [len(found.rounds_with(n)) for n in range(4)] == [
        sum(event.num_drafts == n for event in found.decoded) for n in range(4)
    ]
    assert len(found.rounds_with(3)) < len(found.decoded), "the last round of a request is cut short"
    assert found.share_with_drafts > 0.5 and found.acceptance.drafted == sum(step.drafts for step in found.steps)


def test_a_run_that_fails_puts_the_policy_back(engine: LLM):
    policy, listeners = engine.engine.scheduler.draft_policy, list(engine.engine.listeners)
    with pytest.raises(ValueError):
        drafting.run(engine, [""], FixedDrafts(1))
    assert engine.engine.scheduler.draft_policy is policy and engine.engine.listeners == listeners


def test_predictions_use_prices_and_counts_only(engine: LLM):
    """Stated prices: a plain step takes 1, each further row a tenth, a draft a twentieth."""
    found = drafting.run(engine, ["a b a b"], FixedDrafts(3), batch=1, new_tokens=9)
    costs = StepCosts({1: 1.0, 4: 1.3}, 0.0, 0.05, 0.05)
    seconds = sum(1 + 0.15 * step.drafts for step in found.steps)
    assert drafting.predicted_speed_up(found, costs, 1, 9) == pytest.approx(8 / seconds)


def test_prices_become_costs_that_never_fall_with_more_rows():
    one = drafting.Prices(1, 1, 1.0, 0.2, 1.2), drafting.Prices(1, 4, 1.0, 0.5, 1.6)
    many = drafting.Prices(8, 1, 1.5, 0.3, 2.5), drafting.Prices(8, 4, 1.5, 0.78, 4.0)
    assert (one[1].c, one[1].row) == pytest.approx((0.125, 0.15))
    costs = drafting.costs_of(one, many)
    assert costs.forward == pytest.approx({1: 1.0, 2: 1.2, 5: 1.6, 8: 1.6, 16: 2.5, 40: 4.0})
    assert [costs.draft(*n) for n in ((1, 1), (1, 4), (8, 4))] == pytest.approx([0.2, 0.5, 0.78])
    assert drafting.costs_of(one, many, has_model=False).draft(8, 4) == 0


def test_prices_timed_while_the_machine_was_slower_become_the_same_costs():
    """One draft and four, for one request and for eight; the steps of one were timed 1.6 times slower."""
    one = [drafting.Prices(1, 1, 1.0, 0.1, 1.1), drafting.Prices(1, 4, 1.0, 0.4, 1.4)]
    many = [drafting.Prices(8, 1, 3.0, 0.3, 3.6), drafting.Prices(8, 4, 3.0, 1.2, 5.4)]
    wanted = drafting.costs_of(one, many)
    assert wanted.draft(1, 4) + wanted.target(5, 0) == pytest.approx(1.8), "a round, as the prices say"
    for prices in (one, many):
        for i, price in enumerate(prices):
            slower = drafting.Prices(
                price.batch, price.gamma, 1.6 * price.plain, 1.6 * price.drafting, 1.6 * price.verifying
            )
            with_slower = [*prices[:i], slower, *prices[i + 1 :]]
            costs = drafting.costs_of(*((with_slower, many) if prices is one else (one, with_slower)))
            assert costs.forward == pytest.approx(wanted.forward)
            assert [costs.draft(*n) for n in ((1, 1), (1, 4), (8, 1), (8, 4))] == pytest.approx(
                [wanted.draft(*n) for n in ((1, 1), (1, 4), (8, 1), (8, 4))]
            )


def test_prices_are_positive(engine: LLM):
    price = drafting.prices(engine, ["a b a b", "def f"], 2, 3, new_tokens=12)
    assert (price.batch, price.gamma) == (2, 3)
    assert price.plain > 0 and price.drafting > 0 and price.verifying > 0 and price.c > 0


@pytest.mark.parametrize(("rests", "verifying"), [((4.0, 6.0, 5.0), 5.0), ((0.25, 0.75, 0.5), 2.0)])
def test_prices_are_medians_of_full_steps(monkeypatch, rests: tuple[float, ...], verifying: float):
    """The first step of a run, and steps with fewer requests or drafts, do not count. Drafts do not make a step
    faster."""
    asked = []

    def run(llm, prompts, policy, *, batch, new_tokens):
        asked.append((prompts, policy.num_drafts, batch, new_tokens))
        if policy.num_drafts:
            full = [drafting.StepTime(2, 6, *seconds) for seconds in zip((1.0, 3.0, 2.5), rests, strict=True)]
            others = [drafting.StepTime(2, 5, 90.0, 90.0), drafting.StepTime(1, 3, 90.0, 90.0)]
        else:
            full = [drafting.StepTime(2, 0, 0.5, rest) for rest in (0.5, 1.5, 8.5)]
            others = [drafting.StepTime(1, 0, 0.0, 90.0), drafting.StepTime(2, 1, 90.0, 90.0)]
        first = drafting.StepTime(2, 2 * policy.num_drafts, 800.0, 800.0)
        return drafting.DraftRun(None, [], [first, *others, *full])

    monkeypatch.setattr(drafting, "run", run)
    price = drafting.prices(None, ["a", "b", "c"], 2, 3, new_tokens=12)
    assert price == drafting.Prices(2, 3, plain=2.0, drafting=2.5, verifying=verifying)
    assert set(map(str, asked)) == {str((["a", "b"], count, 2, 12)) for count in (0, 3)}


def test_synthetic_rates_need_no_draft_model(tiny: TinyPair):
    given = {
        "method": drafting.ConstantDrafter,
        "num_speculative_tokens": 2,
        "adaptive": False,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 0.0],
    }
    llm = LLM(str(tiny.target), num_kv_blocks=64, block_size=4, enforce_eager=True, speculative_config=given)
    found = drafting.run(llm, ["a b"], FixedDrafts(2), new_tokens=9)
    assert found.acceptance.conditional == [1.0, 0.0] and found.tokens_per_forward == 2
    assert not found.trace.of(DraftsPlanned)


def test_the_lesson_names_the_numbers_of_the_rule() -> None:
    """Its prose says when adaptive drafting begins, goes without drafts, and rests."""
    text = " ".join(SOURCE.read_text(encoding="utf-8").replace("\n# ", " ").split())
    words = {8: "eight", 10: "ten"}
    for stated in (
        f"({adaptive_drafts.FIRST_RATE:.0%}), and it drafts only where it predicts to gain "
        f"{adaptive_drafts.MIN_GAIN - 1:.0%} or more",
        f"a decision to draft holds for {adaptive_drafts.PLAN_STEPS} steps",
        f"it makes {words[loss_limit.PLAIN_STEPS]} steps without drafts now and then: first once it has drafted for as "
        f"long as {loss_limit.FIRST_PLAIN} of them take, then {2 * loss_limit.FIRST_PLAIN}, and so on, doubling up to "
        f"{loss_limit.PLAIN_EVERY}",
        f"once drafts have cost {words[loss_limit.MOST_LOST]} plain steps more than they saved",
        f"so that the loss it has measured comes to about {loss_limit.LOSS_SHARE:.0%} in the long run",
    ):
        assert stated in text, stated
