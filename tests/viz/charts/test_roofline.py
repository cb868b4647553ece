"""The roofline picture: where the roof and the points lie, and that words, marks and places say the same."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from minillm.errors import ConfigError
from minillm.viz.charts.roofline import END, NAME_SIZE, Point, Roof, Roofline
from minillm.viz.draw.plot import LEFT, PLOT_HEIGHT, TOP
from minillm.viz.draw.svg import SANS_EM
from tests.viz.pictures import SVG, description, found, parse, states, text_of

ROOF = Roof("a <machine>", bandwidth=20e9, rate=100e9)
"""Its ridge is at 5 operations per byte."""
POINTS = [
    Point("1 row", 0.5, 5e9, group="linear"),
    Point("64 rows", 32.0, 80e9, group="linear"),
    Point("batch 64", 1.5, 30e9, "modelled", group="attention"),
    Point("their figure", 5.0, 60e9, "quoted"),
]
PICTURE = Roofline("What & how much", ROOF, POINTS)


def place(group) -> tuple[float, float]:
    """Where the mark of a point is: it is moved there."""
    moved = next(path.get("transform") for path in group.iter(f"{SVG}path") if path.get("transform"))
    x, y = map(float, re.fullmatch(r"translate\((\S+) (\S+)\)", moved).groups())
    return x, y


def places(svg: str) -> dict[str, tuple[float, float]]:
    return {group.get("data-name"): place(group) for group in found(svg, "point")}


def roof_line(svg: str) -> list[tuple[float, float]]:
    """Start of the slope, ridge, end of the flat part."""
    line = next(path for path in found(svg, "roof")[0].iter(f"{SVG}path") if path.get("stroke-width") == "2")
    x1, y1, x2, y2, x3 = map(float, re.fullmatch(r"M(\S+) (\S+)L(\S+) (\S+)H(\S+)", line.get("d")).groups())
    return [(x1, y1), (x2, y2), (x3, y2)]


def test_ridge_is_where_both_limits_are_equal():
    assert ROOF.ridge == 5
    assert ROOF.attainable(5.0) == ROOF.rate
    assert ROOF.attainable(2.5) == ROOF.rate / 2
    assert ROOF.attainable(500.0) == ROOF.rate


def test_equal_factors_are_equal_distances_across_and_up():
    spots = places(
        Roofline("t", ROOF, [Point(str(n), n, n * 1e9) for n in (1, 10)] + [Point("100", 100, 1e11)]).to_svg()
    )
    (x1, y1), (x2, y2), (x3, y3) = spots["1"], spots["10"], spots["100"]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)


@pytest.mark.parametrize("intensity", [0.3, 1.0, 5.0, 40.0, 600.0])
def test_a_point_that_reaches_its_limit_lies_on_the_drawn_roof(intensity: float):
    svg = Roofline("t", ROOF, [Point("p", intensity, ROOF.attainable(intensity))]).to_svg()
    (x, y), ((x1, y1), (x2, y2), _) = places(svg)["p"], roof_line(svg)
    on_roof = y2 if x >= x2 else y1 + (y2 - y1) * (x - x1) / (x2 - x1)
    assert y == pytest.approx(on_roof, abs=0.3)


def test_slope_runs_from_the_left_edge_to_the_ridge_and_the_flat_part_to_the_right():
    for picture in (PICTURE, Roofline("t", ROOF), Roofline("t", ROOF, [Point("p", 1e-4, 1e3), Point("q", 1e5, 1e12)])):
        svg = picture.to_svg()
        (x1, y1), (x2, y2), (x3, _) = roof_line(svg)
        assert (x1, x3) == (LEFT, END)
        assert x1 < x2 < x3 and TOP < y2 < y1 <= TOP + PLOT_HEIGHT
        assert found(svg, "ridge")[0].get("d").startswith(f"M{x2 - 6:.1f}".removesuffix(".0") + f" {y2:g}L")


def test_every_point_is_inside_and_a_dotted_line_leads_to_the_roof():
    svg = PICTURE.to_svg()
    _, (x2, y2), _ = roof_line(svg)
    for group in found(svg, "point"):
        x, y = place(group)
        assert LEFT < x < END and TOP < y < TOP + PLOT_HEIGHT
        lost = next(path for path in group.iter(f"{SVG}path") if path.get("stroke-dasharray") == "1 3")
        top = float(lost.get("d").split("V")[1])
        assert top <= y
        if x >= x2:
            assert top == pytest.approx(y2, abs=0.11)


def test_a_point_above_the_roof_is_drawn_there_and_not_hidden():
    svg = Roofline("t", ROOF, [Point("from the cache", 0.5, 60e9)]).to_svg()
    (_, y), ((_, y1), (_, y2), _) = places(svg)["from the cache"], roof_line(svg)
    assert y2 < y < y1
    assert "600% of what bytes allow" in description(svg)


def test_sources_differ_without_colour():
    svg = PICTURE.to_svg()
    assert states(svg, "point") == ["measured", "measured", "modelled", "quoted"]
    circles = [len(list(group.iter(f"{SVG}circle"))) for group in found(svg, "point")]
    assert circles == [0, 0, 1, 2], "filled, hollow, hollow with a ring"
    shapes = [group.findall(f"{SVG}path")[1].get("d") for group in found(svg, "point")]
    assert shapes[0] == shapes[1]
    assert len(set(shapes)) == 3, "one mark per group"


def test_legend_names_groups_and_only_the_sources_that_occur():
    everything = text_of(parse(PICTURE.to_svg()))
    assert all(word in everything for word in ("linear", "attention", "filled: measured", "hollow: modelled", "quoted"))
    measured = text_of(parse(Roofline("t", ROOF, POINTS[:2]).to_svg()))
    assert "filled" not in measured and "hollow" not in measured


def test_a_roof_from_a_data_sheet_is_dashed():
    line = next(
        p
        for p in found(Roofline("t", Roof("m", 1e12, 1e14, "quoted")).to_svg(), "roof")[0].iter(f"{SVG}path")
        if p.get("stroke-width") == "2"
    )
    assert line.get("stroke-dasharray")
    assert states(PICTURE.to_svg(), "roof") == ["measured"]


def test_words_say_the_ridge_and_each_share_of_the_roof():
    words = PICTURE.describe()
    assert words.startswith("a <machine> moves 20 GB/s and computes 100 GFLOP/s (measured), so the ridge is at 5 ")
    assert "linear, 1 row: 5 GFLOP/s at 0.5 operations per byte (measured), 50% of what bytes allow." in words
    assert "linear, 64 rows: 80 GFLOP/s at 32 operations per byte (measured), 80% of what arithmetic allows." in words
    assert "attention, batch 64: 30 GFLOP/s at 1.5 operations per byte (modelled), 100% of what bytes allow." in words
    assert "their figure: 60 GFLOP/s at 5 operations per byte (quoted), 60% of what arithmetic allows." in words
    svg = PICTURE.to_svg()
    assert description(svg) == words
    assert text_of(parse(svg).find(f"{SVG}title")) == "What & how much"
    assert parse(svg).get("role") == "img"


def test_facts_count_measured_points_only():
    facts = PICTURE._facts()
    assert facts == [
        "a <machine>: 20 GB/s and 100 GFLOP/s, measured",
        "what was measured reaches 50% to 80% of the roof",
    ]


def boxes_of_names(svg: str, points: list[Point]) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of each point's name."""
    names = {point.name for point in points}
    boxes = []
    for text in parse(svg).iter(f"{SVG}text"):
        if text_of(text) in names and text.get("paint-order"):
            width, x, y = len(text_of(text)) * SANS_EM * NAME_SIZE, float(text.get("x")), float(text.get("y"))
            left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor")]
            boxes.append((left, y - 9, left + width, y + 3))
    return boxes


@pytest.mark.parametrize(
    "crowd",
    [
        [Point(f"{n} tokens", 1.5 + n / 100, (3 + n / 50) * 1e9, group="attention") for n in range(4)],
        [Point(f"{n} tokens", 1.5 + n / 4, 3e9, group="attention") for n in range(4)],
    ],
    ids=["nearly one place", "side by side"],
)
def test_names_of_points_close_together_cover_neither_each_other_nor_a_mark(crowd: list[Point]):
    svg = Roofline("t", ROOF, crowd).to_svg()
    boxes, marks = boxes_of_names(svg, crowd), list(places(svg).values())
    assert len(boxes) == 4
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, top, right, bottom in boxes:
        assert not any(left < x < right and top < y < bottom for x, y in marks)


def test_same_numbers_same_bytes_and_a_bundle_with_html_and_svg():
    bundle = PICTURE._repr_mimebundle_()
    assert PICTURE.to_svg() == Roofline("What & how much", ROOF, list(POINTS)).to_svg()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    assert bundle["text/plain"] == "<Roofline 'What & how much'>"


@pytest.mark.parametrize(("bandwidth", "rate"), [(1.0, 1.0), (30e9, 90e9), (3.35e12, 989e12), (7e15, 2e15), (2e3, 9e9)])
def test_machines_of_any_size_are_drawn(bandwidth: float, rate: float):
    svg = Roofline("t", Roof("m", bandwidth, rate), [Point("p", 1e-3, rate / 1e6), Point("q", 1e4, rate)]).to_svg()
    assert all(LEFT < x < END and TOP < y < TOP + PLOT_HEIGHT for x, y in places(svg).values())
    ticks = [e for e in parse(svg).iter(f"{SVG}text") if e.get("text-anchor") == "end" and e.get("x") == f"{LEFT - 8}"]
    assert 2 <= len(ticks) <= 20


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_has_no_place_on_a_logarithmic_axis_is_refused(value: float):
    for make in (
        lambda: Roof("m", value, 1.0),
        lambda: Roof("m", 1.0, value),
        lambda: Point("p", value, 1.0),
        lambda: Point("p", 1.0, value),
    ):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            make()


def test_unknown_sources_and_more_groups_than_marks_are_refused():
    with pytest.raises(ConfigError, match="source 'guessed' must be one of measured, modelled, quoted"):
        Point("p", 1.0, 1.0, "guessed")
    with pytest.raises(ConfigError, match="7 groups of points, but only 6 marks"):
        Roofline("t", ROOF, [Point(str(n), 1.0, 1e9) for n in range(7)])


def test_the_rate_of_the_roof_is_not_written_over_a_point():
    roof = Roof("m", 20e9, 90e9)
    picture = Roofline("t", roof, [Point("256 tokens", 100, 105e9)])
    [(x, y)] = places(picture.to_svg()).values()
    [rate] = [e for e in parse(picture.to_svg()).iter(f"{SVG}text") if e.text == "90 GFLOP/s"]
    right, base = float(rate.get("x")), float(rate.get("y"))
    assert not (right - 75 < x < right and base - 12 < y < base + 3)
