"""Pearson's χ² test of counts against probabilities, with any version of scipy."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor


def p_value(counts: Tensor, probs: Tensor) -> float:
    """How likely counts as far off as `counts` are, drawn from `probs`. Both of one shape; `probs` sum to 1."""
    probs = probs.double()
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    return float(chisquare(counts, counts.sum() * probs / probs.sum()).pvalue)


def pooled_p_value(counts: Tensor, probs: Tensor) -> float:
    """`p_value` with all cells that are expected fewer than five times made one. With such rare cells, the p of a
    correct sampler may fall below 1e-6 once in 60 runs. `counts`, `probs`: `[cells]`."""
    total = int(counts.sum())
    order = probs.argsort(descending=True)
    counts, probs = counts[order], probs[order]
    often = int((probs * total >= 5).sum())
    if often < len(probs):
        if float(probs[often:].sum()) * total < 5:
            often -= 1  # the cell of all others is expected five times, too
        counts, probs = (torch.cat((x[:often], x[often:].sum()[None])) for x in (counts, probs))
    assert len(probs) > 3, "too few cells for a test"
    return p_value(counts, probs)
