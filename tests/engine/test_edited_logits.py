"""`logit_bias`, `allowed_token_ids` and `bad_words` in a whole engine, with and without drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=3)
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n", "import os\nimport sys\n\n\nclass Path(object):\n"]
DRAFT = {"method": "draft_model", "model": "minicoder-draft", "adaptive": False}
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft_model": DRAFT,
    "blocks": {**DRAFT, "rejection_sample_method": "block"},
    "draft_tree": {**DRAFT, "method": "draft_tree"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "adaptive": False},
    "heads": {"method": "heads", "adaptive": False},
}


@cache
def llm(drafter: str) -> LLM:
    return LLM("minicoder", speculative_config=DRAFTERS[drafter])


def outputs(drafter: str, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm(drafter).generate(PROMPTS, params, use_tqdm=False)]


@cache
def usual(drafter: str, greedy: bool) -> list[list[int]]:
    """What it writes without any of the three."""
    return outputs(drafter, GREEDY if greedy else SAMPLED)


def pairs(tokens: list[int]) -> set[tuple[int, int]]:
    return set(pairwise(tokens))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_output_contains_what_it_may_and_nothing_else(drafter: str, greedy: bool) -> None:
    params = GREEDY if greedy else SAMPLED
    usual_tokens = {token for tokens in usual(drafter, greedy) for token in tokens}
    text = llm(drafter).get_tokenizer().decode
    # The words that it would write: of one token, and of two.
    words = [text([token]) for token in sorted(usual_tokens)[::2] if text([token]).strip()]
    found = outputs(drafter, replace(params, bad_words=words))
    again = {text([token]) for tokens in found for token in tokens}
    assert again.isdisjoint(words) and len(words) > 5

    tokenizer = llm(drafter).get_tokenizer()
    two = [p for tokens in usual(drafter, greedy) for p in pairs(tokens) if tokenizer.encode(text(p)) == list(p)]
    two = [pair for pair in two if not text(pair).startswith((" ", "\n"))]
    assert two
    found = outputs(drafter, replace(params, bad_words=[text(pair) for pair in two]))
    assert all(pairs(tokens).isdisjoint(two) for tokens in found)

    allowed = sorted(usual_tokens)[::3]
    found = outputs(drafter, replace(params, allowed_token_ids=allowed))
    assert {token for tokens in found for token in tokens} <= set(allowed) < usual_tokens

    forced = allowed[-1]
    assert outputs(drafter, replace(params, logit_bias={forced: 1000.0})) == [[forced] * 40] * 2
    assert not any(forced in tokens for tokens in outputs(drafter, replace(params, logit_bias={forced: -1000.0})))


EDITS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {200: 4.0, 11: -6.0, 13: 3.0}},
    "allowed": {"allowed_token_ids": list(range(0, 4096, 3))},
    "bad words": {"bad_words": ["return", "self.", "a", "(", "def __init__", "if"]},
    "all": {
        "logit_bias": {201: 2.5},
        "allowed_token_ids": list(range(0, 4096, 2)),
        "bad_words": ["(", "="],
        "frequency_penalty": 0.7,
        "min_tokens": 20,
        "ignore_eos": False,
    },
}


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "plain"])
def test_drafts_do_not_change_greedy_tokens(drafter: str, edits: str) -> None:
    params = replace(GREEDY, **EDITS[edits])
    expected = outputs("plain", params)
    assert expected != usual("plain", True)
    assert outputs(drafter, params) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {4096: 1.0}}, r"logit_bias has 4096; ids must be integers from 0 to 4095"),
        ({"allowed_token_ids": [5, 4100]}, r"allowed_token_ids has 4100; ids must be integers from 0 to 4095"),
        ({"bad_words": ["a", " "]}, r"bad_words has ' ', which has no tokens"),
        ({"allowed_token_ids": [69], "bad_words": ["a", "b"]}, r"may forbid all 1 allowed tokens; give more"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, r"min_tokens=1 may forbid all 1 allowed tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_chosen_is_refused_before_work_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outputs("plain", SamplingParams(**options))
