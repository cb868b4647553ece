"""The smallest part in which an answer differs: the entry, and its rows and columns around the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from minillm.teaching.compare import values_match
from minillm.teaching.exercise import Compare
from minillm.teaching.show import MAX_FULL, MAX_LINE, brief, kind, rows_of, short

WINDOW = 2
"""Neighbours shown on each side of the first wrong number."""


def without_conditions(answer: Any) -> Any:
    """What a drive such as `drives.l16.own_outputs` returned, without the conditions that it tested, which are bools.

    If then only what the function itself returned is left, it is no dict any more.
    """
    if not isinstance(answer, Mapping) or "returned" not in answer:
        return answer
    parts = {name: part for name, part in answer.items() if name == "returned" or not isinstance(part, bool)}
    return parts if len(parts) > 1 else parts["returned"]


def focus(expected: Any, got: Any, compare: Compare = values_match) -> tuple[str, Any, Any]:
    """The path of the first differing entry inside lists, tuples and dicts, and that entry on both sides.

    The path is "" if the values differ as a whole: another type, length or set of keys, or plain values. An answer that
    a drive returned with conditions beside it is looked at without these (`without_conditions`).
    """
    path, expected, got = "", without_conditions(expected), without_conditions(got)
    while True:
        step = next(((at, e, g) for at, e, g in _entries(expected, got) if compare(e, g) is not None), None)
        if step is None:
            return path, expected, got
        path, expected, got = path + step[0], step[1], step[2]


def in_words(expected: Any, got: Any, compare: Compare = values_match) -> tuple[str, str]:
    """Both values for a report: in full if they are small, else the neighbourhood of the first difference."""
    whole = short(without_conditions(expected)), short(without_conditions(got))
    if max(map(len, whole)) <= MAX_LINE and not any("\n" in text for text in whole):
        return whole
    try:
        return _around_the_difference(expected, got, compare)
    except Exception:  # an answer that cannot be compared must still be shown
        return whole


def _around_the_difference(expected: Any, got: Any, compare: Compare) -> tuple[str, str]:
    path, e, g = focus(expected, got, compare)
    at = f"at {path}: " if path else ""
    if _arrays_of_one_shape(e, g):
        e, g = torch.as_tensor(e).detach().cpu(), torch.as_tensor(g).detach().cpu()
        window = _window(e, g) if e.numel() > MAX_FULL else None
        if window is not None:
            return tuple(f"{at}{kind(x)}, {_place(window)}:\n{rows_of(x[window])}" for x in (e, g))
    if isinstance(e, torch.Tensor) and isinstance(g, torch.Tensor) and e.shape != g.shape:
        return at + brief(e), at + brief(g)
    return at + short(e), at + short(g)


def _entries(expected: Any, got: Any) -> list[tuple[str, Any, Any]]:
    """The pairs of corresponding entries: (path, expected, got)."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and expected.keys() == got.keys():
        return [(f"[{key!r}]", expected[key], got[key]) for key in expected]
    both = (list, tuple)
    alike = isinstance(expected, both) and isinstance(got, both) and len(expected) == len(got)
    if alike and any(isinstance(part, (*both, dict, torch.Tensor, np.ndarray)) for part in expected):
        return [(f"[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    return []


def _arrays_of_one_shape(expected: Any, got: Any) -> bool:
    kinds = (torch.Tensor, np.ndarray)
    return isinstance(expected, kinds) and isinstance(got, kinds) and tuple(expected.shape) == tuple(got.shape)


def _window(expected: torch.Tensor, got: torch.Tensor) -> tuple[slice | int, ...] | None:
    """Rows and columns around the first number that differs; None if none does (only the dtype differs)."""
    wrong = ~torch.isclose(expected.double(), got.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    if not wrong.any():
        return None
    index = wrong.nonzero()[0].tolist()
    near = [slice(max(0, i - WINDOW), i + WINDOW + 1) for i in index[-2:]]
    return (*index[:-2], *near)


def _place(window: tuple[slice | int, ...]) -> str:
    parts = [f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in window]
    return f"around the first that differs, [{', '.join(parts)}]"
