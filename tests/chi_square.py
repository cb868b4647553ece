"""Pearson's χ² test of counts against probabilities, with any version of scipy."""

from __future__ import annotations

import pytest
from scipy.stats import chisquare
from torch import Tensor


def p_value(counts: Tensor, probs: Tensor) -> float:
    """How likely counts as far off as `counts` are, drawn from `probs`. Both of one shape; `probs` sum to 1."""
    probs = probs.double()
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    return float(chisquare(counts, counts.sum() * probs / probs.sum()).pvalue)
