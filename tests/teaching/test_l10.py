"""Lesson 10: the references are exact in the engine and by enumeration, and the checks see what the lesson says."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.speculative import rejection_sampler
from minillm.speculative.rejection_sampler import AcceptRule, rejection_sample
from minillm.teaching.check_function import check_function
from minillm.teaching.exercise import Function
from minillm.teaching.exercises._l10_mistakes import _by_token, _draft_by_token
from minillm.teaching.exercises.l10_speculative_decoding import accept_rule, residual, rollback, verify_chain
from minillm.teaching.variants.l10_to_l15 import MAKERS
from minillm.teaching.variants.random_numbers import Draw
from minillm.teaching.workshop import l10_checks as checks
from minillm.teaching.workshop import l10_engine
from minillm.teaching.workshop.l10_broken import BROKEN, FullTarget, OneUniform, OpenFilter
from minillm.teaching.workshop.l10_engine import (
    ChainRule,
    chi_square_of_texts,
    rounds_of,
    sampled_texts,
    target_probabilities,
    through_text,
)
from minillm.teaching.workshop.l10_loop import Loop, pick
from minillm.teaching.workshop.l10_words import (
    DRAFT,
    TARGET,
    TWELVE_MIDDLES,
    WORDS,
    Joint,
    Judge,
    enumerate_round,
    role,
    target_joint,
)
from minillm.trace import DraftProposed, TokensCommitted
from tests.conftest import TinyPair

PROMPT = "def add(a, b):"


def engine(tiny: TinyPair, rule: object = "standard", gamma: int = 3, draft: str | None = None) -> LLM:
    config = {"model": draft or str(tiny.draft), "num_speculative_tokens": gamma, "rejection_sample_method": rule}
    return LLM(str(tiny.target), speculative_config=config)


# --- the references -------------------------------------------------------------------------------------------------


def test_the_first_two_references_are_the_engines_own_functions():
    assert accept_rule is rejection_sampler.acceptance_probability
    assert residual is rejection_sampler.residual
    assert AcceptRule(accept_rule, residual).is_exact


@pytest.mark.parametrize("seed", range(40))
def test_a_round_commits_what_the_engines_rejection_sampler_commits(seed: int, monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(seed)
    q, p = (torch.rand(rows, 6, generator=generator).pow(3) for rows in (3, 4))
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    drafts = q.multinomial(1, generator=generator).flatten().tolist()
    uniforms = torch.rand(4, generator=generator).tolist()
    at = {rejection_sampler.Draw.ACCEPT: lambda index: uniforms[index]}
    monkeypatch.setattr(
        rejection_sampler, "uniform", lambda seed, index, purpose: at.get(purpose, lambda _: uniforms[-1])(index)
    )
    [verdict] = rejection_sample([drafts], [q], p, [0], [0])
    assert verify_chain(drafts, p, q, uniforms) == verdict.token_ids


def test_rollback_keeps_the_rows_that_the_engines_two_counters_keep(tiny: TinyPair):
    llm, seen = engine(tiny), set()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for one in rounds_of(llm, PROMPT, params):
        rows = [*one.text, *one.drafts]
        target, draft = rollback(rows, rows[:-1], len(one.drafts), one.num_accepted)
        assert (len(target), len(draft)) == (one.target_rows, one.draft_rows)
        seen.add(one.num_accepted)
    assert len(seen) > 1


def test_after_full_acceptance_the_draft_has_two_tokens_to_read(tiny: TinyPair):
    llm = engine(tiny, draft=str(tiny.target))
    rounds = list(rounds_of(llm, PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))
    assert rounds and all(len(one.text) + one.num_accepted + 1 - one.draft_rows == 2 for one in rounds)


# --- the engine runs a learner's round ------------------------------------------------------------------------------


def test_a_learners_round_runs_in_the_engine_and_changes_no_greedy_token(tiny: TinyPair):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    calls = []

    def verify(*arguments: object) -> list[int]:
        calls.append(arguments)
        return verify_chain(*arguments)

    [mine] = engine(tiny, ChainRule(verify=verify)).generate([PROMPT], params, use_tqdm=False)
    [plain] = LLM(str(tiny.target)).generate([PROMPT], params, use_tqdm=False)
    assert calls and mine.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_learners_wrong_round_is_not_replaced_by_the_engines(tiny: TinyPair):
    params = SamplingParams(seed=1, max_tokens=24, ignore_eos=True)

    def first_unseen(drafts: list[int], p: torch.Tensor, q: torch.Tensor, uniforms: list[float]) -> list[int]:
        return [drafts[0], 5]

    [wrong] = engine(tiny, ChainRule(verify=first_unseen)).generate([PROMPT], params, use_tqdm=False)
    assert wrong.outputs[0].token_ids.count(5) > 5


def test_drafts_are_put_where_the_probabilities_are(monkeypatch: pytest.MonkeyPatch):
    places = []

    def distribution(drafts: torch.Tensor, probs: None, like: torch.Tensor, first: int, end: int) -> torch.Tensor:
        places.append(drafts.device.type)
        return like[first:end]

    monkeypatch.setattr(l10_engine, "draft_distribution", distribution)
    rule = ChainRule(verify=lambda drafts, p, q, uniforms: [1])
    [verdict] = rule.verdicts([[1, 2]], [None], torch.empty(3, 6, device="meta"), [0], [0])
    assert places == ["meta"] and verdict.token_ids == [1]


def test_texts_of_the_engine_are_tested_against_the_targets_own_probabilities(tiny: TinyPair):
    """By the right rule they pass (a correct engine fails for one choice of seeds in 10^6), by a wrong one not."""
    from minillm.models.loading import load_model

    params = lambda seed: SamplingParams(top_k=2, seed=seed, max_tokens=2, ignore_eos=True)  # noqa: E731
    llm = engine(tiny, ChainRule(verify=verify_chain), gamma=1)
    model = load_model(str(tiny.target), torch.float32, "cpu")
    with torch.inference_mode():
        expected = target_probabilities(model, llm.engine.tokenizer.encode(PROMPT), params(0), 2)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5)
    cells, test = chi_square_of_texts(sampled_texts(llm, PROMPT, params, 200), expected, most_cells=4)
    assert len(cells) == test.degrees > 0 and test.p_value > 1e-6
    always_first = [list(max(expected, key=expected.get))] * 200
    assert chi_square_of_texts(always_first, expected, most_cells=4)[1].p_value < 1e-6


def test_drafts_that_travel_as_text_are_compared_with_the_text_before_them(tiny: TinyPair):
    llm = engine(tiny)
    with llm.trace() as trace:
        llm.generate([PROMPT], SamplingParams(seed=1, max_tokens=20, ignore_eos=True), use_tqdm=False)
    trip = through_text(trace, llm.engine.tokenizer, [PROMPT])
    assert trip.num_rounds > 3 and 0 <= trip.changed <= trip.num_rounds
    assert (trip.example is None) == (trip.changed == 0)
    if trip.example:
        assert trip.example[0] != trip.example[1]


class CutWords:
    """A tokenizer of the letters a and b that cuts "ab" as one token (3) and begins each text with 8. 8 and 9 are
    special, and a decoded text hides them."""

    special_ids = frozenset({8, 9})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [8] * add_special_tokens + [{"A": 3, "a": 1, "b": 2}[letter] for letter in text.replace("ab", "A")]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        special = {8: "", 9: ""} if skip_special_tokens else {8: "<8>", 9: "<9>"}
        return "".join(({1: "a", 2: "b", 3: "ab"} | special)[token] for token in ids)

    def token_text(self, token: int) -> str:
        return self.decode([token])


def test_a_round_is_changed_by_its_own_drafts_only_and_not_counted_with_special_tokens():
    def committed(*tokens: int) -> TokensCommitted:
        return TokensCommitted("r", [*tokens], [""] * len(tokens), ["sampled"] * len(tokens), 2, 1, 0)

    events = [
        DraftProposed("r", [2, 2], []),  # the text "bb" comes back as it was
        committed(1, 2),  # as text these two are one token, which is not the drafts' fault
        DraftProposed("r", [2, 1], []),
        DraftProposed("r", [1, 2], []),  # comes back as token 3
        committed(9),
        DraftProposed("r", [2, 2], []),  # the text has a special token
    ]
    trip = through_text(events, CutWords(), ["b"])
    assert (trip.num_rounds, trip.changed, trip.example) == (3, 1, (["a", "b", "a", "b"], ["ab", "ab"]))
    assert trip.text_changed == 2  # the second and the third


# --- the world of three words ---------------------------------------------------------------------------------------


def test_every_row_of_both_models_is_a_distribution_and_depends_on_every_row_of_the_cache():
    assert {sum(row) for model in (TARGET, DRAFT) for row in model.twelfths} == {12}
    cache = [2, 0, 1, 1, 2, 0, 0, 1, 2, 1, 0, 2]
    rows = [TARGET.row([*cache[:i], word, *cache[i + 1 :]]) for i in range(12) for word in range(3)]
    assert all(len(set(rows[3 * i : 3 * i + 3])) == 3 for i in range(12))


def test_roles_of_the_targets_words_have_the_probabilities_of_its_row():
    for cache in ([], [0], [2, 1], [1, 1, 0, 2]):
        assert sorted((role(cache, word), TARGET.row(cache)[word]) for word in range(3)) == [(0, 3), (1, 3), (2, 6)]


def test_pick_follows_the_row():
    counts = [pick([0.25, 0.0, 0.75], (i + 0.5) / 400) for i in range(400)]
    assert [counts.count(token) for token in range(3)] == [100, 0, 300]
    assert pick([0.5, 0.5, 0.0], 1 - 2**-53) == 1


def test_the_targets_joint_sums_to_one_and_a_round_is_exactly_it():
    exact = target_joint([2, 0], 3)
    assert sum(exact.values()) == 1 and len(exact) == len(WORDS) ** 3
    assert min(exact.values()) == Fraction(1, 64)
    assert enumerate_round(verify_chain, [2, 0]) == exact


def test_one_uniform_for_two_purposes_needs_twelve_values_and_is_wrong_by_them_too():
    judge = OneUniform(verify_chain, rollback).judge
    by_prompt = []
    for word in range(3):
        joint = enumerate_round(judge, [word], gamma=1, accept_middles=TWELVE_MIDDLES)
        by_prompt.append(sum(p for tokens, p in joint.items() if role([word], tokens[0]) == 1))
    assert by_prompt == [Fraction(1, 3), Fraction(1, 4), Fraction(1, 6)]
    assert enumerate_round(judge, [2, 0], gamma=1, accept_middles=TWELVE_MIDDLES) != target_joint([2, 0], 2)


@pytest.mark.parametrize("kind", [kind for kind in BROKEN if kind is not OneUniform], ids=lambda kind: kind.__name__)
def test_four_values_of_a_drafts_uniform_are_as_good_as_twelve(kind: type[Loop]):
    judge = kind(verify_chain, rollback).judge
    for word in range(3):
        assert one_draft(judge, word) == one_draft(judge, word, accept_middles=TWELVE_MIDDLES)


def one_draft(judge: Judge, word: int, **options: object) -> Joint:
    return enumerate_round(judge, [word], gamma=1, **options)


def test_block_verification_accepts_more_and_no_rule_more_than_all():
    one_by_one, as_block = checks.mean_accepted([2, 0], gamma=2)
    assert 0 < one_by_one < as_block < 2


# --- the checks of the loops ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The χ² test of a lesson takes a second; a tenth of its texts tell the coarser mistakes."""
    monkeypatch.setattr(checks, "NUM_TEXTS", 60)


@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_right_loop_passes_every_check(name: str):
    assert not checks.CHECKS[name](Loop, verify_chain, rollback)


COARSE = {
    "FullTarget": "enumeration",
    "FilteredTwice": "enumeration",
    "OneUniform": "enumeration",
    "MixedRule": "enumeration",
    "FirstUnseen": "temperature 0",
    "SoftmaxAtZero": "temperature 0",
    "MinusZero": "temperature 0",
    "NoRollback": "temperature 0",
    "ZeroByZero": "own draft",
    "DraftOneShort": "own draft",
    "NoBonus": "own draft",
    "TargetAlone": "own draft",
    "NeverCuts": "ends",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_every_mistake_is_caught(kind: type[Loop]):
    if kind.__name__ in COARSE:
        caught = checks.wrong_or_raises(checks.CHECKS[COARSE[kind.__name__]], kind, verify_chain, rollback)
    else:  # drafts with a wrong q: only the statistics see them
        texts = checks.many_texts(kind(verify_chain, rollback), 150)
        caught = checks.chi_square([text.tokens for text in texts]).p_value < checks.THRESHOLD
    assert caught


@pytest.mark.parametrize("kind", [Loop, OpenFilter], ids=lambda kind: kind.__name__)
def test_texts_of_loops_without_a_mistake_pass(kind: type[Loop]):
    texts = checks.many_texts(kind(verify_chain, rollback), 100)
    assert checks.chi_square([text.tokens for text in texts]).p_value > checks.THRESHOLD


def test_the_wrong_rule_of_the_lesson_writes_the_drafts_favourite_too_often():
    joint = enumerate_round(FullTarget(verify_chain, rollback).judge, [2, 0])
    first = [sum(p for tokens, p in joint.items() if tokens[0] == word) for word in range(3)]
    row = TARGET.row([2, 0])
    liked = max(range(3), key=lambda word: DRAFT.row([2, 0])[word] - row[word])
    assert first[liked] > Fraction(row[liked], 12)


def test_a_loop_ends_at_its_end_token_or_at_its_limit():
    loop = Loop(verify_chain, rollback, gamma=4)
    lengths = set()
    for seed in range(30):
        tokens = loop.generate([2, 0], 7, seed, end=1).tokens
        assert len(tokens) <= 7 and 1 not in tokens[:-1] and (tokens[-1] == 1 or len(tokens) == 7)
        lengths.add(len(tokens))
    assert len(lengths) > 3


# --- answers of learners --------------------------------------------------------------------------------------------


def test_a_rule_that_never_returns_nan_is_told_why_it_should():
    def answer(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (p.gather(-1, x[:, None]) / q.gather(-1, x[:, None])).squeeze(-1).clamp(max=1.0)

    report = str(check_function("l10.accept_rule", answer))
    assert "which cannot have been drawn from q; it must be NaN" in report


def test_a_slice_by_minus_zero_is_named():
    def answer(target: list[int], draft: list[int], num_drafts: int, num_accepted: int) -> tuple[list[int], list[int]]:
        rejected = num_drafts - num_accepted
        return target[:-rejected], draft[:-rejected]

    assert "rows[:-0] is rows[:0]" in str(check_function("l10.rollback", answer))


@pytest.mark.parametrize("wrong", [_by_token, _draft_by_token])
def test_drawn_cases_see_rows_that_are_dropped_by_their_token(wrong: Function):
    cases = [MAKERS["l10.rollback"](Draw(b"secret", "student", "l10.rollback", number)) for number in range(6)]
    assert any(wrong(*case.args) != rollback(*case.args) for case in cases)
