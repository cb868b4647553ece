"""Sampling without waiting: the probabilities and tokens of `minillm.sampling`, and not one look at the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from minillm.errors import MinillmError, NonFiniteLogitsError
from minillm.ops.transfer import copy_to_device
from minillm.sampling import Draw, SamplingParams, SamplingRow, choose, probs_from_logits, uniform, uniforms
from minillm.sampling import device as device_sampling
from minillm.sampling.device import DeviceSampler, SamplingPlan, edited_logits
from tests.chi_square import p_value
from tests.no_waiting import NoWaiting, Waits
from tests.sampling.test_host import VOCAB, batches

CPU = torch.device("cpu")
SAMPLER = DeviceSampler("cpu", "reference")
RULES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.7},
    "biases": {"logit_bias": {5: 2.5, 7: 9.0, 31_998: -3.0}, "top_k": 4},
    "allowed": {"allowed_token_ids": [3, 7, 5, 31_998], "logit_bias": {5: 40.0}, "presence_penalty": 1.0},
    "greedy allowed": {"temperature": 0.0, "allowed_token_ids": [7, 31_998]},
    "all": {"temperature": 1.3, "min_p": 0.02, "top_k": 9, "top_p": 0.8, "frequency_penalty": 0.4},
}


def rows_of(*names: str, forbidden: tuple[int, ...] = ()) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**RULES[name]), [1, 2, 2], [3, 5, 5], forbidden) for name in names]


def device_probs(logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[torch.Tensor, list[bool]]:
    plan = SamplingPlan(rows, logits.shape[1])
    with NoWaiting() as crossed:
        probs, is_valid = SAMPLER.probs(logits, plan, copy_to_device(plan.columns, CPU))
    assert crossed == ({"send": 1} if plan.columns else {})
    return probs, is_valid.tolist()


@settings(max_examples=200)
@given(batches)
def test_probabilities_are_those_of_the_host_to_the_last_bit(batch):
    """Computed by the same processor. On another one sums are taken in another order: equal up to rounding."""
    logits, rows = torch.tensor([logits for logits, _ in batch]), [row for _, row in batch]
    before = logits.clone()
    expected, plan = None, SamplingPlan(rows, VOCAB)
    try:
        expected = probs_from_logits(logits, rows)
    except NonFiniteLogitsError:
        assert not all(device_probs(logits, rows)[1])
        return
    probs, is_valid = device_probs(logits, rows)
    assert torch.equal(probs, expected)
    assert all(is_valid)
    assert plan.is_greedy == all(row.params.is_greedy for row in rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_vocabulary_and_all_rules_side_by_side(dtype):
    logits = (torch.randn(len(RULES), 32_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    rows = rows_of(*RULES, forbidden=(7, 31_999))
    probs, is_valid = device_probs(logits, rows)
    assert torch.equal(probs, probs_from_logits(logits, rows))
    assert all(is_valid)
    for i, row in enumerate(rows):
        assert torch.equal(device_probs(logits[i : i + 1], [row])[0], probs[i : i + 1])


def test_ties_stay_or_go_as_on_the_host():
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]]), torch.zeros(1, 4)
    top_k, top_p = [SamplingRow(SamplingParams(top_k=2))], [SamplingRow(SamplingParams(top_p=0.5))]
    assert (device_probs(logits[0], top_k)[0] > 0).tolist() == [[True, True, True, True, False]]
    assert device_probs(logits[1], top_p)[0].tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize("names", [["greedy"], ["greedy penalties", "greedy"], [*RULES], ["all"], ["top_p", "top_k"]])
def test_tokens_are_those_of_the_host(names):
    logits = torch.randn(20 * len(names), 300, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    rows = rows_of(*names, forbidden=(int(logits[0].argmax()),)) * 20
    drawn = uniforms(range(len(rows)), [9] * len(rows), [Draw.SAMPLE] * len(rows))
    with NoWaiting() as crossed:
        tokens, is_valid = SAMPLER.choose(logits, rows, drawn)
    assert crossed == {"send": 1}
    assert tokens.tolist() == choose(logits, rows, drawn.tolist()).tolist()
    assert is_valid.all()


def test_plain_greedy_rows_send_nothing():
    logits = torch.randn(3, 50)
    with NoWaiting() as crossed:
        tokens, _ = SAMPLER.choose(logits, [SamplingRow(SamplingParams(temperature=0))] * 3, np.zeros(3))
    assert not crossed
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_drawing_reads_once_and_keeps_the_probabilities_where_they_are():
    logits, rows = torch.randn(len(RULES), 90, generator=torch.Generator().manual_seed(2)), rows_of(*RULES)
    drawn = uniforms([5] * len(RULES), range(len(RULES)), [Draw.DRAFT] * len(RULES))
    with NoWaiting() as crossed:
        tokens, probs = SAMPLER.draw(logits, rows, drawn)
    assert crossed == {"send": 1, "read": 1}
    assert torch.equal(probs, probs_from_logits(logits, rows))
    assert tokens == choose(logits, rows, drawn.tolist()).tolist()


@pytest.mark.parametrize("rows", [rows_of("top_p", "all", "min_p"), rows_of("greedy", "greedy", "greedy")])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_are_flagged_and_refused_as_on_the_host(rows, bad):
    logits = torch.randn(3, 20)
    logits[1, 4] = bad
    drawn = np.array([0.1, 0.2, 0.3])
    assert device_probs(logits, rows)[1] == [True, False, True]
    assert SAMPLER.choose(logits, rows, drawn)[1].tolist() == [True, False, True]
    with pytest.raises(NonFiniteLogitsError) as expected:
        probs_from_logits(logits, rows)
    with pytest.raises(NonFiniteLogitsError) as found:
        SAMPLER.draw(logits, rows, drawn)
    assert str(found.value) == str(expected.value)


def test_a_row_without_any_allowed_token_is_flagged():
    rows = [SamplingRow(SamplingParams(temperature=t), forbidden_token_ids=[0, 1]) for t in (0, 1.0)]
    assert device_probs(torch.zeros(2, 2), rows)[1] == [False, False]
    assert SAMPLER.choose(torch.zeros(1, 2), rows[:1], np.zeros(1))[1].tolist() == [False]


def test_what_only_the_device_found_is_an_error_all_the_same():
    with pytest.raises(NonFiniteLogitsError, match="the host recomputed it without error"):
        device_sampling.raise_host_error(lambda: None)


def test_one_sampling_row_per_row_of_logits():
    for ask in (SAMPLER.choose, SAMPLER.draw):
        with pytest.raises(MinillmError, match="2 rows of logits came with 1"):
            ask(torch.zeros(2, 4), rows_of("greedy"), np.zeros(2))


@pytest.mark.parametrize("name", ["greedy", "top_p"])
def test_forbidden_tokens_outside_the_vocabulary_forbid_nothing(name):
    """And above all not what lies behind it in memory: a token of the next row."""
    logits, rows = torch.randn(2, 30), rows_of(name, name, forbidden=(30, 31, 999))
    probs = device_probs(logits, rows)[0]
    assert torch.equal(probs, probs_from_logits(logits, rows))
    assert torch.equal(probs, probs_from_logits(logits, rows_of(name, name)))


def test_draws_follow_the_distribution_that_filters_leave():
    """χ² of 20 000 draws at a fixed seed. Over random seeds a correct sampler fails once in 10^6 runs."""
    logits, params = torch.tensor([1.0, 2.0, 0.5, 3.0, 2.5, -1.0]), SamplingParams(temperature=1.7, top_k=5, top_p=0.9)
    rows = [SamplingRow(params)] * 20_000
    expected = probs_from_logits(logits[None], rows[:1])[0].double()
    drawn = uniforms([123] * 20_000, range(20_000), [Draw.SAMPLE] * 20_000)
    counts = SAMPLER.choose(logits.expand(20_000, -1), rows, drawn)[0].bincount(minlength=6)
    assert 0 < (expected == 0).sum() < 4
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert p_value(counts[kept], expected[kept]) > 1e-6


def test_many_uniforms_at_once_are_the_same_uniforms():
    seeds = [0, 1, -1, 2**64 + 5, -(2**63), 2**200 + 3]
    asked = [(s, i, purpose) for s in seeds for i in (0, 1, 2**40, 2**70) for purpose in Draw]
    found = uniforms(*zip(*asked, strict=True))
    assert found.dtype == np.float64
    assert found.tolist() == [uniform(*one) for one in asked]
    assert uniforms([], [], []).shape == (0,)


WAITING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "looks for the largest": lambda x: x - float(x.max()),
    "asks whether any is NaN": lambda x: x * 0 if x.isnan().any() else x,
    "picks by a mask": lambda x: x[x.isfinite().all(-1)],
    "picks by a list": lambda x: x[[*range(len(x))]],
    "makes a tensor": lambda x: x / torch.tensor([1.0] * len(x))[:, None],
}


@pytest.mark.parametrize("name", WAITING)
def test_a_planted_wait_is_seen(name, monkeypatch):
    monkeypatch.setattr(
        device_sampling, "edited_logits", lambda logits, sent: edited_logits(WAITING[name](logits), sent)
    )
    with pytest.raises(Waits), NoWaiting():
        SAMPLER.choose(torch.randn(2, 20), rows_of("top_p", "greedy"), np.zeros(2))
