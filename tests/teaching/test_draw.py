"""Expected beside got as a picture: what is drawn, what is crossed, and that colour never says anything alone."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from minillm.teaching.check_function import check_function
from minillm.teaching.draw import CELL, as_html, as_text, cells_of
from minillm.teaching.exercise import Case, Exercise

MASK = Exercise(
    name="l90.mask",
    reference=lambda n: torch.ones(n, n).tril().bool(),
    cases=[Case("three tokens", (3,))],
    hints=("a", "b", "c", "d"),
    wrong=(),
)


def strict_mask(n):
    return torch.ones(n, n).tril(-1).bool()


def test_a_mask_is_drawn_beside_the_expected_one_and_what_differs_is_crossed():
    lines = str(check_function(MASK, strict_mask)).splitlines()
    picture = [line.strip() for line in lines if "✓" in line or "·" in line]
    assert picture == ["✓ · ·       ·✗ ·  ·", "✓ ✓ ·       ✓  ·✗ ·", "✓ ✓ ✓       ✓  ✓  ·✗"]


def test_the_drawing_is_one_svg_on_a_white_card_that_says_in_words_what_it_shows():
    page = check_function(MASK, strict_mask)._repr_html_()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    space = "{http://www.w3.org/2000/svg}"
    assert svg.get("role") == "img"
    assert "3 of 9 cells differ" in svg.get("aria-label")
    assert len(svg.findall(f"{space}rect")) == 18
    assert len(svg.findall(f"{space}path")) == 3
    assert "background: #ffffff" in page and "border: 1px solid" in page
    assert "id=" not in page


def test_every_cell_says_in_ink_what_it_says_in_colour():
    page = as_html([[True, False]] * 3, [[True, True]] * 3)
    assert page.count(">✓<") == 9
    assert page.count(">·<") == 3
    assert as_html([[True]], [[False]]).count("<path") == 1


@pytest.mark.parametrize(
    ("value", "cells"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([[[True, False]]]), [[True, False]]),
        (torch.tensor([[0.0, -torch.inf]]), [[True, False]]),
        ([[3, 0], [1]], [[3, 0], [1]]),
        ([8, 9, 10], [[8, 9, 10]]),
        (torch.tensor([[0.5, 1.0]]), None),
        (torch.zeros(2, 2), None),
        (torch.zeros(100, 100, dtype=torch.int64), None),
        (torch.zeros(2, 2, 2, dtype=torch.int64), None),
        ("text", None),
        ([], None),
    ],
)
def test_only_small_grids_of_whole_numbers_truth_values_and_masks_are_drawn(value, cells):
    assert cells_of(value) == cells


def test_tables_of_different_length_are_drawn_each_in_its_own_size():
    assert as_text([[1, 2, 3]], [[1, 2, 3, 4], [5]]).splitlines() == [
        "expected    got (✗ differs)",
        "1 2 3       1  2  3  4✗",
        "            5✗",
    ]


def test_wide_numbers_get_wide_cells():
    narrow, wide = as_html([[1] * 6], [[2] * 6]), as_html([[1] * 6], [[20_000] * 6])
    assert f'width="{CELL}"' in narrow
    assert f'width="{CELL}"' not in wide


def test_an_exercise_can_draw_what_is_no_grid_itself():
    def written(expected, got):
        return ~expected.isnan(), ~got.isnan()

    rows = torch.arange(12.0).view(3, 4)
    exercise = Exercise(
        name="l90.rows",
        reference=lambda x: x.clone(),
        cases=[Case("three rows", (rows,))],
        hints=("a", "b", "c", "d"),
        wrong=(),
        draw=written,
    )

    def forgets_the_last(x):
        out = torch.full_like(x, torch.nan)
        out[:-1] = x[:-1]
        return out

    assert "✓ ✓ ✓ ✓     ·✗ ·✗ ·✗ ·✗" in str(check_function(exercise, forgets_the_last))
    broken = dataclasses.replace(exercise, draw=lambda expected, got: got.nothing)
    assert "values: 4 of 12 differ" in str(check_function(broken, forgets_the_last))
