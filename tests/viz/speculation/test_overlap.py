"""The picture of p over q: accepted and recovered together are p, accepted and rejected together are q."""

from __future__ import annotations

import pytest

from minillm.errors import ConfigError
from minillm.viz.speculation.overlap import OverlapBars
from tests.viz.pictures import description, found, parse

BARS = OverlapBars(("for", "if", "return"), (0.25, 0.25, 0.5), (0.5, 1 / 6, 1 / 3))


def parts(svg: str) -> list[tuple[str, float]]:
    """Kind and height of every part of a bar."""
    found_parts = [element for element in parse(svg).iter() if element.get("data-part")]
    return [(part.get("data-part"), float(part.get("height"))) for part in found_parts]


def test_parts_have_the_sizes_of_acceptance_rejection_and_recovery():
    heights = parts(BARS.to_svg())
    assert [kind for kind, _ in heights] == ["accepted", "rejected", "accepted", "recovered", "accepted", "recovered"]
    unit = heights[0][1] / 0.25
    assert [height / unit for _, height in heights] == pytest.approx(
        [1 / 4, 1 / 4, 1 / 6, 1 / 12, 1 / 3, 1 / 6], abs=2e-3
    )
    assert BARS.accepted == pytest.approx(0.75)


def test_equal_rows_have_neither_rejected_nor_recovered_parts():
    assert [kind for kind, _ in parts(OverlapBars("ab", (0.5, 0.5), (0.5, 0.5)).to_svg())] == ["accepted"] * 2


def test_the_words_and_the_labels_are_there():
    svg = BARS.to_svg()
    assert "75.0% of drafts are accepted. “for” target 25.0%, draft 50.0%" in description(svg)
    assert len(found(svg, "token")) == 3
    assert repr(BARS) == "<OverlapBars>"


@pytest.mark.parametrize(
    ("rows", "says"),
    [(((0.5,), (0.5, 0.5)), "2 tokens, 1 numbers of the target"), (((0.5, 0.5), (0.5, 0.4)), "draft's")],
)
def test_rows_that_are_no_distributions_are_refused(rows: tuple, says: str):
    with pytest.raises(ConfigError, match=says):
        OverlapBars("ab", *rows)
