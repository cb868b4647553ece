"""What is wrong with an answer, as a fact: said when no planted mistake answers as the learner did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.teaching.diagnosis_tensors import about_tensors
from minillm.teaching.exercise import Attempt
from minillm.teaching.fence import BITS, CANARY


def unless(attempt: Attempt, condition: str, otherwise: str) -> str | None:
    """`otherwise`, if the answer does not meet `condition`, a part of what the case's drive returned."""
    return None if attempt.got[condition] else otherwise  # type: ignore[index]


def about_factor(attempt: Attempt) -> str | None:
    """The factor between a number and the right one: it hints at what was left out or counted twice. If the number may
    be the right one, rounded, that is asked, too."""
    got, expected = attempt.got, attempt.expected
    if not isinstance(got, (int, float)) or isinstance(got, bool) or not expected > 0:  # type: ignore[operator]
        return None
    if not got > 0:
        return "your result must be above 0 here" + (": is something rounded down?" if got == 0 else "")
    times, side = (got / expected, "large") if got > expected else (expected / got, "small")  # type: ignore[operator]
    rounded = ""
    if got == expected // 1:  # type: ignore[operator]
        rounded = ", or is it rounded down, as by // and int"
    elif got in [round(expected, digits) for digits in range(4)]:  # type: ignore[call-overload]
        rounded = ", or is it rounded"
    return f"your result is {times:.4g} times too {side} here: which inputs explain this factor{rounded}?"


def about_tensor(expected: Tensor, got: object, axes: Sequence[str], name: str = "the result") -> str | None:
    """Which numbers are wrong, and what they have in common. `axes`: what each dimension counts ("row", "column")."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or not got.is_floating_point():
        return None
    wrong = ~torch.isclose(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not wrong.any():
        return None
    unwritten = got.contiguous().view(BITS[got.dtype.itemsize]) == CANARY.get(got.dtype, 0)
    if got.dtype in CANARY and unwritten.any():
        return _unwritten(unwritten, axes, name)
    if (got.isnan() & ~expected.isnan()).any():
        return f"{name} has NaN: a number was used that nobody has written, or 0 divided by 0, or infinity by infinity"
    if fact := about_tensors([(expected, got)]):
        return f"{name} {fact}"
    return _one_side(wrong, axes, name)


def _unwritten(unwritten: Tensor, axes: Sequence[str], name: str) -> str:
    """How many numbers nobody has written, and where they are."""
    if unwritten.all():
        return f"nothing is written into {name}, or only numbers that nobody has written"
    for axis, what in enumerate(axes[: unwritten.dim()]):
        others = [i for i in range(unwritten.dim()) if i != axis]
        never = unwritten.all(dim=others) if others else unwritten
        if never.any() and int(unwritten.sum()) == int(never.sum()) * unwritten.numel() // len(never):
            numbers = ", ".join(map(str, never.nonzero()[:, 0].tolist()[:8]))
            return f"of {name} only some is written: {what} {numbers} never is (counted from 0, of {len(never)})"
    return f"{int(unwritten.sum())} of {unwritten.numel()} numbers of {name} are never written"


def _one_side(wrong: Tensor, axes: Sequence[str], name: str) -> str | None:
    """The dimension along which right and wrong can be told apart; None if there is none."""
    for axis, what in enumerate(axes[: wrong.dim()]):
        others = [i for i in range(wrong.dim()) if i != axis]
        bad = wrong.any(dim=others) if others else wrong
        if bad.any() and not bad.all():
            numbers = ", ".join(map(str, bad.nonzero()[:, 0].tolist()[:8]))
            return f"in {name} only {what} {numbers} is wrong, of {len(bad)} (counted from 0)"
    return None
