"""The surface: cells have the best number of drafts, losing cells lie beyond the line, points where they belong."""

from __future__ import annotations

from itertools import pairwise

import pytest

from minillm.errors import ConfigError
from minillm.teaching.exercises.l11_speculative_speed import best_gamma, expected_tokens
from minillm.viz.speculation.speed_up_surface import (
    ALPHAS,
    PRICES,
    SpeedPoint,
    SpeedUpSurface,
    best_speed_up,
)
from tests.viz.pictures import description, found, text_of

PICTURE = SpeedUpSurface([SpeedPoint("draft <model>", 0.8, 0.1, 1.9), SpeedPoint("new text", 0.2, 0.3)], row=0.1)


@pytest.mark.parametrize(("c", "gamma", "speed"), [(0.02, 11, 3.82), (0.1, 6, 2.47), (0.2, 4, 1.87)])
def test_the_textbook_numbers_for_an_acceptance_of_80_percent(c: float, gamma: int, speed: float) -> None:
    assert best_speed_up(0.8, c, 0.0, max_gamma=20) == (gamma, pytest.approx(speed, abs=0.005))


def test_each_cell_has_the_number_that_the_exercise_finds() -> None:
    cells = found(PICTURE.to_svg(), "cell")
    where = [(alpha, c) for c in PRICES for alpha in ALPHAS]
    assert len(cells) == len(where)
    for cell, (alpha, c) in zip(cells, where, strict=True):
        mine, best = int(cell.get("data-gamma")), best_gamma([alpha] * 8, c, [1 + 0.1 * g for g in range(9)])
        speeds = [expected_tokens([alpha] * g) / (1 + g * (c + 0.1)) for g in (mine, best)]
        assert mine <= best and speeds[0] == pytest.approx(speeds[1]), "both are the fastest, the cell has the smaller"
        assert (cell.get("data-state") == "pays") == (cell.get("data-gamma") != "0")


@pytest.mark.parametrize("row", [0.0, 0.1, 0.33])
def test_drafts_pay_exactly_beyond_the_line(row: float) -> None:
    """α > c + row, for a round of any length."""
    for alpha in (0.05, 0.3, 0.6, 0.95):
        for c in (0.0, 0.1, 0.2, 0.5):
            if abs(alpha - c - row) > 1e-9:
                assert (best_speed_up(alpha, c, row)[0] > 0) == (alpha > c + row)


def test_a_point_lies_on_its_cell() -> None:
    svg = PICTURE.to_svg()
    [ring] = [e for e in found(svg, "point")[0].iter() if e.tag.endswith("circle")]
    cell = found(svg, "cell")[PRICES.index(0.1) * len(ALPHAS) + ALPHAS.index(0.8)]
    box = next(e for e in cell.iter() if e.tag.endswith("rect"))
    for at, edge, size in (("cx", "x", "width"), ("cy", "y", "height")):
        assert float(ring.get(at)) == pytest.approx(float(box.get(edge)) + float(box.get(size)) / 2, abs=1)


def test_no_number_lies_below_a_letter() -> None:
    svg = PICTURE.to_svg()
    cell = found(svg, "cell")[PRICES.index(0.1) * len(ALPHAS) + ALPHAS.index(0.8)]
    assert text_of(cell) == "" and text_of(found(svg, "point")[0]) == "A"
    on_line = [cell for cell in found(svg, "cell") if not text_of(cell)]
    assert 2 < len(on_line) <= 2 + len(PRICES), "besides, only cells that the line crosses"


def test_words_say_what_pays_and_what_was_measured() -> None:
    words = description(PICTURE.to_svg())
    assert words == PICTURE.describe()
    gamma, speed = best_speed_up(0.8, 0.1, 0.1)
    assert f"draft <model>: α = 0.80, c = 0.10: pays, best γ {gamma}, predicted {speed:.2f}×, measured 1.90×." in words
    assert "new text: α = 0.20, c = 0.30: does not pay, best γ 0, predicted 1.00×." in words
    assert repr(PICTURE) == "<SpeedUpSurface>" and "above c + 0.10" in words


@pytest.mark.parametrize("c", [0.05, 0.45])
def test_letters_of_equal_points_do_not_cover_each_other(c: float) -> None:
    svg = SpeedUpSurface([SpeedPoint(name, 0.6, c) for name in "abc"]).to_svg()
    heights = sorted(float(mark.find(".//{*}text").get("y")) for mark in found(svg, "point"))
    assert min(b - a for a, b in pairwise(heights)) >= 24
    assert len(found(svg, "way")) == 2


def test_the_line_is_drawn_unless_nothing_can_pay() -> None:
    assert len(found(PICTURE.to_svg(), "break-even")) == 1
    assert not found(SpeedUpSurface([], row=1.5).to_svg(), "break-even")
    assert "break-even" in text_of(found(PICTURE.to_svg(), "legend")[0])


@pytest.mark.parametrize(
    ("points", "row", "says"),
    [
        ([], -0.1, "row=-0.1 must be 0 or more"),
        ([], float("nan"), "row=nan"),
        ([SpeedPoint("a", 1.2, 0.1)], 0.0, "'a' with alpha=1.2"),
        ([SpeedPoint("a", 0.2, 0.7)], 0.0, "c from 0 to 0.5"),
    ],
)
def test_what_cannot_be_drawn_is_refused(points: list[SpeedPoint], row: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SpeedUpSurface(points, row)
