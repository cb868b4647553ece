"""Drafts accepted at given rates: the rates come out, and options that make no sense are refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, MinillmError, UnsupportedError
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.synthetic import SyntheticRule
from minillm.trace import TokensCommitted
from tests.conftest import TinyPair

ROUNDS = 4000
SYNTHETIC = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


def accepted(rule: SyntheticRule, num_drafts: int) -> list[int]:
    """How many drafts of each of `ROUNDS` rounds are accepted."""
    p = torch.full((num_drafts + 1, 7), 1 / 7)
    drafts = [[1] * num_drafts]
    return [rule.verdicts(drafts, [None], p, [0], [round_])[0].num_accepted for round_ in range(ROUNDS)]


def test_each_position_is_accepted_at_its_rate() -> None:
    """A rate of 4,000 rounds is within 0.035 (4.4 standard deviations) except one time in 10^5; the seed is fixed."""
    rates = (0.9, 0.6, 0.3, 0.0)
    counts = accepted(SyntheticRule(rates), 4)
    for i, rate in enumerate(rates):
        assert sum(n > i for n in counts) / ROUNDS == pytest.approx(rate, abs=0.035)


@pytest.mark.parametrize(("length", "rates"), [(1, (0, 0, 0)), (2.4, (1, 0.4, 0)), (4, (1, 1, 1))])
def test_a_length_becomes_the_rates_that_vllm_takes(length: float, rates: tuple[float, ...]) -> None:
    rule = SyntheticRule.of_length(length, 3)
    assert rule.rates == pytest.approx(rates)
    assert 1 + sum(accepted(rule, 3)) / ROUNDS == pytest.approx(length, abs=0.035)


def test_the_engine_accepts_what_it_is_told_to(tiny: TinyPair) -> None:
    given = {**SYNTHETIC, "model": str(tiny.draft), "synthetic_acceptance_rates": [1.0, 1.0, 0.0]}
    llm = LLM(str(tiny.target), speculative_config=given)
    with llm.trace() as trace:
        llm.generate(["a b c"], SamplingParams(temperature=0, max_tokens=31, ignore_eos=True), use_tqdm=False)
    rounds = [e for e in trace.events if isinstance(e, TokensCommitted) and e.num_drafts]
    assert {e.num_accepted for e in rounds if e.num_drafts == 3} == {2}


def test_rounds_have_the_length_that_was_asked_for_unless_the_policy_may_shorten_them(
    tiny: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minillm.speculative.config.ADAPTIVE", True)
    given = {**SYNTHETIC, "model": str(tiny.draft), "synthetic_acceptance_length": 1.5}
    assert not SpeculativeConfig.from_dict(given).adaptive
    assert SpeculativeConfig.from_dict({**given, "adaptive": True}).adaptive
    assert SpeculativeConfig.from_dict({"method": "draft_model", "model": str(tiny.draft)}).adaptive


BAD: list[tuple[Mapping[str, object], type[MinillmError], str]] = [
    ({}, ConfigError, "needs either"),
    ({"synthetic_acceptance_rates": [1.0], "synthetic_acceptance_length": 2}, ConfigError, "needs either"),
    ({"synthetic_acceptance_rates": [0.5]}, ConfigError, "one number for each of 2 drafts"),
    ({"synthetic_acceptance_rates": "high"}, ConfigError, "one number for each of 2 drafts"),
    ({"synthetic_acceptance_rates": [0.5, 0.6]}, ConfigError, "must not increase"),
    ({"synthetic_acceptance_rates": [1.5, 0.6]}, ConfigError, "from 0 to 1"),
    ({"synthetic_acceptance_length": 4}, ConfigError, "from 1 to 3"),
    ({"synthetic_acceptance_length": 2, "rejection_sample_method": "block"}, ConfigError, "is for"),
    ({"synthetic_acceptance_length": 2, "method": "draft_tree", "model": "m"}, UnsupportedError, "drafts trees"),
]


@pytest.mark.parametrize(("given", "error", "says"), BAD)
def test_options_that_make_no_sense_are_refused(
    given: Mapping[str, object], error: type[MinillmError], says: str
) -> None:
    base = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    with pytest.raises(error, match=says):
        SpeculativeConfig.from_dict({**base, **given})
