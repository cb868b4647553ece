"""χ² panels: the test agrees with scipy, and the picture shows the counts it was given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from minillm.errors import ConfigError
from minillm.viz.charts.chi_square import ChiSquare, ChiSquarePanels, p_text
from tests.viz.pictures import description, found, states

FAIR = [0.25, 0.25, 0.5]
GOOD, BAD = ChiSquare([26, 24, 50], FAIR), ChiSquare([60, 0, 40], FAIR)


@given(counts=st.lists(st.integers(0, 90), min_size=2, max_size=12).filter(lambda c: sum(c) >= 5 * len(c)))
def test_statistic_and_p_value_are_those_of_scipy(counts: list[int]):
    """For even and odd degrees of freedom, which are summed differently."""
    mine, theirs = ChiSquare(counts, [1 / len(counts)] * len(counts)), chisquare(counts)
    assert mine.statistic == pytest.approx(theirs.statistic, abs=1e-9)
    assert mine.p_value == pytest.approx(theirs.pvalue, rel=1e-8, abs=1e-12)
    assert mine.degrees == len(counts) - 1


def test_extreme_counts_give_a_p_value_of_zero_and_not_an_error():
    assert ChiSquare([100_000, 0], [0.5, 0.5]).p_value == 0.0
    assert ChiSquare([50, 50], [0.5, 0.5]).p_value == 1.0


def test_the_picture_shows_every_count_and_marks_what_is_far_off():
    svg = ChiSquarePanels("Counts", ["a", "b", "c"], [("right", GOOD), ("wrong", BAD)]).to_svg()
    assert [cell.get("data-observed") for cell in found(svg, "cell")] == ["26", "24", "50", "60", "0", "40"]
    assert states(svg, "cell") == ["near"] * 3 + ["far", "far", "near"]
    assert states(svg, "panel") == ["passed", "refused"]


def test_the_words_say_what_the_picture_says():
    words = description(ChiSquarePanels("Counts", ["a", "b", "c"], [("right", GOOD), ("wrong", BAD)]).to_svg())
    assert "right: χ² = 0.1, 2 degrees of freedom, p = 0.96: no difference found. Counts: a 26 instead of 25" in words
    assert "p < 10⁻¹²: not the target's distribution" in words


@pytest.mark.parametrize(("p", "text"), [(0.5, "p = 0.5"), (1e-6, "p = 1e-06"), (1e-7, "p < 10⁻⁶"), (0, "p < 10⁻¹²")])
def test_small_p_values_are_not_written_out(p: float, text: str):
    assert p_text(p) == text


@pytest.mark.parametrize(
    ("counts", "probabilities", "says"),
    [
        ([1, 2], [1.0], "2 counts and 1 probabilities"),
        ([10], [1.0], "at least two cells"),
        ([50, 50], [0.5, 0.4], "sum to 0.9, must sum to 1"),
        ([50, 2], [0.95, 0.05], "expected 2.6 times"),
    ],
)
def test_counts_that_cannot_be_tested_are_refused(counts: list[int], probabilities: list[float], says: str):
    with pytest.raises(ConfigError, match=says):
        ChiSquare(counts, probabilities)


def test_no_tests_and_a_test_with_other_cells_are_refused():
    with pytest.raises(ConfigError, match="no tests"):
        ChiSquarePanels("Counts", ["a", "b"], [])
    with pytest.raises(ConfigError, match="test 'right' has 3 cells, the picture names 2"):
        ChiSquarePanels("Counts", ["a", "b"], [("right", GOOD)])
