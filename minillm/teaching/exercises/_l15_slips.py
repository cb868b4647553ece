"""Lesson 15: mistakes in one place of a right answer, as edits of its source: {what it does wrong: (right, wrong)}."""

from __future__ import annotations

Edits = dict[str, tuple[str, str]]

ATTRIBUTE: Edits = {
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

STEP: Edits = {
    "subtracts the slower of bytes and operations from the calls instead of adding it": (" + max(", " - max("),
    "counts the calls only, and neither bytes nor operations": (
        " + max(num_bytes / bandwidth, operations / rate)",
        "",
    ),
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

PANEL: Edits = {
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
        "(panel * columns + k) * LANES",
        "panel * columns + k",
    ),
    "reads the first sixteen weights for every column and panel": ("(panel * columns + k) * LANES", "0"),
    "reads the same sixteen weights, at LANES, for every column and panel": ("(panel * columns + k) * LANES", "LANES"),
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

GAMMA: Edits = {
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
    "compares tokens without dividing by the time they take": (" / (gamma * draft_cost + verify_costs[gamma])", ""),
    "subtracts the time of verifying from that of drafting instead of adding it": ("+ verify", "- verify"),
    "divides the number of draft tokens by their cost instead of multiplying": ("gamma * draft", "gamma / draft"),
    "picks the slowest: min instead of max, or time per token instead of tokens per time": ("max(", "min("),
    "never picks the largest number": (
        "range(len(verify_costs))",
        "range(max(1, len(verify_costs) - 1))",
    ),
}
