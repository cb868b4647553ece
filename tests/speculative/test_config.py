"""`speculative_config`: vLLM's names and defaults, and a clear word about what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from minillm.errors import ConfigError, UnknownOptionError, UnsupportedError
from minillm.speculative.config import SpeculativeConfig


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
    assert config.lookup == sizes and config.max_drafts == 4


def test_suffix_drafts_as_many_as_its_depth_unless_told() -> None:
    assert SpeculativeConfig(method="suffix").max_drafts == 24
    assert SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=7).max_drafts == 7
    assert SpeculativeConfig(method="suffix", num_speculative_tokens=3).max_drafts == 3
    assert SpeculativeConfig(method="suffix").suffix_options == {}
    given = SpeculativeConfig(
        method="suffix", suffix_decoding_max_cached_requests=0, suffix_decoding_max_spec_factor=0.5
    )
    assert given.suffix_options == {"max_cached_requests": 0, "max_spec_factor": 0.5}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "eagle"}, UnsupportedError, "'draft_model', 'ngram' or 'suffix'"),
        ({"method": "ngram", "prompt_lookup_max": 0}, ConfigError, "prompt_lookup_max=0"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, ConfigError, "prompt_lookup_min=3"),
        ({"method": "ngram", "model": "minicoder-draft"}, ConfigError, "model='minicoder-draft'.*'draft_model'"),
        ({"method": "suffix", "prompt_lookup_max": 3}, ConfigError, "prompt_lookup_max=3.*'ngram'.*'suffix'"),
        ({"method": object, "quantization": "int8"}, ConfigError, "quantization='int8'.*'object'"),
        ({"model": "x", "suffix_decoding_max_tree_depth": 3}, ConfigError, "'suffix'.*'draft_model'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, ConfigError, "suffix_decoding_max_tree_depth=0"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, ConfigError, "at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -0.5}, ConfigError, "-0.5.*at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("inf")}, ConfigError, "inf"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, ConfigError, "1.5.*at most 1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "0.1"}, ConfigError, "'0.1'"),
        ({"method": "ngram", "ngram_prompt_lookup_max": 3}, UnknownOptionError, "ngram_prompt_lookup_max"),
    ],
    ids=str,
)
def test_bad_options_name_themselves(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SpeculativeConfig.from_dict(options)
