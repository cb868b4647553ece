"""Lesson 15: mistakes in one place of a right answer, as edits of its source: {what it does wrong: (right, wrong)}."""

from __future__ import annotations

from minillm.teaching.source import Edits

ATTRIBUTE: Edits = {
    "adds the time between two marks to the part of the first mark; it belongs to the second": (
        "(began, _), (ended, name)",
        "(began, name), (ended, _)",
    ),
    "leaves out what is not in the table, so that the parts do not sum to the whole": (
        "return parts",
        'return parts | {"python": 0.0}',
    ),
    "counts only the first forward as prefill; a prompt may come in chunks": (
        "parts[part_of",
        'name = "StepRan decode" if parts["prefill"] and name == "StepRan prefill" else name\n        parts[part_of',
    ),
    "keeps the last time of each part instead of adding the times up": ("+= ended - began", "= ended - began"),
    "counts drafting as part of the target": ('"DraftProposed": "draft"', '"DraftProposed": "target"'),
    "does not count verifying drafts as part of the target": ('        "StepRan verify": "target",\n', ""),
    "measures every mark from the start, not from the mark before it": ("ended - began", "ended - marks[0][0]"),
    "returns shares of the whole instead of seconds": (
        "return parts",
        "whole = marks[-1][0] - marks[0][0]\n"
        "    return {part: seconds / whole if whole else 0.0 for part, seconds in parts.items()}",
    ),
    "leaves out the parts that take no time; they are 0.0": (
        "return parts",
        "return {part: seconds for part, seconds in parts.items() if seconds}",
    ),
    "counts from 0 to the second mark; the first mark says where the run begins": (
        "itertools.pairwise(marks)",
        "itertools.pairwise([(0.0, marks[0][1]), *marks[1:]])",
    ),
    "begins every part at 1.0 instead of 0.0": ("(PARTS, 0.0)", "(PARTS, 1.0)"),
    "stops after the first two marks": ("itertools.pairwise(marks)", "itertools.pairwise(marks[:2])"),
    "adds nothing to the parts": ("+= ended - began", "+= 0.0"),
    "subtracts times instead of adding them: what is added is the later mark minus the earlier one": (
        "ended - began",
        "began - ended",
    ),
    "adds the two marks; the time between them is their difference": ("ended - began", "ended + began"),
    "counts names that are not in the table as queue; they are python": ('"python")]', '"queue")]'),
}

_WORK = "max(num_bytes / bandwidth, operations / rate)"

STEP: Edits = {
    "leaves out the time of the calls": ("calls * seconds_per_call + ", ""),
    "counts one call only": ("calls * ", ""),
    "divides bytes by operations per second, and operations by bytes per second": (
        _WORK,
        "max(num_bytes / rate, operations / bandwidth)",
    ),
    "counts operations only, although a decode step mostly waits for bytes": (_WORK, "operations / rate"),
    "adds moving and computing, which overlap": (_WORK, "num_bytes / bandwidth + operations / rate"),
    "lets calls overlap with the work, as on a GPU; here one thread does both": (
        "calls * seconds_per_call + max(",
        "max(calls * seconds_per_call, ",
    ),
    "uses the faster of bytes and operations; the slower one decides": ("max(", "min("),
    "counts bytes only, although arithmetic limits a prompt": (_WORK, "num_bytes / bandwidth"),
    "subtracts the slower of bytes and operations from the calls instead of adding it": (" + max(", " - max("),
    "counts the calls only, and neither bytes nor operations": (f" + {_WORK}", ""),
    "divides the calls by the seconds of one instead of multiplying": ("calls * seconds", "calls / seconds"),
    "adds the number of calls instead of their time: each takes seconds_per_call": (
        "calls * seconds_per_call",
        "calls",
    ),
    "multiplies the bytes by the bandwidth instead of dividing": ("/ bandwidth", "* bandwidth"),
    "uses bytes as seconds: divide them by the bandwidth": (" / bandwidth", ""),
    "divides the bandwidth by the bytes: the quotient is inverted": (
        "num_bytes / bandwidth",
        "bandwidth / num_bytes",
    ),
    "multiplies the operations by the rate instead of dividing": ("/ rate", "* rate"),
    "uses operations as seconds: divide them by the rate": (" / rate", ""),
    "divides the rate by the operations: the quotient is inverted": ("operations / rate", "rate / operations"),
    "uses the bandwidth of the example on every machine": ("/ bandwidth", "/ 20"),
    "uses the rate of the example on every machine": ("/ rate", "/ 10"),
    "uses the seconds per call of the example on every machine": ("calls * seconds_per_call", "calls * 0.5"),
}

_ADDRESS = "(panel * columns + k) * LANES"

PANEL: Edits = {
    "steps by one number from column to column; a column of a panel has sixteen": (
        _ADDRESS,
        "panel * columns * LANES + k",
    ),
    "keeps the last column's product instead of the sum": (
        f"fma(load(panels, {_ADDRESS}), splat(x[k]), sums)",
        f"load(panels, {_ADDRESS}) * splat(x[k])",
    ),
    "does not reset the sums to zero for the next panel": (
        "for panel in range(len(y) // LANES):\n        sums = splat(ZERO)\n",
        "sums = splat(ZERO)\n    for panel in range(len(y) // LANES):\n",
    ),
    "reads the first panel for every output": (_ADDRESS, "k * LANES"),
    "leaves out the last columns if the number of columns is not a multiple of sixteen": (
        "range(columns)",
        "range(columns // LANES * LANES)",
    ),
    "adds to what y held before": ("splat(ZERO)", "load(y, panel * LANES)"),
    "stores panel p at y[p]; it begins at y[p * LANES]": ("y, panel * LANES", "y, panel"),
    "leaves out the last panel": ("range(len(y) // LANES)", "range(max(1, len(y) // LANES - 1))"),
    "leaves out the last column": ("range(columns)", "range(columns - 1)"),
    "expects column k of all panels side by side; whole panels follow each other": (
        _ADDRESS,
        "(k * (len(y) // LANES) + panel) * LANES",
    ),
    "multiplies by sixteen elements of x; all lanes use the same element (splat)": ("splat(x[k])", "load(x, k)"),
    "fills the first panel only": ("(len(y) // LANES)", "(1)"),
    "leaves out the first panel": ("range(len(y)", "range(1, len(y)"),
    "uses the first column only": ("range(columns)", "range(1)"),
    "leaves out the first column": ("range(columns)", "range(1, columns)"),
    "multiplies nothing, so that all sums stay 0": ("range(columns)", "range(0)"),
    "multiplies by the sums and adds the element of x; it is the other way round": (
        "splat(x[k]), sums)",
        "sums, splat(x[k]))",
    ),
    "steps by one number, not by sixteen, from column to column and from panel to panel": (
        _ADDRESS,
        "panel * columns + k",
    ),
    "reads the first sixteen weights for every column and panel": (_ADDRESS, "0"),
    "reads the same sixteen weights, at LANES, for every column and panel": (_ADDRESS, "LANES"),
    "walks backwards from the beginning of a panel: column k lies after the beginning, not before": (
        "* columns + k",
        "* columns - k",
    ),
    "reads the first column of the panel for every k: k is missing in the address": (
        "panel * columns + k",
        "panel * columns",
    ),
    "lets panels begin one column apart: a panel is as long as all its columns": (
        "panel * columns + k",
        "panel + k",
    ),
    "reads the second panel for every panel": ("panel * columns + k", "columns + k"),
    "stores every panel at the beginning of y": ("y, panel * LANES", "y, 0"),
    "starts the sums at 1 instead of 0": ("splat(ZERO)", "splat(np.float32(1))"),
}

PANEL_PER_OUTPUT = ("range(len(y) // LANES)", "range(y.shape[0])")
"""Loops over one panel per output; a panel has sixteen outputs."""

_TOKENS = "sum(acceptance**i for i in range(gamma + 1))"
_SECONDS = "gamma * draft_cost + verify_costs[gamma]"
_BEST = "max(range(len(verify_costs)), key=speed_up)"

GAMMA: Edits = {
    "leaves out the token that the target adds to every round": (
        _TOKENS,
        "sum(acceptance**i for i in range(1, gamma + 1)) if gamma else 1.0",
    ),
    "uses the cost of verifying one draft token less": ("verify_costs[gamma]", "verify_costs[max(gamma - 1, 0)]"),
    "returns the largest of equals; more draft tokens for the same speed are not worth it": (
        "range(len(verify_costs))",
        "reversed(range(len(verify_costs)))",
    ),
    "picks the shortest round: it ignores the tokens, or counts every draft token as a whole step": (
        f"tokens / ({_SECONDS})",
        f"-({_SECONDS})",
    ),
    "counts the draft tokens only if all of them are accepted": (_TOKENS, "1 + gamma * acceptance**gamma"),
    "counts 1 + γ·acceptance tokens per round, as if a rejected token did not end the round": (
        _TOKENS,
        "1 + gamma * acceptance",
    ),
    "treats verification as free": ("verify_costs[gamma]", "1.0"),
    "treats drafting as free, or all draft tokens together as one": ("gamma * draft_cost + ", ""),
    "drafts even if not drafting is faster": (_BEST, "max(range(1, len(verify_costs)), key=speed_up, default=0)"),
    "always returns the largest number": (_BEST, "len(verify_costs) - 1"),
    "multiplies the acceptance by the index of the draft token; probabilities multiply: acceptance**i": (
        "**",
        "*",
    ),
    "uses the same probability for every token, even for the target's own": ("acceptance**i", "acceptance"),
    "counts one token too many: a round of γ draft tokens gains 1 + a + … + a to the γ": ("gamma + 1", "gamma + 2"),
    "counts one token too few: a round of γ draft tokens gains 1 + a + … + a to the γ": ("gamma + 1", "gamma"),
    "counts two tokens too few: a round of γ draft tokens gains 1 + a + … + a to the γ": ("gamma + 1", "gamma - 1"),
    "leaves out the 1 of the sum, so that a round without draft tokens gains nothing": (
        "range(gamma",
        "range(1, gamma",
    ),
    "multiplies tokens by time; speed is tokens divided by time": ("tokens / (", "tokens * ("),
    "compares tokens without dividing by the time they take": (f" / ({_SECONDS})", ""),
    "subtracts the time of verifying from that of drafting instead of adding it": ("+ verify", "- verify"),
    "multiplies the times of drafting and of verifying: (1 + γ·c)·v[γ]; they add up": (
        _SECONDS,
        "(1 + gamma * draft_cost) * verify_costs[gamma]",
    ),
    "divides the number of draft tokens by their cost instead of multiplying": ("gamma * draft", "gamma / draft"),
    "picks the slowest: min instead of max, or time per token instead of tokens per time": ("max(", "min("),
    "never picks the largest number": (
        "range(len(verify_costs))",
        "range(max(1, len(verify_costs) - 1))",
    ),
}
