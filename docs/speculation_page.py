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
FEW_DRAFTS = 0.03
"""Below this share of steps with drafts, adaptive drafting counts as resting."""


def speculation(how: Callable[[str, Result], str]) -> str:
    """The section. `how`: writes the line with rounds, machine and versions."""
    result = load("speculation")
    rows, again = _lines(result)
    parts = [_head(result, rows), how("speculation", result), *_by_method(rows), _by_text(rows)]
    parts += [_prediction(rows), _noise(rows, again), _resting(rows), _larger(load("speculation_0.4b"), how)]
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
        f"of the same weights in the same run, on {len(slices)} kinds of text: {', '.join(slices)}. {equal} Speed-ups "
        "are means over the kinds of text, with the lowest and the highest in brackets. What counts is the time of "
        "the steps in which all requests decode; one that ends makes room for the next. `adaptive`, the "
        "default, drafts as many tokens as it predicts to pay, and rests where that loses. `likely draft_model` ends a "
        "chain where the product of the draft model's probabilities falls below 0.1, and `suffix or draft_model` asks "
        f"such a draft model where suffix decoding finds fewer than three tokens.{_left_out(rows)}"
    )


def _left_out(rows: Sequence[Result]) -> str:
    """Which kinds of text were not measured with all weights and batches."""
    seen = {(at["slice"], at["weights"], at["batch"]) for row in rows for at in (row["config"],)}
    slices, weights, batches = (sorted(set(column)) for column in zip(*seen, strict=True))
    missing = []
    for kind, batch in itertools.product(weights, batches):
        if absent := [name for name in slices if (name, kind, batch) not in seen]:
            missing.append(f"{', '.join(absent)} with {kind} weights and {batch} together")
    return f" Not measured: {'; '.join(missing)}." if missing else ""


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
    """The fastest method for each kind of text, one request."""
    alone = [row for row in rows if row["config"]["batch"] == 1]
    kinds = list(dict.fromkeys(row["config"]["weights"] for row in alone))
    lines = [
        "The fastest method by kind of text, for one request, with its tokens per forward of the target (τ):\n",
        *table_head(["text", *kinds]),
    ]
    for text in dict.fromkeys(row["config"]["slice"] for row in alone):
        cells = []
        for weights in kinds:
            here = [r for r in alone if (r["config"]["slice"], r["config"]["weights"]) == (text, weights)]
            best = max(here, key=lambda row: row["ratio"])
            cells.append(f"{best['ratio']:.2f}×, {best['system']} (τ {best['config']['tau']:.2f})")
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _prediction(rows: Sequence[Result]) -> str:
    """How close the modelled speed-up comes, and the slowest lines."""
    errors = [abs(r["config"]["predicted"] / r["ratio"] - 1) for r in rows if "predicted" in r["config"]]
    close = sum(error <= CLOSE for error in errors)
    adaptive = [row for row in rows if row["system"].endswith(ADAPTIVE)]
    fixed = [row for row in rows if not row["system"].endswith(ADAPTIVE)]
    below, surely = sum(row["ratio"] < GOAL for row in adaptive), sum(row["interval"][1] < GOAL for row in adaptive)
    slowest, worst = (min(group, key=lambda row: row["ratio"]) for group in (adaptive, fixed))
    return (
        "Modelled: τ / (s (c + v) + 1 - s), with the measured τ, share of steps with drafts (s), and costs of drafting "
        "(c) and of the rest of such a step (v), is within "
        f"{CLOSE:.0%} of the measured speed-up in {close} of {len(errors)} lines, and at most {max(errors):.0%} from "
        f"it. The slowest line with a fixed number of drafts is {_line(worst)}, the slowest adaptive one "
        f"{_line(slowest)}; {below} of {len(adaptive)} adaptive lines are below {GOAL}×, {surely} of them with their "
        "whole 95% interval."
    )


def _noise(rows: Sequence[Result], again: Sequence[Result]) -> str:
    """How much of that is noise."""
    width = statistics.median((row["interval"][1] - row["interval"][0]) / 2 for row in rows)
    text = f"The 95% interval of a line's speed-up is ±{width:.2f}× (median)."
    if not again:
        return text
    below, lowest = sum(row["ratio"] < GOAL for row in again), min(row["ratio"] for row in again)
    surely = sum(row["interval"][1] < GOAL for row in again)
    return (
        f"{text} Plain decoding, measured in each round as if it were a method, is below {GOAL}× in {below} of "
        f"{len(again)} lines, {surely} of them with their whole interval, its slowest one at {lowest:.2f}×."
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


def _larger(result: Result, how: Callable[[str, Result], str]) -> str:
    """The shape of 0.4 billion parameters, where weights are random and drafts are accepted at given rates."""
    rows, _ = _lines(result)
    same = result["config"]["counted"] == load("speculation")["config"]["counted"]
    counted = "" if same else " The whole time of a run counts, with the last tokens of each prompt."
    lines = [
        "At 0.4 billion parameters, w8a8, one request. Weights are random, so drafts are accepted at about the rates "
        f"of the bundled pair (`synthetic`), whatever the text.{counted} `modelled` is as above.\n",
        *table_head(["text", "method", "speed-up", "modelled", "τ", "c", "v"]),
    ]
    for row in rows:
        at = row["config"]
        figures = " | ".join(f"{at[key]:.2f}" for key in ("predicted", "tau", "c", "v"))
        lines.append(f"| {at['slice']} | {row['system']} | {ratio(row)} | {figures} |")
    return "\n".join(lines) + "\n\n" + how("speculation_0.4b", result)


def _line(row: Result) -> str:
    at: dict[str, Any] = row["config"]
    return f"{row['ratio']:.2f}× ({_method(row)}, {at['weights']}, {at['batch']} together, {at['slice']})"


def _method(row: Result) -> str:
    return str(row["system"]).removesuffix(ADAPTIVE)
