"""`speculative_config`: vLLM's names and defaults, and a clear word about what makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from minillm import LLM
from minillm.errors import ConfigError, UnknownOptionError, UnsupportedError
from minillm.speculative import config as speculative_config
from minillm.speculative.block_verification import BlockRule
from minillm.speculative.config import SpeculativeConfig, find_method
from minillm.speculative.drafter import Draft, Drafter
from minillm.speculative.rejection_sampler import EXACT, Rule
from tests.conftest import SHIPPED_ADAPTIVE, TinyPair


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_ngram_sizes_default_as_in_vllm(options: dict[str, int], sizes: tuple[int, int]) -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", **options})
    assert config.options.lookup == sizes and config.max_drafts == 4


def test_suffix_drafts_as_many_as_its_depth_unless_told() -> None:
    def most(**options: int) -> int:
        return SpeculativeConfig.from_dict({"method": "suffix", **options}).max_drafts

    assert (most(), most(suffix_decoding_max_tree_depth=7), most(num_speculative_tokens=3)) == (24, 7, 3)


class Own(Drafter):
    """A drafter with an option of its own, declared beside it."""

    @dataclass(frozen=True)
    class Options:
        patience: int = 1

    def propose(self, requests, num_drafts):
        return [Draft([]) for _ in requests]


def test_a_drafter_of_ones_own_declares_its_options() -> None:
    config = SpeculativeConfig.from_dict({"method": Own, "patience": 3, "num_speculative_tokens": 2})
    assert config.options == Own.Options(3) and config.method_name == "Own"
    assert SpeculativeConfig.from_dict({"method": Own}).options.patience == 1
    with pytest.raises(UnknownOptionError, match="'impatience'"):
        SpeculativeConfig.from_dict({"method": Own, "impatience": 3})


@pytest.mark.parametrize("name, rule", [("standard", EXACT), ("block", BlockRule())])
def test_the_engine_judges_by_the_chosen_rule(tiny: TinyPair, name: str, rule: Rule) -> None:
    """Both are exact, so no text tells them apart; of the others, tests of their own show what they do to text."""
    config = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": name}
    assert LLM(str(tiny.target), device="cpu", speculative_config=config).engine.judge.rule == rule


TREE = {"method": "draft_tree", "model": "x"}
STAGED = {"method": "staged", "model": "x"}
SYNTHETIC = {"method": "ngram", "rejection_sample_method": "synthetic", "num_speculative_tokens": 4}
MEASURED = {**TREE, "tree_shape": "measured"}


def test_a_tree_is_as_large_as_its_shape() -> None:
    def most(**options: Any) -> int:
        return SpeculativeConfig.from_dict({**TREE, **options}).max_drafts

    assert (most(), most(tree_branching=[3, 1]), most(tree_shape="measured", tree_nodes=9)) == (14, 6, 9)
    assert most(speculative_token_tree=[(0,), (0, 0)]) == most(speculative_token_tree="[(0,), (0, 0)]") == 2


def test_a_fallback_has_options_and_a_limit_of_its_own() -> None:
    model = {"method": "draft_model", "model": "x", "num_speculative_tokens": 3}
    config = SpeculativeConfig.from_dict({"method": "suffix", "fallback_below": 2, "fallback": model})
    assert (config.max_own_drafts, config.fallback.max_drafts, config.max_drafts) == (24, 3, 24)
    assert config.method_name == "suffix, then draft_model" and config.model == "x" and not config.proposes_trees
    trees = {"method": "ngram", "fallback": {"method": "suffix", "fallback": TREE}}
    assert SpeculativeConfig.from_dict(trees).proposes_trees and SpeculativeConfig.from_dict(trees).max_drafts == 24
    assert SpeculativeConfig.from_dict({"method": "ngram", "fallback": None}).fallback is None


def test_drafts_adapt_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tests run with the fixture `every_draft`, which changes the default."""
    monkeypatch.setattr(speculative_config, "ADAPTIVE", SHIPPED_ADAPTIVE)
    ngram = {"method": "ngram", "fallback": {"method": "suffix"}}
    for given, adapts in ((ngram, True), ({**ngram, "adaptive": False}, False)):
        read = SpeculativeConfig.from_dict(given)
        assert (read.adaptive, read.fallback.adaptive) == (adapts, adapts)
    assert SpeculativeConfig("ngram", find_method("ngram").Options()).adaptive


def test_a_fallback_may_draft_wherever_the_method_makes_less_than_all_of_its_drafts() -> None:
    given = {"method": "ngram", "fallback": {"method": "suffix"}, "fallback_below": 4}
    assert SpeculativeConfig.from_dict(given).fallback_below == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "eagle"}, UnsupportedError, "'self_quant', 'self_sparse', 'spire', 'staged' or 'suffix'"),
        ({"method": "ngram", "prompt_lookup_max": 0}, ConfigError, "prompt_lookup_max=0"),
        ({"method": "ngram", "num_speculative_tokens": 10**20}, ConfigError, "at most num_speculative_tokens=1024"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1025}, ConfigError, "up to 1025 drafts per round"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, ConfigError, "prompt_lookup_min=3"),
        (
            {"method": "ngram", "model": "small"},
            ConfigError,
            "model='small'.*'draft_model', 'draft_tree', 'heads', 'long', 'prompt_tokens', 'spire' or 'staged'",
        ),
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            ConfigError,
            "prompt_lookup_max=3.*'ngram' or 'staged'.*'suffix'",
        ),
        ({"method": Own, "quantization": "int8"}, ConfigError, "quantization='int8'.*'Own'"),
        ({"method": object}, UnsupportedError, "class 'object'.*pass a Drafter class"),
        ({"method": Drafter}, ConfigError, "drafter Drafter does not define propose; see minillm"),
        ({"method": "draft_tree", "model": "x", "tree_branching": [8, 8]}, ConfigError, "72 drafts, at most 63"),
        ({"method": "draft_tree", "model": "x", "tree_branching": [2, 0]}, ConfigError, "levels=0.*at least 1"),
        ({"method": "draft_tree", "model": "x", "tree_branching": 3}, ConfigError, "tree_branching=3"),
        ({"method": "draft_tree", "tree_branching": [2]}, ConfigError, "needs 'model'"),
        ({**TREE, "tree_branching": [2], "tree_shape": "measured"}, ConfigError, "tree_branching and tree_shape each"),
        ({**TREE, "tree_shape": "round"}, ConfigError, "tree_shape='round' must be 'measured'"),
        ({**TREE, "tree_nodes": 20}, ConfigError, "tree_nodes=20 only affects a measured shape"),
        ({**MEASURED, "tree_nodes": 64}, ConfigError, "tree_nodes=64 makes 64 drafts, at most 63"),
        ({**MEASURED, "tree_levels": 0}, ConfigError, "tree_levels=0"),
        ({**MEASURED, "tree_draft_cost": -1}, ConfigError, "tree_draft_cost=-1 must be a finite number of at least 0"),
        ({**MEASURED, "tree_verify_cost": "x"}, ConfigError, "tree_verify_cost='x'"),
        ({**TREE, "speculative_token_tree": "((("}, ConfigError, r"'\(\(\(' must list each node"),
        ({**TREE, "speculative_token_tree": [(0,), (-1,)]}, ConfigError, "must list each node by the ranks"),
        ({**TREE, "speculative_token_tree": []}, ConfigError, "must list each node by the ranks"),
        ({**TREE, "speculative_token_tree": 5}, ConfigError, "speculative_token_tree='5'"),
        ({**TREE, "speculative_token_tree": [(1,)]}, ConfigError, r"node \(1,\) without \(0,\)"),
        ({"method": "staged"}, ConfigError, "method 'staged' needs 'model'"),
        ({**STAGED, "prompt_lookup_min": 0}, ConfigError, "prompt_lookup_min=0"),
        ({**STAGED, "prompt_lookup_max": 1}, ConfigError, "prompt_lookup_min=2 must be at most prompt_lookup_max=1"),
        ({**STAGED, "prompt_lookup_max": "5"}, ConfigError, "prompt_lookup_max='5'"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, ConfigError, "num_speculative_tokens='4'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, ConfigError, "num_speculative_tokens=-1"),
        ({"method": "ngram", "fallback_below": 2}, ConfigError, "fallback_below=2 needs 'fallback'"),
        ({"method": "ngram", "fallback": "suffix"}, ConfigError, "fallback='suffix' must be a dict with the 'method'"),
        ({"method": "ngram", "fallback": {"model": "x"}}, ConfigError, "must be a dict with the 'method'"),
        ({"method": "ngram", "fallback": {"method": "medusa"}}, UnsupportedError, "'medusa'"),
        ({"method": "ngram", "fallback": {"method": "suffix", "model": "x"}}, ConfigError, "model='x'.*'suffix'"),
        ({"method": "ngram", "fallback": {"method": "suffix"}, "fallback_below": 0}, ConfigError, "fallback_below=0"),
        (
            {"method": "ngram", "fallback": {"method": "suffix", "rejection_sample_method": "block"}},
            ConfigError,
            "rejection_sample_method='block' holds for all drafts; move it out",
        ),
        (
            {"method": "suffix", "adaptive": False, "fallback": {"method": "ngram", "adaptive": True}},
            ConfigError,
            "adaptive=True holds for all drafts; move it out",
        ),
        ({"method": "ngram", "adaptive": "yes"}, ConfigError, "adaptive='yes' must be True or False"),
        ({"method": "ngram", "adaptive": 1}, ConfigError, "adaptive=1 must be True or False"),
        ({"method": "ngram", "adaptive": None}, ConfigError, "adaptive=None must be True or False"),
        (
            {"method": "ngram", "fallback": {"method": "suffix"}, "fallback_below": 5},
            ConfigError,
            "fallback_below=5 is more than 'ngram' ever drafts, 4; lower it",
        ),
        ("suffix", ConfigError, "speculative_config='suffix' must be a dict"),
        ({**SYNTHETIC, "synthetic_acceptance_length": "2"}, ConfigError, "length='2' must be a number"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": ["a"] * 4}, ConfigError, "must list numbers from 0 to 1"),
        ({**TREE, "draft_sample_method": "hot"}, ConfigError, "draft_sample_method='hot'"),
        ({"model": "x", "min_survival": 1.5}, ConfigError, "min_survival=1.5.*at most 1"),
        ({"method": "staged", "model": "x", "min_survival": 0.1}, ConfigError, "min_survival=0.1.*'staged'"),
        ({"model": "x", "min_survival": "0.1"}, ConfigError, "min_survival='0.1'"),
        ({"method": "ngram", "rejection_sample_method": "usual"}, UnsupportedError, "'usual'.*AcceptRule"),
        ({"model": "x", "suffix_decoding_max_tree_depth": 3}, ConfigError, "'suffix'.*'draft_model'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, ConfigError, "suffix_decoding_max_tree_depth=0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ConfigError, "at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -0.5}, ConfigError, "-0.5.*at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("inf")}, ConfigError, "inf must be a finite"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ConfigError, "1.5.*at most 1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "0.1"}, ConfigError, "'0.1'"),
        ({"method": "ngram", "ngram_prompt_lookup_max": 3}, UnknownOptionError, "ngram_prompt_lookup_max"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SpeculativeConfig.from_dict(options)


@pytest.mark.parametrize("branching", [[2] * 20_000, [10**5000]], ids=["deep", "wide"])
def test_a_tree_of_any_size_is_refused_in_few_words(branching: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"tree_branching=\[.* makes at least .* drafts, at most 63") as problem:
        SpeculativeConfig.from_dict({**TREE, "tree_branching": branching})
    assert len(str(problem.value)) < 250


@pytest.mark.parametrize("method", ["draft_tree", "suffix"])
def test_blocks_are_judged_in_chains_only(method: str) -> None:
    tree = {"method": "draft_tree", "model": "minicoder-draft"}
    options = {"method": "suffix", "fallback": tree} if method == "suffix" else tree
    with pytest.raises(UnsupportedError, match=r"'block' judges chains, but method '(suffix, then )?draft_tree'"):
        SpeculativeConfig.from_dict({**options, "rejection_sample_method": "block"})
