"""The section of `docs/measured.md` on drafting methods: speed by weights, number of requests and kind of text."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from results import Result, load, ratio, table_head

ADAPTIVE, AGAIN = ", adaptive", "plain, again"
CLOSE = 0.15
"""A prediction counts as close within this share of the measured speed-up."""
GOAL = 0.97
"""The least speed that adaptive drafting should have."""
FAR = 0.1
"""A speed-up counts as unsteady if it differs by more from the quotient of the median speeds."""
FEW_DRAFTS = 0.03
"""Below this share of steps with drafts, adaptive drafting counts as resting."""


def speculation(how: Callable[[str, Result], str]) -> str:
    """The section. `how`: writes the line with rounds, machine and versions."""
    result = load("speculation")
    rows, again = _lines(result)
    parts = [_head(result, rows), how("speculation", result), *_by_method(rows), _by_text(rows)]
    parts += [_prediction(rows), f"{_noise(rows, again)} {_unsteady(result, rows)}", _resting(rows)]
    parts += [_larger(load("speculation_0.4b"), rows, how)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _lines(result: Result) -> tuple[list[Result], list[Result]]:
    """The lines of the methods, and those of plain decoding that was measured a second time."""
    rows = [row for row in result["rows"] if row["baseline"]]
    return [row for row in rows if row["system"] != AGAIN], [row for row in rows if row["system"] == AGAIN]


def _head(result: Result, rows: Sequence[Result]) -> str:
    """What was measured, and whether tokens changed."""
    slices = list(dict.fromkeys(row["config"]["slice"] for row in rows))
    changed = [row for row in rows if not row["outputs_equal"]]
    equal = (
        "All methods gave the tokens of plain decoding."
        if not changed
        else f"In {len(changed)} of {len(rows)} lines some tokens differ from plain decoding: {_which(changed)}."
    )
    at = result["config"]
    return (
        "## Drafting methods\n\n"
        f"{at['num_speculative_tokens']} drafts per round, greedy, {at['new_tokens']} new tokens, over plain decoding "
        f"of the same weights in the same run, on {len(slices)} kinds of text: {', '.join(slices)}. A kind has "
        f"{at['prompts_per_slice']} prompts; several requests at a time are these prompts, repeated. {equal} Speed-ups "
        "are means over the kinds of text, with the lowest and the highest in brackets. What counts is the time of "
        f"the steps in which all requests decode; one that ends makes room for the next.{_uneven_weights(rows)} "
        "`adaptive`, the "
        "default, drafts as many tokens as it predicts to pay, and rests where that loses. `likely draft_model` ends a "
        "chain where the product of the draft model's probabilities falls below 0.1, and `suffix or draft_model` asks "
        "such a draft model where suffix decoding finds fewer than three tokens. Each number of requests was measured "
        f"in a run of its own{_other_revisions(result)}.{_fewer_texts(rows, slices)}"
    )


def _uneven_weights(rows: Sequence[Result]) -> str:
    """How far τ with several requests is from that of the same method and texts with one; empty if only one ran."""

    def line(row: Result) -> tuple[str, ...]:
        return row["system"], row["config"]["weights"], row["config"]["slice"]

    fixed = [row for row in rows if not row["system"].endswith(ADAPTIVE)]
    alone = {line(row): row["config"]["tau"] for row in fixed if row["config"]["batch"] == 1}
    several = [row for row in fixed if row["config"]["batch"] > 1 and line(row) in alone]
    if not several:
        return ""
    gaps = [abs(row["config"]["tau"] / alone[line(row)] - 1) for row in several]
    return (
        " So with several requests, prompts that need few steps count more: τ of a fixed number of drafts is up to "
        f"{max(gaps):.0%} from that with one request, {statistics.mean(gaps):.0%} on average."
    )


def _other_revisions(result: Result) -> str:
    """Which numbers of requests were measured at another revision than that of the whole result."""
    others: dict[str, list[str]] = {}
    for batch, revision in result["config"]["revisions"].items():
        if revision != result["revision"]:
            others.setdefault(revision, []).append(batch)
    return "".join(f", with {' and '.join(batches)} at revision {revision}" for revision, batches in others.items())


def _fewer_texts(rows: Sequence[Result], slices: Sequence[str]) -> str:
    """Which columns are means over some of the kinds of text only."""
    notes = []
    weights = list(dict.fromkeys(row["config"]["weights"] for row in rows))
    for batch in sorted({row["config"]["batch"] for row in rows}):
        measured: dict[str, list[str]] = {}
        for kind in weights:
            at = [r["config"] for r in rows if (r["config"]["batch"], r["config"]["weights"]) == (batch, kind)]
            names = ", ".join(name for name in slices if name in {config["slice"] for config in at})
            measured.setdefault(names, []).append(kind)
        for names, kinds in measured.items():
            if names != ", ".join(slices):
                some = "" if kinds == weights else f" ({', '.join(kinds)})"
                notes.append(f" The columns for {batch} requests{some} are means over {names} alone.")
    return "".join(notes)


def _which(rows: Sequence[Result]) -> str:
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(_method(row), set()).add(row["config"]["weights"])
    return "; ".join(f"{method} ({', '.join(sorted(kinds))})" for method, kinds in found.items())


def _by_method(rows: Sequence[Result]) -> list[str]:
    """A table for each kind of weights: methods in lines, numbers of requests in columns."""
    tables = []
    for weights in dict.fromkeys(row["config"]["weights"] for row in rows):
        chosen = [row for row in rows if row["config"]["weights"] == weights]
        batches = sorted({row["config"]["batch"] for row in chosen})
        heads = [f"{batch} request{'s' * (batch > 1)}{kind}" for batch in batches for kind in ("", ADAPTIVE)]
        lines = table_head([weights, *heads])
        for method in dict.fromkeys(map(_method, chosen)):
            cells = [
                _mean([r for r in chosen if r["config"]["batch"] == batch and r["system"] == method + kind])
                for batch in batches
                for kind in ("", ADAPTIVE)
            ]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return tables


def _mean(rows: Sequence[Result]) -> str:
    ratios = [row["ratio"] for row in rows]
    return f"{statistics.mean(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def _by_text(rows: Sequence[Result]) -> str:
    """The fastest method for each kind of text, one request, and how many others may be as fast."""
    alone = [row for row in rows if row["config"]["batch"] == 1]
    kinds = list(dict.fromkeys(row["config"]["weights"] for row in alone))
    lines = [
        "The fastest method by kind of text, for one request, with the 95% interval of its speed-up, its tokens per "
        "forward of the target (τ), and the number of other lines whose interval overlaps this one:\n",
        *table_head(["text", *kinds]),
    ]
    for text in dict.fromkeys(row["config"]["slice"] for row in alone):
        cells = []
        for weights in kinds:
            here = [r for r in alone if (r["config"]["slice"], r["config"]["weights"]) == (text, weights)]
            best = max(here, key=lambda row: row["ratio"])
            close = sum(row["interval"][1] >= best["interval"][0] for row in here) - 1
            others = f"{close} other{'s' * (close != 1)}"
            cells.append(f"{ratio(best)} {best['system']}, τ {best['config']['tau']:.2f}; {others}")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _prediction(rows: Sequence[Result]) -> str:
    """How close the modelled speed-up comes, and the slowest lines."""
    errors = [abs(r["config"]["predicted"] / r["ratio"] - 1) for r in rows if "predicted" in r["config"]]
    without = len(rows) - len(errors)
    left_out = f" ({without} line{'s' * (without > 1)} without a modelled value)" if without else ""
    close = sum(error <= CLOSE for error in errors)
    adaptive = [row for row in rows if row["system"].endswith(ADAPTIVE)]
    fixed = [row for row in rows if not row["system"].endswith(ADAPTIVE)]
    below, surely = sum(row["ratio"] < GOAL for row in adaptive), sum(row["interval"][1] < GOAL for row in adaptive)
    slowest, worst = (min(group, key=lambda row: row["ratio"]) for group in (adaptive, fixed))
    return (
        "Modelled: τ / (s (c + v) + 1 - s), with τ, the share of steps with drafts (s), and the costs of drafting (c) "
        "and of the rest of such a step (v), all measured in the same run of the benchmark as the speed-up. So this "
        "tells whether the four explain the speed-up, not whether it could be known before. It is within "
        f"{CLOSE:.0%} of the measured speed-up in {close} of {len(errors)} lines{left_out}, and at most "
        f"{max(errors):.0%} from it. The slowest line with a fixed number of drafts is {_line(worst)}, the slowest "
        f"adaptive one {_line(slowest)}; {below} of {len(adaptive)} adaptive lines are below {GOAL}×, {surely} of them "
        "with their whole 95% interval."
    )


def _noise(rows: Sequence[Result], again: Sequence[Result]) -> str:
    """How much of that is noise."""
    widths: dict[int, list[float]] = {}
    for row in rows:
        widths.setdefault(row["config"]["batch"], []).append((row["interval"][1] - row["interval"][0]) / 2)
    told = ", ".join(
        f"±{statistics.median(own):.2f}× for {batch} request{'s' * (batch > 1)}"
        for batch, own in sorted(widths.items())
    )
    text = (
        f"The 95% interval of a line's speed-up is {told} (median). From six rounds, as with 16 requests, it reaches "
        "from the lowest to the highest."
    )
    if not again:
        return text
    below, lowest = sum(row["ratio"] < GOAL for row in again), min(row["ratio"] for row in again)
    surely = sum(row["interval"][1] < GOAL for row in again)
    return (
        f"{text} Plain decoding, measured in each round as if it were a method, is below {GOAL}× in {below} of "
        f"{len(again)} lines, {surely} of them with their whole interval, its slowest one at {lowest:.2f}×."
    )


def _unsteady(result: Result, rows: Sequence[Result]) -> str:
    """In how many lines the machine's speed changed so much that two ways to compare speeds disagree."""

    def run(row: Result) -> tuple[Any, ...]:
        return tuple(row["config"][key] for key in ("weights", "batch", "slice"))

    plain = {run(row): row["tokens_per_s"] for row in result["rows"] if not row["baseline"]}
    gaps = [abs(row["ratio"] / (row["tokens_per_s"] / plain[run(row)]) - 1) for row in rows]
    far = sum(gap > FAR for gap in gaps)
    return (
        f"In {far} of {len(rows)} lines the speed-up, which compares neighbouring runs, differs by more than {FAR:.0%} "
        "from the quotient of the median speeds: there the machine's speed changed."
    )


def _resting(rows: Sequence[Result]) -> str:
    """What adaptive drafting costs where drafts do not pay; empty if they pay in all lines."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        if row["system"].endswith(ADAPTIVE) and row["config"]["rounds_with_drafts"] < FEW_DRAFTS:
            speeds.setdefault(_method(row), []).append(row["ratio"])
    if not speeds:
        return ""
    every = list(itertools.chain.from_iterable(speeds.values()))
    lowest, mean = min(((name, statistics.mean(own)) for name, own in speeds.items()), key=lambda pair: pair[1])
    return (
        f"In {len(every)} adaptive lines less than {FEW_DRAFTS:.0%} of the steps have drafts: the engine predicts that "
        f"they do not pay. On average these lines run at {statistics.mean(every):.2f}×; {lowest} has the lowest mean "
        f"of a method, {mean:.2f}×."
    )


def _larger(result: Result, bundled: Sequence[Result], how: Callable[[str, Result], str]) -> str:
    """The shape of 0.4 billion parameters, where weights are random and drafts are accepted at given rates. `bundled`:
    the lines of the bundled pair."""
    rows, _ = _lines(result)
    lines = [
        "At 0.4 billion parameters, w8a8, one request. Weights are random, so drafts are accepted at given rates "
        "(`synthetic`), whatever the text: what differs between texts is noise. The shares of drafts accepted, of "
        f"those whose predecessors were, are by position {_accepted(rows, 'synthetic')}; those of the bundled pair's "
        f"`draft_model` are {_accepted(bundled, 'draft_model')}. `modelled` is as above.\n",
        *table_head(["text", "method", "speed-up", "modelled", "τ", "c", "v"]),
    ]
    for row in rows:
        at = row["config"]
        figures = " | ".join(f"{at[key]:.2f}" for key in ("predicted", "tau", "c", "v"))
        lines.append(f"| {at['slice']} | {row['system']} | {ratio(row)} | {figures} |")
    return "\n".join(lines) + "\n\n" + how("speculation_0.4b", result)


def _accepted(rows: Sequence[Result], system: str) -> str:
    """The share of drafts that a system's lines in w8a8 with one request have accepted, by position: means over the
    kinds of text."""
    found = [
        row["config"]["alpha"]
        for row in rows
        if (row["system"], row["config"]["weights"], row["config"]["batch"]) == (system, "w8a8", 1)
    ]
    positions = ([share for share in shares if share is not None] for shares in itertools.zip_longest(*found))
    return ", ".join(f"{statistics.mean(shares):.0%}" for shares in positions)


def _line(row: Result) -> str:
    at: dict[str, Any] = row["config"]
    return f"{row['ratio']:.2f}× ({_method(row)}, {at['weights']}, {at['batch']} together, {at['slice']})"


def _method(row: Result) -> str:
    return str(row["system"]).removesuffix(ADAPTIVE)
