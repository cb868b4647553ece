"""Lesson 05, INT8 weights: round rows, multiply integers, round groups, scale channels, split off outliers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.teaching.compare import close, values_match
from minillm.teaching.drives.l05 import round_in_groups_of_4
from minillm.teaching.exercise import Attempt, Case, Exercise
from minillm.teaching.exercises import _l05_slips as slips
from minillm.teaching.exercises._l05_mistakes import AWQ, GROUPS, LINEAR, OUTLIERS, ROWS
from minillm.teaching.exercises._l05_reference import (
    awq_scale,
    quantise_groups,
    quantise_rows,
    split_outliers,
    w8a8_linear,
)
from minillm.teaching.source import body_of

RELATIVE = close(1e-4, 0.0)
"""Compares numbers of any size: scales and outputs can be far below the absolute tolerance of `values_match`."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _scale_direction(attempt: Attempt) -> str | None:
    """Diagnose a scale with a second dimension in an answer to `quantise_rows`."""
    got = attempt.got
    pair = isinstance(got, tuple) and len(got) == 2 and all(isinstance(part, Tensor) for part in got)
    if pair and got[0].ndim == got[1].ndim == 2 and 1 in got[1].shape:
        return "the scale has one number per row, [out], without a second dimension (keepdim)"
    return None


_ROWS = Exercise(
    name="l05.quantise_rows",
    reference=quantise_rows,
    compare=RELATIVE,
    diagnose=_scale_direction,
    cases=lambda: [
        Case("one row", (torch.tensor([[12.7, -3.04, 0.26]]),)),
        Case("two rows, one small and one large", (torch.tensor([[1.27, 0.4, -0.3], [50.8, -9.1, 3.1]]),)),
        Case("the largest weight of a row is negative", (torch.tensor([[0.5, -2.54], [0.31, 1.27]]),)),
        Case("a row of zeros", (torch.tensor([[0.0, 0.0, 0.0], [1.27, 0.52, -0.33]]),)),
        Case("a row of very small weights", (torch.tensor([[1e-20, -3.1e-21, 5.6e-21], [1.27, 0.52, -0.33]]),)),
        Case("as many inputs as outputs", (_random(6, 6) * torch.logspace(-1, 1, 6)[:, None],)),
    ],
    hints=(
        "An output is the product of one row with the input. What must all weights of a sum share, so that you can "
        "multiply by the scale once, after the sum?",
        "One number per row: the largest absolute weight, weight.abs().amax(1). The scale is that number / 127, but 1 "
        "where the row is all zeros. The codes are weight / scale, rounded.",
        "amax = …; scale = torch.where(amax == 0, …, …); return (weight / scale[:, None])… .to(torch.int8), scale. The "
        "dots are yours.",
        body_of(quantise_rows),
    ),
    wrong=(*ROWS, *slips.ROWS),
    parts=("codes", "scale"),
)


def _linear_cases() -> list[Case]:
    weight = quantise_rows(torch.tensor([[1.27, 0.4], [0.3, -2.54]]))
    wide = quantise_rows(_random(3, 40, seed=1))
    large = quantise_rows(torch.full((2, 700), 0.5))
    two_sizes = torch.cat((_random(1, 40, seed=2), 50 * _random(1, 40, seed=3)))
    return [
        Case("one token, two inputs, two outputs", (torch.tensor([[1.0, -0.37]]), *weight)),
        Case("a small token beside a large one", (two_sizes, *wide)),
        Case("a token of zeros, such as padding", (torch.stack((torch.zeros(40), _random(40, seed=4))), *wide)),
        Case("a token of very small numbers", (1e-6 * _random(1, 40, seed=20), *wide)),
        Case("a token of even smaller numbers", (1e-20 * _random(1, 40, seed=20), *wide)),
        Case("as many tokens as outputs", (_random(3, 40, seed=5), *wide)),
        Case("a sum over 700 columns of the same sign", (torch.full((1, 700), 3.0), *large)),
    ]


_LINEAR = Exercise(
    name="l05.w8a8_linear",
    reference=w8a8_linear,
    compare=RELATIVE,
    cases=_linear_cases,
    hints=(
        "A token is a row of numbers, and you have a function that quantises rows. What remains is a product of "
        "codes and two scales.",
        "Σ (cx·sx)(cw·sw) = sx·sw·Σ cx·cw, where sx belongs to the token (a row of the result) and sw to the output "
        "(a column). The sum does not fit into int8: 127 · 127 alone is 16129. Convert the codes first.",
        "x_codes, x_scale = …; return (… @ codes.float().T) times the two scales, one shaped [tokens, 1], one [out].",
        "The whole of it (if you have skipped quantise_rows, call my_rows instead):" + body_of(w8a8_linear),
    ),
    wrong=(*LINEAR, *slips.LINEAR),
)

_GROUPS = Exercise(
    name="l05.quantise_groups",
    reference=quantise_groups,
    compare=RELATIVE,
    cases=lambda: [
        Case("one group, from -0.5 to 1", (torch.tensor([[-0.5, 1.0, 0.23, 0.0]]), 4)),
        Case(
            "two groups of a row, one of small weights", (torch.tensor([[0.01, -0.04, 0.11, 0.02, 1.5, -0.6, 0, 1]]), 4)
        ),
        Case("a group in which all weights are positive", (torch.tensor([[0.8, 1.0, 0.94, 1.5]]), 4)),
        Case("a group of zeros", (torch.tensor([[0.0, 0.0, 1.5, -0.41]]), 2)),
        Case("both ends round up: the largest code would be 16", (torch.tensor([[-0.75, 0.75, 0.22, 0.0]]), 4)),
        Case(
            "weights so small that float16 changes their scale by a tenth",
            (torch.tensor([[-1e-6, -3.1e-7, 0.0, -6.2e-7]]), 4),
        ),
        Case("weights so small that float16 makes their scale 0", (torch.tensor([[0.0, 1e-7, 5e-8, 0.0]]), 4)),
        Case("a range whose scale float16 rounds", (torch.tensor([[-33.3, 71.9, 5.1, 49.0]]), 4)),
        Case("eight outputs, eight inputs, groups of 4", (_random(8, 8, seed=6), 4)),
        Case("three outputs, twelve inputs, groups of 4", (_random(3, 12, seed=18), 4)),
    ],
    hints=(
        "Sixteen levels must reach from the smallest to the largest weight of each group, and 0 must be one of them. "
        "How many steps lie between sixteen levels?",
        "grouped = weight.unflatten(1, (-1, group_size)). Per group: low = min and at most 0, high = max and at least "
        "0, scale = (high - low) / 15 in float16 (1 if that is 0), zero = round(-low / scale), code = round(w / scale) "
        "+ zero, both kept within 0 … 15.",
        "low, high = grouped.amin(2)…, grouped.amax(2)…; scale = (…).half(), and 1 where that is 0; zero = "
        "(…).round().clamp(0, 15); codes = ((grouped / scale.float()[..., None]).round() + …)… .flatten(1). The dots "
        "are yours.",
        body_of(quantise_groups),
    ),
    wrong=(*GROUPS, *slips.GROUPS),
    parts=("codes", "scale", "zero"),
)


GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def _awq_cases() -> list[Case]:
    one_large = torch.tensor([1.0, 1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    steps = torch.tensor([0.1, 8.0, 0.3, 2.0, 0.5, 1.0, 4.0, 0.2])
    dead = torch.tensor([1.0, 1.0, 5.0, 0.0, 1.0, 3.0, 1.0, 2.0])

    def case(label: str, seed: int, weights: Tensor | float, inputs: Tensor | float, grid: Sequence[float]) -> Case:
        weight, x = _random(6, 8, seed=seed) * weights, _random(12, 8, seed=seed + 1) * inputs
        return Case(label, (weight, x, round_in_groups_of_4, grid))

    return [
        case("one input channel is much larger", 7, 1.0, one_large, GRID),
        case("channels of all sizes", 9, 1.0, steps, GRID),
        case("small weights with large inputs", 9, steps.pow(-0.7), steps, GRID),
        case("only a = 0: nothing is scaled", 11, 1.0, 1.0, (0.0,)),
        case("one channel is never active", 13, 1.0, dead, GRID),
        case("all channels alike", 15, 1.0, 1.0, GRID),
        case("the exponents from the largest to the smallest", 9, 1.0, steps, GRID[::-1]),
        case("a = 0 is not among the exponents", 7, 1.0, one_large, GRID[1:]),
        case("channels of all sizes, and a is 0.5 at least", 19, 1.0, steps, GRID[2:]),
        case("large inputs, so that even the smallest error is large", 21, 1.0, 300 * steps, GRID),
    ]


_AWQ = Exercise(
    name="l05.awq_scale",
    reference=awq_scale,
    cases=_awq_cases,
    hints=(
        "If W is multiplied by s, column by column, and x divided by s, the product is the same before rounding. So "
        "try several s, round, and keep the one whose outputs are nearest to x @ weight.T.",
        "For each a: s = max(mean|x|^a, 1e-4) per channel (a mean over tokens, raised to the power first). Then the "
        "squared error of (x / s) @ rounded(weight · s).T against x @ weight.T, summed. Return the (a, s) with the "
        "least.",
        "mean, exact = …; best, least = …, infinity; for a in exponents: s = …; error = ((x / s) @ … - "
        "exact).square().sum(); keep (a, s) if the error is less than the least so far.",
        body_of(awq_scale),
    ),
    wrong=(*AWQ, *slips.AWQ),
    parts=("a", "s"),
)


def _same_split(expected: object, got: object) -> str | None:
    """Compare two answers to `split_outliers`; any choice among weights of equal magnitude is right."""
    problem = values_match(expected, got)
    if problem is None or not isinstance(got, tuple) or len(got) != 2 or values_match(_kinds(expected), _kinds(got)):
        return problem
    weight, (dense, sparse) = sum(expected), got
    alike = values_match(_sizes(expected[1]), _sizes(sparse)) is None
    return None if alike and torch.equal(dense + sparse, weight) and not (dense * sparse).any() else problem


def _kinds(parts: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(list(p.shape), str(p.dtype), str(p.layout)) if isinstance(p, Tensor) else (None,) for p in parts]


def _sizes(part: Tensor) -> Tensor:
    return part.abs().flatten().sort().values


_OUTLIERS = Exercise(
    name="l05.split_outliers",
    reference=split_outliers,
    compare=_same_split,
    cases=lambda: [
        Case("one of four", (torch.tensor([[0.1, 9.0], [0.3, -0.2]]), 0.25)),
        Case("the largest is negative", (torch.tensor([[0.1, 0.9], [-7.0, -0.2]]), 0.25)),
        Case("both outliers in one row", (torch.tensor([[0.1, 9.0, -8.0, 0.2], [0.3, 0.2, 0.1, 0.4]]), 0.25)),
        Case("two of three that are equally large", (torch.tensor([[0.5, -0.5], [0.5, 0.1]]), 0.5)),
        Case("a share that is no whole number of weights: 1.2 of 6", (torch.tensor([[1.0, 5, 2], [4, 3, 0.5]]), 0.2)),
        Case("a share that is almost two weights: 1.8 of 6", (torch.tensor([[1.0, 5, 2], [4, 3, 0.5]]), 0.3)),
        Case("2% of a larger matrix", (_random(10, 20, seed=17), 0.02)),
        Case("half of a matrix of 400", (_random(20, 20, seed=17), 0.5)),
        Case("none at all", (torch.tensor([[0.1, 0.9], [0.3, -0.2]]), 0.0)),
    ],
    hints=(
        "Which weights force a coarse scale on all others? Put those into one matrix and all others into another; "
        "where one matrix has a weight, the other has 0.",
        "Count: int(share · numel), over the whole matrix. Find the indices of the largest absolute values with topk "
        "on the flattened matrix and make a boolean mask of them.",
        "kept = torch.zeros(weight.numel(), dtype=torch.bool); kept[… .indices] = True; kept = kept.view_as(weight). "
        "Then two calls of weight.masked_fill, one with kept and one with ~kept.",
        body_of(split_outliers),
    ),
    wrong=(*OUTLIERS, *slips.OUTLIERS),
    parts=("dense", "sparse"),
)


EXERCISES = [_ROWS, _LINEAR, _GROUPS, _AWQ, _OUTLIERS]
