"""The section of `docs/measured.md` on drafters with one idea left out: what each idea is worth, by method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results import Result, load, table_head


@dataclass(frozen=True)
class Published:
    """What the paper of a method says, and what the figures here say about it."""

    paper: str
    verdict: str
    holds: Callable[[dict[str, float]], bool]
    """The condition of the verdict, on tokens per round at temperature 0, by variant; on a second kind of text by
    `variant, text`; at temperature 1 by `variant, sampled`."""


PUBLISHED = {
    "self_sparse": Published(
        "MagicDec (Sadhukhan et al. 2024): up to 2.51× as fast as plain decoding, at batches of 32 to 256",
        "The window carries it. On these files neither the sink nor a choice by attention adds anything to it.",
        lambda tau: (
            max(tau[name] for name in ("no sink", "chosen by attention, and window")) < tau["sink and window"] + 0.15
            and min(tau[name] for name in ("no sink", "chosen by attention, and window"))
            > tau["sink and window"] - 0.15
            and tau["chosen by attention, no window"] < 0.7 * tau["sink and window"]
        ),
    ),
    "self_quant": Published(
        "QuantSpec (Tiwari et al. 2025): over 90% accepted",
        "At temperature 0 four bits lose next to nothing, in the weights as in the cache. At temperature 1 the weights "
        "lose more than the cache.",
        lambda tau: (
            min(tau[name] for name in ("weights and cache in four bits", "only the cache", "only the weights")) > 4.8
            and tau["only the cache, sampled"] - 0.2 > tau["only the weights, sampled"]
        ),
    ),
    "long": Published(
        "LongSpec (Yang et al. 2025): up to 3.26× as fast as plain decoding",
        "Cross-attention into the target's cache is worth 0.3 tokens per round. Random offsets change nothing, not "
        "even at late positions.",
        lambda tau: (
            0.25 < tau["long"] - tau["no cross-attention"] < 0.35
            and all(
                abs(tau[f"long{at}"] - tau[f"no offsets{at}"]) < 0.05 for at in ("", ", the same at late positions")
            )
        ),
    ),
    "prompt_tokens": Published(
        "Parallel Prompt Decoding (Chen et al. 2024): up to 2.49× as fast as plain decoding, with trees",
        "After so few tokens the variants do not differ in tokens per round. Nearly all that a round gains is its sure "
        "draft, the target's own next token.",
        lambda tau: max(tau.values()) - min(tau.values()) < 0.05 and max(tau.values()) < 2.3,
    ),
    "spire": Published(
        "SPIRe (Neelam et al. 2025): 3.40 tokens per round, MagicDec 3.89, a small draft 2.65",
        "Feedback memory and copies of the target's blocks are each worth 0.3 tokens per round. The sparse mask costs "
        "nothing.",
        lambda tau: (
            all(0.25 < tau["spire"] - tau[name] < 0.35 for name in ("no feedback memory", "not from the target"))
            and tau["spire"] > tau["no sparse mask"] - 0.05
        ),
    ),
}
HEADINGS = ("variant", "text", "draft 1", "draft 2", "draft 3", "draft 4", "tokens per round", "at temperature 1")


def ablations(how: Callable[[str, Result], str]) -> str:
    """The whole section. `how`: a sentence on how a result was measured. Raises `ValueError` where a verdict does not
    fit the figures."""
    result = load("ablations")
    at = result["config"]
    text = (
        "The share of drafts that is accepted at each position, of those that are judged, at temperature 0; then what "
        "a round with all drafts gains. The drafters in the engine write "
        f"{at['new_tokens']} tokens after each of {at['prompts']} long files. The trained ones are judged on held-out "
        "code by the command that trains them, which may have run on another machine. Their variants are trained "
        "alike, and shorter than the bundled drafters: compare them with each other. "
        "A draft is judged only where all before it were accepted: with low rates the later shares rest on few drafts. "
        "The papers' figures differ, because they are of other models and texts, with drafters that are trained far "
        "longer, where they are trained; those that are speeds also depend on what a draft costs on a GPU."
    )
    parts = [_part(method, result) for method in dict.fromkeys(row["method"] for row in result["rows"])]
    return "\n".join(
        [
            "## Drafters with one idea left out\n",
            text,
            "",
            *parts,
            "`minillm bench ablations`, " + how("ablations", result) + "\n",
        ]
    )


def _part(method: str, result: Result) -> str:
    rows = [row for row in result["rows"] if row["method"] == method]
    tau = _tau(rows)
    published = PUBLISHED.get(method)
    if published is None:
        raise ValueError(f"docs/ablations_page.py says nothing about {method}; add what its paper says, and a verdict")
    if not published.holds(tau):
        raise ValueError(
            f"what docs/ablations_page.py says about {method} does not fit benchmarks/ablations.json: {tau}"
        )
    tokens = rows[0]["trained_tokens"]
    head = f"`{method}`" + (f", each variant trained on {tokens:,} tokens" if tokens else "")
    lines = [f"{head}. {published.verdict} Quoted: {published.paper}.\n", *table_head(list(HEADINGS))]
    for row in rows:
        rates = ["sure"] * row["sure_drafts"] + [f"{rate:.0%}" for rate in row["greedy"]]
        gained = [f"{row['tokens_per_round'][kind]:.2f}" for kind in ("greedy", "sampled")]
        lines.append(f"| {' | '.join([row['variant'], row['text'], *rates, *gained])} |")
    return "\n".join(lines) + "\n"


def _tau(rows: list[Result]) -> dict[str, float]:
    """Tokens per round, by the names of `Published.holds`."""
    tau: dict[str, float] = {}
    for row in rows:
        name = row["variant"] if row["variant"] not in tau else f"{row['variant']}, {row['text']}"
        gained = row["tokens_per_round"]
        tau |= {name: gained["greedy"], f"{name}, sampled": gained["sampled"]}
    return tau
