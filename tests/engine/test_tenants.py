"""Two tenants with salts of their own share one engine: nothing that one is shown may depend on the other's text.

This holds without `adaptive`, as everything here runs; with it the number of drafts depends on how far those of all
were accepted.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, fields
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.trace import DraftProposed, StepFinished, Trace
from tests.conftest import TinyPair

SECRET = "def walk(root):\n    for name in os.listdir(root):"
OTHER = "class Stack:\n    def push(self, item):\n        self.items"
TIMES = {"seconds", "draft_seconds", "target_seconds"}
WAYS = {
    "no draft": None,
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 3},
    "measured tree": {"method": "draft_tree", "tree_shape": "measured", "tree_nodes": 5},
    "staged": {"method": "staged", "num_speculative_tokens": 3},
    "suffix, then draft model": {"method": "suffix", "fallback": {"method": "draft_model"}},
}


def engine(tiny: TinyPair, way: str) -> LLM:
    speculative = deepcopy(WAYS[way])
    for one in (speculative, speculative and speculative.get("fallback")):
        if one and one["method"] in ("draft_model", "draft_tree", "staged"):
            one["model"] = str(tiny.draft)
    return LLM(str(tiny.target), block_size=4, enforce_eager=True, speculative_config=speculative)


def say(llm: LLM, token_ids: list[int], salt: str) -> tuple[list[int], Trace, dict[str, Any]]:
    """What one tenant is shown of one request: the tokens, the events, and the figures that are no times."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with llm.trace() as trace:
        [output] = llm.generate({"prompt_token_ids": token_ids, "cache_salt": salt}, greedy, use_tqdm=False)
    figures = {name: value for name, value in asdict(output.metrics).items() if not name.endswith("_time")}
    return output.outputs[0].token_ids, trace, figures


def shown(trace: Trace) -> list[tuple[str, dict[str, Any]]]:
    """The events without times; blocks and steps are numbered as they appear."""
    numbers: dict[int, int] = {}
    steps: dict[int, int] = {}
    listing = []
    for event in trace:
        values = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in TIMES}
        if "block_ids" in values:
            values["block_ids"] = [numbers.setdefault(block, len(numbers)) for block in values["block_ids"]]
        if "step" in values:
            values["step"] = steps.setdefault(values["step"], len(steps))
        listing.append((type(event).__name__, values))
    return listing


@pytest.mark.parametrize("way", WAYS)
def test_what_a_tenant_sees_does_not_depend_on_what_another_said(tiny: TinyPair, way: str) -> None:
    """Alice has a secret or says something else; Bob asks for the secret's start and sees the same."""
    seen = []
    for alices in (SECRET, OTHER):
        llm = engine(tiny, way)
        secret = llm.engine.tokenizer.encode(SECRET)
        said, _, _ = say(llm, (llm.engine.tokenizer.encode(alices) * 2)[:24], "alice")
        assert len(said) == 24
        bobs, trace, figures = say(llm, secret[:12], "bob")
        seen.append((bobs, shown(trace), figures))
        assert trace.of(StepFinished)
    assert seen[0] == seen[1]


def test_a_tenant_who_repeats_what_another_was_told_is_guessed_nothing(tiny: TinyPair) -> None:
    """Bob sends the start of Alice's answer and looks whether its rest is guessed, as it is for Alice; later it is."""
    llm = engine(tiny, "suffix")
    prompt = llm.engine.tokenizer.encode(SECRET)
    alices, _, _ = say(llm, prompt, "alice")
    probe = [*prompt, *alices[:12]]

    def accepted(salt: str) -> int:
        return say(llm, probe, salt)[2]["num_accepted"]

    assert accepted("alice") >= 8
    nothing_to_learn_from = engine(tiny, "suffix")
    alone = say(nothing_to_learn_from, probe, "bob")
    bob = say(llm, probe, "bob")
    assert [event.token_ids for event in bob[1].of(DraftProposed)] == [
        event.token_ids for event in alone[1].of(DraftProposed)
    ]
    assert bob[2]["num_drafts"] == alone[2]["num_drafts"] and bob[2]["num_accepted"] == alone[2]["num_accepted"]
    assert accepted("bob") >= 8
