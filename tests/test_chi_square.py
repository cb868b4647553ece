"""Pearson's test where some cells are rare."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from tests.chi_square import p_value, pooled_p_value

PROBS = torch.tensor([prod(each) for each in product((0.7, 0.25, 0.05), repeat=3)], dtype=torch.float64)
"""Of three tokens that are drawn independently."""
COUNTS = torch.tensor([137, 49, 10, 49, 18, 3, 10, 3, 1, 49, 18, 3, 18, 6, 1, 3, 1, 0, 10, 3, 1, 3, 1, 0, 1, 0, 2])
"""As expected of 400 draws, but for the rarest cell: expected 0.05 times, drawn twice. It happens once in 800 runs."""


def test_a_rare_cell_that_is_drawn_twice_is_no_sign_of_a_mistake() -> None:
    assert int(COUNTS.sum()) == 400
    assert p_value(COUNTS, PROBS) < 1e-6
    assert pooled_p_value(COUNTS, PROBS) > 0.99


def test_without_rare_cells_nothing_is_pooled() -> None:
    probs = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25])
    counts = torch.tensor([14, 22, 25, 12, 27])
    assert pooled_p_value(counts, probs) == pytest.approx(p_value(counts, probs))


def test_the_cell_of_all_others_is_not_rare() -> None:
    """The last is expected twice, and is pooled with the one before."""
    probs = torch.tensor([0.3, 0.25, 0.2, 0.12, 0.11, 0.02])
    counts = torch.tensor([28, 27, 19, 13, 9, 4])
    expected = p_value(torch.tensor([28, 27, 19, 13, 13]), torch.tensor([0.3, 0.25, 0.2, 0.12, 0.13]))
    assert pooled_p_value(counts, probs) == pytest.approx(expected)
