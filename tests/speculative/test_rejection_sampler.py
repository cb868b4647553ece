"""Speculation changes the speed and not the distribution: by exact enumeration, by χ², and with planted mistakes.

The model of these tests is a Markov chain over five tokens: the distribution of the next token depends on the last
one (row 5: nothing yet). Drafts have γ = 2. Three tokens are compared, because the third can be a bonus token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from torch import Tensor

from minillm.errors import DraftError, NonFiniteLogitsError
from minillm.sampling import Draw, SamplingParams, SamplingRow, probs_from_logits, sample, uniform
from minillm.speculative import rejection_sampler
from minillm.speculative.rejection_sampler import (
    AcceptRule,
    Verdict,
    acceptance_probability,
    rejection_sample,
    residual,
)
from tests import chi_square
from tests.speculative.wrong_rules import WRONG_RULES, Judge, full_target, target_alone

VOCAB, START, GAMMA, LENGTH = 5, 5, 2, 3
ALMOST_ONE = 1 - 2.0**-24


# --- exact enumeration -----------------------------------------------------------------------------------------------


def relabelled(distribution: list[int], state: int) -> list[Fraction]:
    """The same numbers, dealt to other tokens in each state; all are multiples of 1/16."""
    return [Fraction(distribution[(token + 2 * state) % VOCAB], 16) for token in range(VOCAB)]


# p/q is 1/2, 1/2, 1 and 5/2, and the residual gives 1/2 to each of two tokens: every threshold is a multiple of 1/16,
# so 16 uniforms in the middles of the sixteenths integrate exactly, without a tolerance.
EXACT_TARGET = [relabelled([4, 2, 2, 5, 3], state) for state in range(VOCAB + 1)]
EXACT_DRAFT = [relabelled([8, 4, 2, 2, 0], state) for state in range(VOCAB + 1)]
MIDDLES = [(2 * i + 1) / 32 for i in range(16)]
ACCEPT_MIDDLES = [0.25, 0.75]


def enumerate_round(state: int, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Fraction]:
    """The exact distribution of what one round commits: the real function at every draft and every uniform."""
    target = torch.tensor([[float(p) for p in row] for row in EXACT_TARGET])
    draft = torch.tensor([[float(q) for q in row] for row in EXACT_DRAFT])
    cases = [
        case
        for case in product(range(VOCAB), range(VOCAB), ACCEPT_MIDDLES, ACCEPT_MIDDLES, MIDDLES)
        if EXACT_DRAFT[state][case[0]] * EXACT_DRAFT[case[0]][case[1]] > 0
    ]

    def injected(case: int, index: int, purpose: Draw) -> float:
        return cases[case][2 + index] if purpose is Draw.ACCEPT else cases[case][4]

    monkeypatch.setattr(rejection_sampler, "uniform", injected)
    verdicts = judge(
        [[x1, x2] for x1, x2, *_ in cases],
        [draft[[state, x1]] for x1, *_ in cases],
        target[[row for x1, x2, *_ in cases for row in (state, x1, x2)]],
        range(len(cases)),
        [0] * len(cases),
    )
    outcome: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for (x1, x2, *_), verdict in zip(cases, verdicts, strict=True):
        outcome[tuple(verdict.token_ids)] += EXACT_DRAFT[state][x1] * EXACT_DRAFT[x1][x2] / (2 * 2 * 16)
    return outcome


def enumerate_joint(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Fraction]:
    """The exact joint distribution of the first three committed tokens, over as many rounds as that takes."""
    rounds = [enumerate_round(state, judge, monkeypatch) for state in range(VOCAB + 1)]
    joint: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    open_ends = {(): Fraction(1)}
    while open_ends:
        longer: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        for tokens, weight in open_ends.items():
            for more, chance in rounds[tokens[-1] if tokens else START].items():
                grown = (*tokens, *more)[:LENGTH]
                (joint if len(grown) == LENGTH else longer)[grown] += weight * chance
        open_ends = longer
    return joint


def exact_target_joint() -> dict[tuple[int, ...], Fraction]:
    joint = {}
    for tokens in product(range(VOCAB), repeat=LENGTH):
        states = [START, *tokens[:-1]]
        joint[tokens] = math.prod(EXACT_TARGET[state][token] for state, token in zip(states, tokens, strict=True))
    return joint


def test_the_joint_of_three_tokens_is_exactly_the_targets(monkeypatch):
    """No statistics: equality of fractions, all randomness of `rejection_sample` enumerated."""
    assert enumerate_joint(rejection_sample, monkeypatch) == exact_target_joint()


@pytest.mark.parametrize("name", [name for name in WRONG_RULES if "uniform" not in name])
def test_enumeration_sees_every_wrong_rule(name, monkeypatch):
    assert enumerate_joint(WRONG_RULES[name], monkeypatch) != exact_target_joint()


positive = st.lists(st.integers(0, 50), min_size=12, max_size=12).filter(any)


@settings(max_examples=200)
@given(positive, positive)
def test_acceptance_and_residual_add_up_to_the_target(p_weights, q_weights):
    """q(y)·a(y) + (1 - Σ q·a)·residual(y) = p(y), whatever p and q are, zeros and equality included."""
    p, q = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (p_weights, q_weights))
    possible = q.nonzero().squeeze(1)
    accepted = torch.zeros_like(q)
    rows = len(possible), -1
    chances = acceptance_probability(p.expand(rows), q.expand(rows), possible)
    accepted[possible] = q[possible] * chances
    torch.testing.assert_close(accepted + (1 - accepted.sum()) * residual(p, q), p, atol=1e-12, rtol=0)


# --- χ² --------------------------------------------------------------------------------------------------------------

generator = torch.Generator().manual_seed(4)
TARGET = 0.1 + 0.5 * torch.softmax(torch.randn(VOCAB + 1, VOCAB, generator=generator), -1)
DRAFT = torch.softmax(torch.randn(VOCAB + 1, VOCAB, generator=generator), -1)
NUM_SEQUENCES = 5000


def draft_two(states: Tensor, seeds: list[int], indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled drafts `[n, 2]`, their q `[n, 2, vocab]` and the target's rows `[n, 3, vocab]`."""
    chain = [states]
    for j in range(GAMMA):
        u = torch.tensor([uniform(seed, index + j, Draw.DRAFT) for seed, index in zip(seeds, indices, strict=True)])
        chain.append(sample(DRAFT[chain[-1]], u))
    tokens, before = torch.stack(chain[1:], 1), torch.stack(chain, 1)
    return tokens, DRAFT[before[:, :-1]], TARGET[before]


def draft_argmax(states: Tensor, *_: list[int]) -> tuple[Tensor, None, Tensor]:
    """Deterministic drafts: the draft model's favourite."""
    chain = [states]
    for _ in range(GAMMA):
        chain.append(DRAFT[chain[-1]].argmax(-1))
    return torch.stack(chain[1:], 1), None, TARGET[torch.stack(chain, 1)]


def draft_two_hide_q(states: Tensor, seeds: list[int], indices: list[int]) -> tuple[Tensor, None, Tensor]:
    """Sampled drafts that are passed off as deterministic."""
    tokens, _, target = draft_two(states, seeds, indices)
    return tokens, None, target


def draft_argmax_claim_q(states: Tensor, *_: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts by argmax that claim to be drawn from the softmax: seen in two public implementations."""
    tokens, _, target = draft_argmax(states)
    return tokens, DRAFT[torch.cat([states[:, None], tokens[:, :-1]], 1)], target


def draft_two_claim_cooler_q(states: Tensor, seeds: list[int], indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The draft was drawn at temperature 1 and reports the probabilities of temperature 0.5."""
    tokens, q, target = draft_two(states, seeds, indices)
    return tokens, q**2 / (q**2).sum(-1, keepdim=True), target


def speculate(judge: Judge, drafting=draft_two) -> tuple[Tensor, int]:
    """The first three tokens of many sequences `[NUM_SEQUENCES, 3]`, and how many first drafts were accepted."""
    sequences: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
    first_accepted = 0
    while seeds := [s for s, tokens in enumerate(sequences) if len(tokens) < LENGTH]:
        states = torch.tensor([sequences[s][-1] if sequences[s] else START for s in seeds])
        indices = [len(sequences[s]) for s in seeds]
        tokens, q, target = drafting(states, seeds, indices)
        q_rows = [None] * len(seeds) if q is None else list(q)
        verdicts = judge(tokens.tolist(), q_rows, target.flatten(0, 1), seeds, indices)
        for s, verdict in zip(seeds, verdicts, strict=True):
            first_accepted += not sequences[s] and verdict.num_accepted > 0
            sequences[s] += verdict.token_ids
    return torch.tensor([tokens[:LENGTH] for tokens in sequences]), first_accepted


def p_value(tokens: Tensor) -> float:
    """χ² of the 125 joint counts against the target's. No probability is below 0.1, so no expected count below 5."""
    counts = (tokens[:, 0] * VOCAB**2 + tokens[:, 1] * VOCAB + tokens[:, 2]).bincount(minlength=VOCAB**3)
    first = TARGET[START].double()[:, None, None]
    expected = first * TARGET[:VOCAB].double()[:, :, None] * TARGET[:VOCAB].double()[None]
    return chi_square.p_value(counts, expected.flatten())


@pytest.mark.parametrize("drafting", [draft_two, draft_argmax])
def test_speculation_samples_from_the_target(drafting):
    """End to end at a fixed seed. Over random seeds a correct sampler fails once in 10^6 runs."""
    tokens, _ = speculate(rejection_sample, drafting)
    assert p_value(tokens) > 1e-6


def test_chi_square_sees_one_uniform_for_two_purposes():
    """Enumeration, which draws nothing, does not."""
    tokens, _ = speculate(WRONG_RULES["one uniform to accept and to recover"])
    assert p_value(tokens) < 1e-6


@pytest.mark.parametrize("drafting", [draft_argmax_claim_q, draft_two_claim_cooler_q])
def test_chi_square_sees_a_draft_that_lies_about_q(drafting):
    tokens, _ = speculate(rejection_sample, drafting)
    assert p_value(tokens) < 1e-6


def binomial_p_value(successes: int, rate: float) -> float:
    return binomtest(successes, NUM_SEQUENCES, rate).pvalue


def test_acceptance_rate_is_the_overlap_of_p_and_q():
    """α = Σ min(p, q) = 1 - TV(p, q). Over random seeds a correct sampler fails once in 10^6 runs."""
    p, q = TARGET[START].double(), DRAFT[START].double()
    overlap = float(torch.minimum(p, q).sum())
    assert overlap == pytest.approx(1 - float((p - q).abs().sum()) / 2)
    _, accepted = speculate(rejection_sample)
    assert binomial_p_value(accepted, overlap) > 1e-6
    assert binomial_p_value(accepted, overlap - 0.07) < 1e-6


def test_accepting_with_p_of_x_alone_is_exact_but_slow():
    """A rule that articles give: accept x with p(x), else draw from p without x. It needs no q at all.

    It is exact for deterministic drafts, where it *is* the rule, and for sampled drafts too: given any x, it emits y
    with chance p(x) at y = x and (1 - p(x))·p(y)/(1 - p(x)) elsewhere, which is p(y) whatever x was. What it costs is
    acceptance: Σ q·p instead of Σ min(p, q). (Two runs, each fails by chance once in 10^6 at random seeds, for each of
    the two tests.)
    """
    p, q = TARGET[START].double(), DRAFT[START].double()
    tokens, accepted = speculate(rejection_sample, draft_two_hide_q)
    assert p_value(tokens) > 1e-6
    assert binomial_p_value(accepted, float((p * q).sum())) > 1e-6
    assert accepted < 0.6 * NUM_SEQUENCES * float(torch.minimum(p, q).sum())

    tokens, accepted = speculate(rejection_sample, draft_argmax)
    assert p_value(tokens) > 1e-6
    assert binomial_p_value(accepted, float(p[q.argmax()])) > 1e-6


def test_accepting_with_p_of_x_alone_and_the_usual_residual_is_only_exact_for_deterministic_drafts():
    """One-hot q makes max(0, p - q) the same as p without x; with sampled drafts the two halves do not fit."""
    mixed = WRONG_RULES["p(x) with the residual of p/q"]
    assert p_value(speculate(mixed, draft_argmax)[0]) > 1e-6
    assert p_value(speculate(mixed, draft_two)[0]) < 1e-6


# --- one verdict at a time -------------------------------------------------------------------------------------------


def judge_one(drafts: list[int], q: Tensor | None, p: Tensor, seed: int = 0, index: int = 0) -> Verdict:
    return rejection_sample([drafts], [q], p, [seed], [index])[0]


@pytest.mark.parametrize("sampled", [True, False])
def test_at_temperature_zero_a_draft_stays_if_it_is_the_argmax(sampled):
    greedy = SamplingParams(temperature=0)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for seed in range(200):
        target = torch.randn(GAMMA + 1, VOCAB, generator=generator)
        draft = target[:GAMMA] + torch.randn(GAMMA, VOCAB, generator=generator)
        p, q = (probs_from_logits(logits, [SamplingRow(greedy)] * len(logits)) for logits in (target, draft))
        drafts, best = draft.argmax(-1).tolist(), target.argmax(-1).tolist()
        agreed = next((j for j in range(GAMMA) if drafts[j] != best[j]), GAMMA)
        verdict = judge_one(drafts, q if sampled else None, p, seed)
        assert verdict == Verdict(best[: agreed + 1], agreed)
        seen.add(agreed)
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(
    ("target_filter", "draft_filter"), [({"top_k": 2}, {"top_k": 2}), ({"top_p": 0.5}, {"min_p": 0.5})]
)
def test_filters_that_leave_nothing_in_common_reject_every_draft(target_filter, draft_filter):
    logits = torch.tensor([[4.0, 3.9, 0.0, -3.8, -4.0]])
    p = probs_from_logits(logits, [SamplingRow(SamplingParams(**target_filter))])
    q = probs_from_logits(-logits, [SamplingRow(SamplingParams(**draft_filter))])
    assert not ((p > 0) & (q > 0)).any()
    assert torch.equal(residual(p, q), p)
    for seed in range(100):
        x = int(sample(q, torch.tensor([uniform(seed, 0, Draw.DRAFT)])))
        verdict = judge_one([x], q, p.expand(2, -1), seed)
        assert verdict.num_accepted == 0
        assert verdict.token_ids == sample(p, torch.tensor([uniform(seed, 0, Draw.RECOVER)])).tolist()


def test_filtered_target_never_emits_a_filtered_token():
    p = torch.tensor([[0.6, 0.4, 0.0, 0.0, 0.0]]).expand(3, -1)
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]).expand(2, -1)
    for seed in range(300):
        u = torch.tensor([uniform(seed, index, Draw.DRAFT) for index in range(2)])
        assert set(judge_one(sample(q, u).tolist(), q, p, seed).token_ids) <= {0, 1}


@pytest.mark.parametrize("nothing", [None, torch.empty(0, VOCAB)])
def test_without_drafts_a_request_samples_as_without_speculation(nothing):
    p = TARGET[:1]
    for seed in range(50):
        plain = sample(p, torch.tensor([uniform(seed, 7, Draw.SAMPLE)])).tolist()
        assert judge_one([], nothing, p, seed, index=7) == Verdict(plain, 0)
    assert rejection_sample([], [], torch.empty(0, VOCAB), [], []) == []


def test_bonus_token_comes_from_the_row_after_the_last_draft():
    for seed in range(20):
        p = torch.eye(VOCAB)[[1, 3, 4]]
        assert judge_one([1, 3], None, p, seed) == Verdict([1, 3, 4], 2)
        assert judge_one([1, 0], None, p, seed) == Verdict([1, 3], 1)
        assert judge_one([0, 3], None, p, seed) == Verdict([1], 0)


@pytest.mark.parametrize("off_by", [1 - 2.0**-23, 1 - 2.0**-20])
def test_rejection_by_rounding_where_p_equals_q_recovers_from_p(off_by, monkeypatch):
    """p is q, times a rounding error: max(0, p - q) is zero everywhere, and 0/0 must not become NaN."""
    q = torch.tensor([[0.5, 0.25, 0.25, 0.0, 0.0]])
    p = q * off_by
    assert torch.equal(residual(p, q), p)
    monkeypatch.setattr(rejection_sampler, "uniform", lambda *_: ALMOST_ONE)
    assert judge_one([0], q, p.expand(2, -1)) == Verdict([2], 0)


def test_rejecting_a_certain_deterministic_draft_by_rounding_emits_it_anyway(monkeypatch):
    """p(x) is one rounding below 1 and nothing else is possible: p without x would be empty."""
    p = torch.zeros(2, VOCAB)
    p[:, 3] = ALMOST_ONE
    monkeypatch.setattr(rejection_sampler, "uniform", lambda *_: ALMOST_ONE)
    assert judge_one([3], None, p) == Verdict([3], 0)


@pytest.mark.parametrize(("u", "accepted"), [(0.0, 1), (0.4999, 1), (0.5, 0), (ALMOST_ONE, 0)])
def test_a_draft_stays_if_its_uniform_is_below_the_ratio(u, accepted, monkeypatch):
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    monkeypatch.setattr(rejection_sampler, "uniform", lambda *_: u)
    assert judge_one([0], q, p.expand(2, -1)).num_accepted == accepted
    assert judge_one([1], q, p.expand(2, -1)).num_accepted == 1


def test_each_uniform_is_asked_for_at_its_own_index_and_purpose(monkeypatch):
    asked = []

    def recorded(seed: int, index: int, purpose: Draw) -> float:
        asked.append((seed, index, purpose))
        return 0.0

    monkeypatch.setattr(rejection_sampler, "uniform", recorded)
    sure, never = torch.eye(VOCAB)[[2, 2]], torch.eye(VOCAB)[[1, 1]]
    rejection_sample([[2], [2]], [None, None], torch.cat([sure, never]), [11, 22], [40, 50])
    assert sorted(asked) == [
        (11, 40, Draw.ACCEPT),
        (11, 41, Draw.SAMPLE),
        (22, 50, Draw.ACCEPT),
        (22, 50, Draw.RECOVER),
    ]


def ragged_batch(num_requests: int, vocab: int) -> tuple:
    """Requests with 0 to 5 drafts; every third one drafts deterministically."""
    generator = torch.Generator().manual_seed(1)
    drafts, draft_probs, target_rows = [], [], []
    for r in range(num_requests):
        k = (5, 0, 3, 1)[r % 4]
        p = torch.softmax(2 * torch.randn(k + 1, vocab, generator=generator), -1)
        q = torch.softmax(p[:k].log() + torch.randn(k, vocab, generator=generator), -1)
        u = torch.tensor([uniform(r, 100 + j, Draw.DRAFT) for j in range(k)])
        drafts.append((q.argmax(-1) if r % 3 == 0 else sample(q, u)).tolist())
        draft_probs.append(None if r % 3 == 0 else q)
        target_rows.append(p)
    return drafts, draft_probs, target_rows


def test_a_verdict_does_not_depend_on_the_rest_of_the_batch():
    drafts, draft_probs, target_rows = ragged_batch(64, 300)
    seeds, first = list(range(64)), list(range(100, 164))
    together = rejection_sample(drafts, draft_probs, torch.cat(target_rows), seeds, first)
    alone = [judge_one(*case) for case in zip(drafts, draft_probs, target_rows, seeds, first, strict=True)]
    assert together == alone
    assert {v.num_accepted for v in together} >= {0, 1, 2, 3}


def test_inputs_are_left_as_they_were():
    drafts, draft_probs, target_rows = ragged_batch(8, 20)
    target = torch.cat(target_rows)
    before, q_before = target.clone(), [None if q is None else q.clone() for q in draft_probs]
    rejection_sample(drafts, draft_probs, target, list(range(8)), [0] * 8)
    assert torch.equal(target, before)
    assert all(q is None or torch.equal(q, old) for q, old in zip(draft_probs, q_before, strict=True))


def test_a_rule_of_your_own_plugs_in():
    """Accept all, recover never: the drafts come through whatever the target thinks of them."""
    naive = AcceptRule(accept=lambda p, q, x: torch.ones(len(x)), recover=full_target)
    drafts, draft_probs, target_rows = ragged_batch(8, 20)
    verdicts = rejection_sample(drafts, draft_probs, torch.cat(target_rows), list(range(8)), [0] * 8, rule=naive)
    assert [v.token_ids[:-1] for v in verdicts] == drafts


def test_the_article_rule_equals_the_exact_one_for_deterministic_drafts():
    q = torch.eye(VOCAB)[[4, 0]]
    x = torch.tensor([4, 0])
    torch.testing.assert_close(target_alone(TARGET[:2], q, x), acceptance_probability(TARGET[:2], q, x))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_draft_that_its_own_q_rules_out_is_refused():
    q = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    with pytest.raises(DraftError, match=r"request 0: drafts \[3\] .* \[nan\]"):
        judge_one([3], q, TARGET[:2])


@pytest.mark.parametrize(
    ("drafts", "q", "rows", "message"),
    [
        ([1, 2], None, 2, "has 2 rows, 3 are needed"),
        ([1, 2], torch.ones(1, VOCAB), 3, r"shape \[1, 5\], must be .* \[2, 5\]"),
        ([1], torch.ones(1, VOCAB + 1), 2, "pad or cut"),
        ([VOCAB], None, 2, "vocabulary of 5"),
        ([-1], None, 2, "vocabulary of 5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(drafts, q, rows, message):
    with pytest.raises(DraftError, match=message):
        judge_one(drafts, q, TARGET[:rows])


def test_one_of_each_per_request():
    with pytest.raises(DraftError, match="2 requests came with 1"):
        rejection_sample([[], []], [None], TARGET[:2], [0, 1], [0, 0])


def test_a_broken_target_row_is_refused():
    with pytest.raises(NonFiniteLogitsError):
        judge_one([], None, torch.zeros(1, VOCAB))


def test_a_distribution_of_another_dtype_is_read_as_the_targets():
    torch.manual_seed(0)
    p, q = (torch.rand(rows, 5).softmax(-1) for rows in (3, 2))
    for seed in range(20):
        [right] = rejection_sample([[1, 2]], [q], p, [seed], [7])
        assert rejection_sample([[1, 2]], [q.double()], p, [seed], [7]) == [right]
