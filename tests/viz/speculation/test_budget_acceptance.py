"""Acceptance by KV budget: points lie at their values, bars show what is read, the words say the numbers."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.viz.speculation.budget_acceptance import BOTTOM, HEIGHT, BudgetAcceptance, BudgetLine
from tests.viz.pictures import description, found, text_of

SINKS = BudgetLine("sink and window", [32, 128, 1024], [0.5, 0.75, 1.0], [0.25, 0.5, 1.0], [0.625, 1.0, 1.0])
SNAPKV = BudgetLine("Snap<KV>", [32, 128, 1024], [0.625, 0.875, 1.0])
PICTURE = BudgetAcceptance([SINKS, SNAPKV], 1024, ("draft model", 0.6))


def points(svg: str, line: int) -> list[tuple[float, float]]:
    """Centre of each mark, from its translation."""
    places = []
    for mark in found(svg, "line")[line].iter():
        if mark.get("transform"):
            x, y = mark.get("transform")[len("translate(") : -1].split()
            places.append((float(x), float(y)))
    return places


def test_points_are_as_high_as_their_acceptance() -> None:
    svg = PICTURE.to_svg()
    for i, line in enumerate((SINKS, SNAPKV)):
        heights = [BOTTOM - HEIGHT * share for share in line.acceptance]
        assert [y for _, y in points(svg, i)] == pytest.approx(heights, abs=0.1)
        marks = [e for e in found(svg, "line")[i].iter() if e.get("data-testid") == "point"]
        assert [float(mark.get("data-acceptance")) for mark in marks] == list(line.acceptance)


def test_equal_ratios_of_budgets_are_equally_far_apart() -> None:
    at = [x for x, _ in points(PICTURE.to_svg(), 0)]
    assert (at[2] - at[1]) / (at[1] - at[0]) == pytest.approx(3 / 2, abs=0.01), "32 → 128 → 1024: 4 and 8 times"


def test_bars_are_filled_as_far_as_the_cache_is_read() -> None:
    bars = found(PICTURE.to_svg(), "read")
    assert [float(bar.get("data-share")) for bar in bars] == pytest.approx([32 / 1024, 128 / 1024, 1], abs=0.001)
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[1] / widths[2] == pytest.approx(1 / 8, abs=0.01)


def test_only_lines_with_a_spread_have_thin_bars() -> None:
    lines = found(PICTURE.to_svg(), "line")
    assert [sum(e.get("stroke-opacity") is not None for e in line.iter()) for line in lines] == [3, 0]


def test_words_have_every_number() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe() and repr(PICTURE) == "<BudgetAcceptance>"
    assert "sink and window: 32 tokens 50%, 128 tokens 75%, 1024 tokens 100%." in words
    assert "Snap<KV>: 32 tokens 62%, 128 tokens 88%" in words and "draft model: 60%" in words
    assert "1024 tokens" in words


def test_the_list_says_from_where_on_most_are_accepted() -> None:
    text = text_of(found(PICTURE.to_svg(), "budget-acceptance")[0])
    assert "80% from 1,024 tokens on" in text and "80% from 128 tokens on" in text
    low = BudgetAcceptance([BudgetLine("a", [16], [0.3])], 64)
    assert "does not stay above 80%" in low.to_svg() and not found(low.to_svg(), "reference")
    assert len(found(PICTURE.to_svg(), "reference")) == 1
    falling = BudgetLine("a", [32, 64, 128, 256], [0.75, 0.82, 0.78, 0.9])
    assert "80% from 256 tokens on" in BudgetAcceptance([falling], 512).to_svg()


def test_budgets_of_lines_may_differ() -> None:
    picture = BudgetAcceptance([SINKS, BudgetLine("b", [64], [0.5])], 1024)
    assert picture.budgets == [32, 64, 128, 1024] and len(found(picture.to_svg(), "read")) == 4


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "0 lines"),
        ([SINKS] * 5, "5 lines"),
        ([BudgetLine("a", [16, 32], [0.5])], r"'a' has columns of lengths \[1, 2\]"),
        ([BudgetLine("a", [], [])], r"lengths \[0\]"),
        ([BudgetLine("a", [16], [0.5], [0.1, 0.2])], r"lengths \[1, 2\]"),
        ([BudgetLine("a", [2048], [0.5])], "from 1 to 1024"),
        ([BudgetLine("a", [0], [0.5])], "from 1 to 1024"),
        ([BudgetLine("a", [32, 16], [0.5, 0.6])], r"budgets \[32, 16\] must be ascending"),
        ([BudgetLine("a", [16], [1.2])], "from 0 to 1"),
        ([BudgetLine("a", [16], [0.5], [-0.1], [0.6])], "from 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(lines: list[BudgetLine], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BudgetAcceptance(lines, 1024)


@pytest.mark.parametrize("share", [85, -0.1, float("nan")])
def test_a_reference_that_is_no_acceptance_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"reference 'draft model': acceptance {share} must be from 0 to 1"):
        BudgetAcceptance([SINKS], 1024, ("draft model", share))


def test_thin_bars_are_explained_only_where_there_are_some() -> None:
    assert "thin bars" in PICTURE.to_svg()
    assert "thin bars" not in BudgetAcceptance([SNAPKV], 1024).to_svg()
