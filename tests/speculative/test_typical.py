"""Typical acceptance: exact at temperature 0, lossy above it, and only where it was asked for.

That enumeration and χ² see it is tested with the other wrong rules (`wrong_rules.py`).
"""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, UnsupportedError
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.rejection_sampler import rejection_sample
from minillm.speculative.typical import likely_enough, typical_rule
from tests.conftest import TinyPair

TYPICAL = {"method": "ngram", "rejection_sample_method": "typical", "lossy": True}


def test_a_draft_passes_above_the_threshold_of_its_row() -> None:
    """Entropies 0, ln 4 and ln 20: the thresholds are 0.09, 0.3 / 4 and 0.3 / 20."""
    sure, four, twenty = torch.zeros(3, 20).unbind()
    sure[3], four[:4], twenty[:] = 1.0, 0.25, 0.05
    p = torch.stack((sure, sure, four, four, twenty))
    assert likely_enough(p, p, torch.tensor([3, 4, 0, 9, 7])).tolist() == [1, 0, 1, 0, 1]
    assert likely_enough(p[4:], p[4:], torch.tensor([7]), threshold=0.01, alpha=1.0).tolist() == [1]
    assert likely_enough(p[4:], p[4:], torch.tensor([7]), threshold=1.0, alpha=1.0).tolist() == [0]


def test_text_follows_the_draft_instead_of_the_target() -> None:
    """The target draws token 0 in 60 of 100 cases; a drafter that always proposes token 1 makes it always token 1."""
    p = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    rule = typical_rule()
    drawn = [rejection_sample([[1]], [None], p, [seed], [0], rule)[0].token_ids[0] for seed in range(200)]
    exact = [rejection_sample([[1]], [None], p, [seed], [0])[0].token_ids[0] for seed in range(200)]
    assert set(drawn) == {1}
    assert 50 < sum(exact) < 110  # 80 are expected; outside once in 50,000 runs for random seeds, and these are fixed


def test_greedy_text_is_the_targets(tiny: TinyPair) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["a b a b a", "c d"]
    plain = LLM(str(tiny.target)).generate(prompts, params, use_tqdm=False)
    given = {"model": str(tiny.draft), "rejection_sample_method": "typical", "lossy": True}
    typical = LLM(str(tiny.target), speculative_config=given).generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in typical] == [o.outputs[0].token_ids for o in plain]


def test_sampled_text_is_another_than_that_of_the_exact_rule(tiny: TinyPair) -> None:
    """From the same seeds and the same drafts."""
    params = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
    texts = []
    for chosen in ({}, {"rejection_sample_method": "typical", "lossy": True}):
        llm = LLM(str(tiny.target), speculative_config={"model": str(tiny.draft), **chosen})
        outputs = llm.generate(["a b a b a"] * len(params), params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert all(exact != typical for exact, typical in zip(*texts, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lossy": False}, "changes the distribution .* add 'lossy': True"),
        ({"rejection_sample_method": "block"}, "lossy=True is for rejection_sample_method='typical'"),
        ({"rejection_sample_method": "standard", "lossy": False, "posterior_alpha": 0.2}, "posterior_alpha=0.2 is for"),
        ({"posterior_threshold": 0}, "posterior_threshold=0 must be a number above 0 and at most 1"),
        ({"posterior_threshold": 1, "posterior_alpha": 1}, "reject every draft; lower one of them"),
        ({"posterior_alpha": "much"}, "posterior_alpha='much' must be a number above 0"),
    ],
)
def test_it_must_be_asked_for(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(TYPICAL | options)


@pytest.mark.parametrize("name", ["posterior_threshold", "posterior_alpha"])
def test_either_may_be_1(name: str) -> None:
    """1 for ε: no cap; 1 for δ: the threshold of a sure row is ε."""
    rule = SpeculativeConfig.from_dict(TYPICAL | {name: 1}).accept_rule
    sure = torch.eye(4)[:1]
    assert rule.accept(sure, sure, torch.tensor([0])).item() == 1


def test_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'synthetic' or 'typical'"):
        SpeculativeConfig.from_dict({"method": "ngram", "rejection_sample_method": "usual"})
