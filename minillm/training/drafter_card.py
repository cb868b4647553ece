"""The card of a trained drafter, written only from recorded and measured values."""

from __future__ import annotations

from typing import Any

from minillm.training.card import MINUTES, hardware_words, table
from minillm.training.drafter_evaluation import Acceptance

KINDS = {"code": "held-out code", "greedy": "the target's greedy text", "sampled": "the target's text at temperature 1"}


def drafter_card(name: str, facts: dict[str, Any], load: str) -> str:
    """The README.md of a drafter's folder. `facts`: the content of its `training.json`. `load`: code for the engine."""
    run, method, target = facts["run"], facts["method"], facts["target"]
    symbols = "In the loss, p is the target's distribution and q the drafter's"
    symbols += ", i is the position of the draft" * ("^i" in facts["loss"])
    symbols += ", and λ is 1 less the mean of Σ min(p, q) there, without gradient" * ("λ" in facts["loss"])
    rows = [
        ("Parameters", f"{facts['parameters']:,}"),
        ("Loss", facts["loss"]),
        ("Tokens", f"{run['tokens']:,}, half corpus, half texts that the target wrote after corpus prompts"),
        ("Minutes", f"{run['minutes']:g}"),
        ("Hardware", hardware_words(run["hardware"])),
        ("Stored as", "bfloat16 safetensors"),
        ("Licence of the weights", "Apache-2.0"),
    ]
    return f"""---
license: apache-2.0
tags: [code, python, minillm, speculative-decoding]
---
# {name}

Drafts for [`{target}`](../{target}) with speculative method `{method}`. It is not a model of its own: its weights mean
something only to this target.

```python
from minillm import LLM

{load}
```

{table(("", ""), rows)}

{symbols}.

{MINUTES}

![Training loss](loss.svg)

## Acceptance

The share of drafts that is accepted at each position, of those that are judged, on {_roots(facts)} places in text that
it was not trained on. At temperature 0, then at temperature 1 (Σ min(p, q)):

{table(("Text", "Temperature", *_positions(facts), "tokens per round"), _acceptance_rows(facts))}

Tokens per round is {_tokens_per_round(facts)},
averaged over all places of the text, not over those where rounds begin. The numbers here are also in
`training.json`. `minillm train --stages corpus {method} --target {target}` trains such a drafter.
"""


def _tokens_per_round(facts: dict[str, Any]) -> str:
    """Their formula, in terms of the acceptance table."""
    sure = " (draft 1 is the target's own next token, and always accepted)" if facts["sure_drafts"] else ""
    return f"{1 + facts['sure_drafts']} + Σᵢ Πⱼ≤ᵢ αⱼ over the drafts above{sure}"


def _roots(facts: dict[str, Any]) -> str:
    return f"{sum(found['roots'] for found in facts['acceptance'].values()):,}"


def _positions(facts: dict[str, Any]) -> list[str]:
    sure = facts["sure_drafts"]
    return [f"draft {sure + i}" for i in range(1, len(facts["acceptance"]["code"]["greedy"]) + 1)]


def _acceptance_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for kind, found in facts["acceptance"].items():
        for temperature, key in (("0", "greedy"), ("1", "sampled")):
            tokens = facts["sure_drafts"] + Acceptance.tokens_per_round(found[key])
            rows.append((KINDS[kind], temperature, *(f"{rate:.1%}" for rate in found[key]), f"{tokens:.2f}"))
    return rows
