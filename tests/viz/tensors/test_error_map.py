"""The heat map of errors: its colours can be put in order without colour vision, and no outlier gets lost."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.errors import ConfigError
from minillm.viz.tensors.error_map import LEVELS, ErrorMap
from tests.viz.pictures import description, found, parse, text_of


def lightness(colour):
    """CIE L* of a hex colour, 0 to 100."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    return 116 * y ** (1 / 3) - 16


def drawn(svg, panel=0):
    """Pixels of width per level in one panel."""
    widths = dict.fromkeys(range(len(LEVELS)), 0.0)
    for path in found(svg, "panel")[panel].iter():
        if path.get("data-testid") == "errors":
            runs = path.get("d").split("M")[1:]
            widths[int(path.get("data-state"))] += sum(float(run.split("h")[1]) for run in runs)
    return widths


def test_levels_get_darker_in_even_steps():
    steps = [a - b for a, b in zip(map(lightness, LEVELS), map(lightness, LEVELS[1:]), strict=False)]
    mean = sum(steps) / len(steps)
    assert all(0.6 * mean < step < 1.4 * mean for step in steps), steps


def test_every_error_is_drawn_in_its_level():
    errors = [[0.0, 0.05, 0.5, 1.0], [0.11, 0.12, 0.9, 0.3]]
    widths = drawn(ErrorMap({"a": errors}).to_svg())
    expected = dict.fromkeys(range(9), 0)
    for error in (e for row in errors for e in row):
        expected[min(8, int(error * 9))] += 24
    assert widths == expected


def test_panels_share_one_scale():
    maps = ErrorMap({"small": [[0.1, 0.2]], "large": [[0.1, 1.8]]})
    svg = maps.to_svg()
    assert maps.largest == 1.8
    assert drawn(svg, 0) == {**dict.fromkeys(range(9), 0), 0: 24, 1: 24}
    assert drawn(svg, 1)[8] == 24
    numbers = [text_of(e) for e in found(svg, "legend")[0].iter() if e.tag.endswith("text")]
    assert numbers == [
        "absolute error, linear scale",
        "0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
        "1",
        "1.2",
        "1.4",
        "1.6",
        "1.8",
        "the largest absolute error",
    ]


def test_large_numbers_of_the_scale_are_written_out():
    numbers = [text_of(e) for e in found(ErrorMap({"a": [[1.0, 134.4]]}).to_svg(), "legend")[0].iter()]
    assert "134" in numbers and "119" in numbers and not any("e+" in number for number in numbers)


def test_sign_is_dropped_and_tensors_are_taken():
    matrix = torch.tensor([[0.5, -1.0]])
    assert ErrorMap({"a": matrix}).to_svg() == ErrorMap({"a": [[0.5, 1.0]]}).to_svg()


def test_outlier_survives_however_large_the_tensor_is():
    errors = torch.full((700, 900), 0.01)
    errors[613, 77] = 5.0
    [panel] = ErrorMap({"a": errors}).panels
    assert max(map(max, panel.cells)) == 5.0
    assert (panel.at, panel.largest) == ((613, 77), 5.0)
    assert panel.cells[613 // panel.per_cell[0]][77 // panel.per_cell[1]] == 5.0
    svg = ErrorMap({"a": errors}).to_svg()
    assert drawn(svg)[8] > 0
    assert f"a cell shows the largest of {panel.per_cell[0] * panel.per_cell[1]} neighbours" in svg


def test_panels_of_different_coarseness_say_so():
    maps = ErrorMap({"large": [[1.0] * 2000], "small": [[1.0]]})
    large, small = maps.panels
    assert small.per_cell == (1, 1) and large.per_cell[1] > 1
    assert f"a cell shows the largest of up to {large.per_cell[1]} neighbours" in maps.to_svg()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (60, 60), (3, 2000), (2000, 3), (300, 400)])
def test_pictures_stay_small(count, shape):
    chance = random.Random(0)
    errors = [[chance.random() for _ in range(shape[1])] for _ in range(shape[0])]
    svg = ErrorMap({f"panel {i}": errors for i in range(count)}).to_svg()
    assert len(svg.encode()) < 50_000
    parse(svg)


def test_log_scale_spreads_four_decades():
    maps = ErrorMap({"a": [[1.0, 0.01, 0.0001, 0.0]]}, scale="log")
    assert [maps.level(error, 1.0) for error in (1.0, 0.01, 0.0001, 0.00001, 0.0)] == [8, 4, 0, 0, 0]
    linear = ErrorMap({"a": [[1.0]]})
    assert [linear.level(error, 1.0) for error in (1.0, 0.5, 0.01)] == [8, 4, 0]


def test_description_holds_the_numbers_of_the_picture():
    svg = ErrorMap({"per token": [[0.0, 0.25], [0.5, 0.0]]}).to_svg()
    told = "per token: 2 tokens × 2 channels, largest absolute error 0.5 at token 1, channel 0; mean 0.188."
    assert told in description(svg)
    assert "largest 0.5 · mean 0.188" in svg


def test_no_error_at_all_is_a_light_map():
    svg = ErrorMap({"exact": [[0.0, 0.0]]}).to_svg()
    assert drawn(svg) == {**dict.fromkeys(range(9), 0), 0: 48}


def test_what_cannot_be_drawn_is_refused():
    for errors, why in (
        ({}, "0 panels"),
        ({str(i): [[1.0]] for i in range(5)}, "5 panels"),
        ({"a": []}, "rows of lengths"),
        ({"a": [[1.0], [1.0, 2.0]]}, "rows of lengths"),
        ({"a": [1.0]}, "matrix"),
        ({"a": [[float("nan")]]}, "not finite"),
    ):
        with pytest.raises(ConfigError, match=why):
            ErrorMap(errors)
    with pytest.raises(ConfigError, match="scale='cubic'"):
        ErrorMap({"a": [[1.0]]}, scale="cubic")


def test_shown_as_svg_with_a_constant_text():
    shown = ErrorMap({"a": [[1.0]]})
    assert repr(shown) == "<ErrorMap>"


def test_every_cell_stands_for_as_many_numbers_and_values_are_not_called_errors():
    """64 rows in cells of 3 leave one row alone in the last, which looks light."""
    picture = ErrorMap({name: [[1.0] * 64 for _ in range(64)] for name in "ab"}, unit="absolute value")
    assert {panel.per_cell for panel in picture.panels} == {(2, 1)}
    assert len(picture.panels[0].cells) == 32
    svg = picture.to_svg()
    assert "a cell shows the largest of 2 neighbours" in svg and ">the largest absolute value<" in svg
