"""Round numbers for axes: 1, 2 or 5 times a power of ten."""

from __future__ import annotations

import math


def round_step(span: float, fewest: int) -> float:
    """The largest round number of which `span` (above 0) has at least `fewest` steps, and so at most 2.5 times as
    many."""
    power = 10.0 ** math.floor(math.log10(span / fewest))
    return next(power * m for m in (5, 2, 1) if span / (power * m) >= fewest)


def one_two_five(low: float, high: float) -> list[float]:
    """The round numbers from `low` (above 0) to `high`, for a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
