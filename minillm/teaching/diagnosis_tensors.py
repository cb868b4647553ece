"""How wrong tensors differ from the right ones, as a fact that helps to find the mistake; "" if none is known.

A fact counts only if it holds for every wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""The right tensor and the wrong one."""
DIMENSIONS = ("the first", "the second", "the third", "the fourth", "the fifth")


def about_tensors(pairs: Sequence[Pair]) -> str:
    """The first fact that is true of every pair, as a phrase without subject (`is transposed`); "" if none is."""
    for find_fact in _of_shape, _of_type, _of_values:
        if fact := find_fact(pairs):
            return fact
    return ""


def close(expected: Tensor, got: Tensor) -> bool:
    """Whether shape and numbers are the same; the dtypes may differ."""
    return expected.shape == got.shape and torch.allclose(
        got.double(), expected.double(), rtol=1e-3, atol=near_zero(expected), equal_nan=True
    )


def near_zero(expected: Tensor) -> float:
    """The largest difference that does not count beside the numbers of `expected`, which may be very small."""
    sizes = expected[expected.isfinite()].double().abs()  # a bool has no absolute value
    return 1e-5 * min(1.0, sizes.max().item()) if len(sizes) else 0.0


def _of_shape(pairs: Sequence[Pair]) -> str:
    if any(e.shape == g.shape for e, g in pairs):
        return ""
    expected, got = pairs[0]
    if all(e.dim() >= 2 and close(e.transpose(-1, -2), g) for e, g in pairs):
        return "is transposed: its last two dimensions are exchanged"
    if all(e.numel() == g.numel() and close(e.flatten(), g.flatten()) for e, g in pairs):
        return f"holds the right numbers in another shape, {_shapes(expected, got)}"
    if all(g.dim() > 0 and len(g) < len(e) and close(e[: len(g)], g) for e, g in pairs):
        return "ends too early: the entries that it has are right"
    if got.dim() != expected.dim():
        more = "too many" if got.dim() > expected.dim() else "too few"
        return f"has {_count(abs(got.dim() - expected.dim()), 'dimension')} {more}: {_shapes(expected, got)}"
    axes = [axis for axis in range(expected.dim()) if expected.shape[axis] != got.shape[axis]]
    if sorted(expected.shape) == sorted(got.shape):
        return f"has its dimensions in another order: {_shapes(expected, got)}"
    return f"has another length along {DIMENSIONS[axes[0]]} dimension: {_shapes(expected, got)}"


def _shapes(expected: Tensor, got: Tensor) -> str:
    return f"{list(got.shape)} instead of {list(expected.shape)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")


def _of_type(pairs: Sequence[Pair]) -> str:
    if not all(e.dtype != g.dtype for e, g in pairs):
        return ""
    expected, got = pairs[0]
    types = f"{got.dtype} instead of {expected.dtype}".replace("torch.", "")
    right = all(close(e, g) for e, g in pairs)
    return f"holds the right numbers as {types}" if right else f"holds {types}, and other numbers"


def _of_values(pairs: Sequence[Pair]) -> str:
    if any(e.shape != g.shape for e, g in pairs):
        return ""
    for fact, holds in VALUES:
        if pairs and all(holds(e.double(), g.double()) for e, g in pairs):
            return fact
    return _factor(pairs) or _offset(pairs) or _by_axis(pairs) or _one_off(pairs) or _where(pairs)


def _is_flipped(axis: int) -> Callable[[Tensor, Tensor], bool]:
    return lambda e, g: e.dim() >= -axis and e.shape[axis] > 1 and close(e.flip(axis), g)


def _is_shifted(axis: int, by: int) -> Callable[[Tensor, Tensor], bool]:
    def holds(e: Tensor, g: Tensor) -> bool:
        length = e.shape[axis] if e.dim() >= -axis else 0
        if length < 3:
            return False
        start = max(0, by), max(0, -by)
        return close(e.narrow(axis, start[1], length - 1), g.narrow(axis, start[0], length - 1))

    return holds


VALUES: tuple[tuple[str, Callable[[Tensor, Tensor], bool]], ...] = (
    ("is NaN everywhere", lambda e, g: bool(g.isnan().all()) and not bool(e.isnan().any())),
    (
        "has NaN: 0 was divided by 0, infinity by infinity, or an unwritten number was used",
        lambda e, g: bool((g.isnan() & ~e.isnan()).any()),
    ),
    (
        "has -inf: the logarithm of 0 or the maximum of nothing, or a number below 0 divided by 0",
        lambda e, g: bool((g.isinf() & ~e.isinf()).any()) and not bool(((g == torch.inf) & ~e.isinf()).any()),
    ),
    (
        "has infinities: something is divided by 0, or an exponential overflows",
        lambda e, g: bool((g.isinf() & ~e.isinf()).any()),
    ),
    (
        "is right to about one part in a thousand, and no better: is something rounded or cast to a shorter type, "
        "or is a small number added?",
        lambda e, g: close(e, g) and bool((e != e.round()).any() or (g != g.round()).any()),
    ),
    ("is 0 everywhere", lambda e, g: not g.any()),
    ("has the opposite sign everywhere", lambda e, g: close(-e, g)),
    ("has lost its signs: the absolute values are right", lambda e, g: close(e.abs(), g)),
    ("has some signs exchanged: the absolute values are right", lambda e, g: close(e.abs(), g.abs())),
    ("is the inverse of what it should be: 1 divided by each number", lambda e, g: close(1 / e, g)),
    ("is transposed: its last two dimensions are exchanged", lambda e, g: e.dim() > 1 and close(e.mT, g)),
    ("is in reverse order along the last dimension", _is_flipped(-1)),
    ("is in reverse order along the last but one dimension", _is_flipped(-2)),
    ("is one place late along the last dimension", _is_shifted(-1, 1)),
    ("is one place early along the last dimension", _is_shifted(-1, -1)),
    (
        "holds the right numbers in other places",
        lambda e, g: e.numel() > 2 and close(e.flatten().sort().values, g.flatten().sort().values),
    ),
    ("is the same number everywhere", lambda e, g: g.numel() > 1 and bool((g == g.flatten()[0]).all())),
)


def _ratios(expected: Tensor, got: Tensor) -> Tensor:
    return torch.where(expected != 0, got.double() / expected.double(), torch.nan)


def _factor(pairs: Sequence[Pair]) -> str:
    """Whether each answer is wrong by one factor, which may be the same for all answers or not. 1 is no such factor."""
    factors = []
    for expected, got in pairs:
        some = (expected != 0) & expected.isfinite()
        ratios = _ratios(expected, got)[some]
        if len(ratios) < 2 or not torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=2e-3, atol=0):
            return ""
        if (got[~some & (expected == 0)] != 0).any():
            return ""
        factors.append(ratios[0].item())
    if not factors or not all(math.isfinite(factor) and abs(factor - 1) > 2e-3 for factor in factors):
        return ""
    if all(abs(factor - factors[0]) <= 2e-3 * abs(factors[0]) for factor in factors):
        return f"is {factors[0]:.3g} times what it should be, everywhere"
    return f"is right up to one factor for the whole answer, in this case {factors[0]:.3g}"


def _offset(pairs: Sequence[Pair]) -> str:
    offsets = [got.double() - expected.double() for expected, got in pairs]
    first = [difference.flatten()[0] for difference in offsets if difference.numel()]
    if not first or any(x.numel() < 2 or not _same(x, x.flatten()[0]) for x in offsets):
        return ""
    if not all(_same(value, first[0]) for value in first):
        return f"differs by one number everywhere, in this case {first[0].item():+.3g}"
    return f"differs by {first[0].item():+.3g} everywhere"


def _same(numbers: Tensor, number: Tensor) -> bool:
    return torch.allclose(numbers, number.expand_as(numbers), rtol=1e-4, atol=0.0)


def _by_axis(pairs: Sequence[Pair]) -> str:
    """Whether each row, or each column, is right up to a factor of its own."""
    for axis, each in ((-1, "row (along the last dimension)"), (-2, "column (along the last but one dimension)")):
        if all(e.dim() >= 2 and e.shape[axis] > 1 and _scaled_along(e, g, axis) for e, g in pairs):
            return f"is right up to a factor that each {each} has of its own"
    return ""


def _scaled_along(expected: Tensor, got: Tensor, axis: int) -> bool:
    if (expected == 0).any() or not got.isfinite().all():
        return False
    ratios = _ratios(expected, got)
    return torch.allclose(ratios, ratios.narrow(axis, 0, 1).expand_as(ratios), rtol=5e-3, atol=0)


def _one_off(pairs: Sequence[Pair]) -> str:
    """Whether integers are off by one."""
    if not pairs or any(e.is_floating_point() or g.is_floating_point() for e, g in pairs):
        return ""
    differences = torch.cat([(g.long() - e.long()).flatten() for e, g in pairs])
    if differences.abs().max() > 1:
        return ""
    if differences.min() >= 0:
        return "has some numbers that are one too large; its others are right"
    if differences.max() <= 0:
        return "has some numbers that are one too small; its others are right"
    return "has some numbers that are one too large and some that are one too small; its others are right"


def _where(pairs: Sequence[Pair]) -> str:
    """Whether only one end of a dimension is wrong, or only one end is right."""
    for fact, chosen in PLACES:
        if all(e.dim() and _only_there(e, g, chosen) for e, g in pairs):
            return fact
    return ""


def _only_there(expected: Tensor, got: Tensor, chosen: tuple[int, slice]) -> bool:
    axis, part = chosen
    if expected.dim() < -axis or expected.shape[axis] < 2:
        return False
    right = torch.isclose(got.double(), expected.double(), rtol=1e-3, atol=near_zero(expected), equal_nan=True)
    wrong = ~right.movedim(axis, 0)
    there = torch.zeros(len(wrong), dtype=torch.bool)
    there[part] = True
    return not wrong[~there].any() and bool(wrong[there].any())


PLACES: tuple[tuple[str, tuple[int, slice]], ...] = (
    ("is wrong only at the end of the last dimension: its last entries", (-1, slice(-1, None))),
    ("is wrong only at the beginning of the last dimension: its first entries", (-1, slice(0, 1))),
    ("is wrong only in its last row (of the last but one dimension)", (-2, slice(-1, None))),
    ("is wrong only in its first row (of the last but one dimension)", (-2, slice(0, 1))),
    ("is right in its first row, and has wrong numbers after it (of the last but one dimension)", (-2, slice(1, None))),
    ("is right at the beginning of the last dimension, and has wrong numbers after it", (-1, slice(1, None))),
)
