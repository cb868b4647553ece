"""Line charts: plotly's JSON and the SVG say the same, and both are right."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from minillm.errors import ConfigError
from minillm.viz.charts.line_chart import LineChart, Series
from minillm.viz.draw.colours import PAPER, _luminance
from minillm.viz.draw.plot import COLOURS, PLOT_HEIGHT, TOP, Axis, tick_text

SVG = "{http://www.w3.org/2000/svg}"


def chart(log: bool = True) -> LineChart:
    return LineChart(
        "Speed & size",
        Axis("context", log=log, ticks=(1, 10, 100)),
        Axis("times <faster>", log=log),
        [
            Series("measured", (1, 10, 100), (1.0, 4.0, 20.0), (0.8, 3.0, 15.0), (1.5, 5.0, 30.0)),
            Series("counted", (1, 10, 100), (1.0, 10.0, 100.0), style="modelled"),
        ],
        "Both rise.",
    )


def test_plotly_accepts_the_figure():
    import plotly.graph_objects as go

    figure = go.Figure(chart().to_plotly())
    assert figure.data[0].y == (1.0, 4.0, 20.0)
    assert figure.data[0].error_y.array == (0.5, 1.0, 10.0)
    assert figure.data[1].line.dash == "dash"
    assert figure.layout.xaxis.type == "log"


def test_output_holds_the_interactive_and_the_static_chart():
    bundle = chart()._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.plotly.v1+json", "text/html", "image/svg+xml", "text/plain"}
    json.dumps(bundle, allow_nan=False)
    assert chart().to_svg() == chart().to_svg()
    assert "Speed & size" in bundle["text/plain"]


@pytest.mark.parametrize("log", [True, False])
def test_points_of_the_svg_are_in_order_and_inside(log: bool):
    root = ET.fromstring(chart(log).to_svg())
    width, height = map(float, root.get("viewBox").split()[2:])
    lines = [g[0].get("d") for g in root.iter(f"{SVG}g") if g.get("data-testid") == "series"]
    for line in lines:
        points = [tuple(map(float, p.split())) for p in line.removeprefix("M").split("L")]
        assert [x for x, _ in points] == sorted(x for x, _ in points)
        assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
        assert all(0 < x < width and 0 < y < height for x, y in points)


def test_log_axis_gives_equal_factors_equal_distances():
    root = ET.fromstring(chart().to_svg())
    counted = next(g for g in root.iter(f"{SVG}g") if g.get("data-series") == "counted")[0].get("d")
    (x1, y1), (x2, y2), (x3, y3) = (map(float, p.split()) for p in counted.removeprefix("M").split("L"))
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)


def test_series_differ_without_colour():
    root = ET.fromstring(chart().to_svg())
    measured, counted = [g for g in root.iter(f"{SVG}g") if g.get("data-testid") == "series"]
    assert measured[0].get("stroke-dasharray") is None and counted[0].get("stroke-dasharray")
    assert len(measured) == 1 + 3 + 3, "a line, three bars of spread, three marks"
    assert len(counted) == 1


def test_picture_says_itself_in_words():
    root = ET.fromstring(chart().to_svg())
    assert root.find(f"{SVG}title").text == "Speed & size"
    assert root.find(f"{SVG}desc").text == "Both rise."


@pytest.mark.parametrize(
    ("series", "message"),
    [
        (Series("s", (1, 2), (1,)), "lengths"),
        (Series("s", (), ()), "lengths"),
        (Series("s", (1, 2), (1, 0)), "0 does not fit on the axis 'y', which has finite numbers above 0"),
        (Series("s", (1, 2), (1, float("nan"))), "nan does not fit"),
        (Series("s", (1, 2), (1, float("inf"))), "inf does not fit"),
        (Series("s", (1, 2, 3), (5, 1, float("inf"))), "inf does not fit"),
        (Series("s", (0, 2), (1, 2)), "0 does not fit on the axis 'x'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(series: Series, message: str):
    with pytest.raises(ConfigError, match=message):
        LineChart("t", Axis("x", log=True), Axis("y", log=True), [series], "d")


def test_a_chart_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="'t' has no series and shows nothing; give it at least one Series"):
        LineChart("t", Axis("x"), Axis("y"), [], "d")


def test_one_value_only_is_drawn():
    for log in (True, False):
        ET.fromstring(LineChart("t", Axis("x", log), Axis("y", log), [Series("s", (3,), (3,))], "d").to_svg())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0001, "0.0001"),
        (5e-5, "0.00005"),
        (0.5, "0.5"),
        (1024, "1024"),
        (262144, "262,144"),
        (2e12, "2e+12"),
    ],
)
def test_ticks_are_numbers_written_out(value: float, text: str):
    """Plotly writes 100µ, and 2 and 5 for 0.002 and 0.005."""
    assert tick_text(value) == text


def test_plotly_has_the_ticks_of_the_svg():
    axis = chart().to_plotly()["layout"]["yaxis"]
    assert axis["tickmode"] == "array" and axis["ticktext"] == [tick_text(t) for t in axis["tickvals"]]
    assert {"1", "2", "5", "10", "20", "50", "100"} <= set(axis["ticktext"])
    svg = chart().to_svg()
    assert all(f">{text}</text>" in svg for text in axis["ticktext"])


def test_modelled_lines_differ_without_colour():
    lines = [Series(name, (1, 2), (1, 2), style="modelled") for name in "abc"]
    several = LineChart("t", Axis("x"), Axis("y"), [Series("measured", (1, 2), (1, 2)), *lines], "d")
    root = ET.fromstring(several.to_svg())
    dashes = [g[0].get("stroke-dasharray") for g in root.iter(f"{SVG}g") if g.get("data-testid") == "series"]
    assert len(set(dashes)) == 4 and dashes[0] is None
    assert [trace["line"]["dash"] for trace in several.to_plotly()["data"]] == ["solid", "dash", "dot", "dashdot"]


def test_measured_lines_differ_without_colour_and_later_ones_are_readable_on_white():
    import plotly.graph_objects as go

    full = LineChart("t", Axis("x"), Axis("y"), [Series(str(n), (1, 2), (1, n)) for n in range(18)], "d")
    lines = [g for g in ET.fromstring(full.to_svg()).iter(f"{SVG}g") if g.get("data-testid") == "series"]
    assert len({(line[1].get("d"), line[1].get("fill") == PAPER) for line in lines}) == 18
    assert len({trace.marker.symbol for trace in go.Figure(full.to_plotly()).data}) == 18
    colours = [line[0].get("stroke") for line in lines]
    assert colours[:5] == list(COLOURS)
    assert all(1.05 / (_luminance(colour) + 0.05) >= 3 for colour in colours[5:]), "the contrast on white"


def test_more_lines_than_marks_or_dashes_are_refused():
    measured = [Series(str(n), (1, 2), (1, 2)) for n in range(19)]
    with pytest.raises(ConfigError, match="19 series, but only 18 marks exist"):
        LineChart("t", Axis("x"), Axis("y"), measured, "d")
    modelled = [Series(str(n), (1, 2), (1, 2), style="modelled") for n in range(6)]
    with pytest.raises(ConfigError, match="6 modelled series, but only 5 dashes exist"):
        LineChart("t", Axis("x"), Axis("y"), modelled, "d")
    LineChart("t", Axis("x"), Axis("y"), [*measured[:18], *modelled[:5]], "d").to_svg()


@pytest.mark.parametrize(
    ("log", "values", "ticks"),
    [
        (True, (6, 7, 8), [6, 8]),
        (True, (4, 6), [4, 6]),
        (True, (3,), [3]),
        (True, (1, 8), [1, 2, 5]),
        (False, (-0.37, 1), [-0.4, -0.2, 0, 0.2, 0.4, 0.6, 0.8, 1]),
        (False, (-5, -5), [-5, -4, -3, -2, -1, 0]),
        (False, (0, 0.4), [0, 0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_an_axis_has_ticks_and_all_are_inside_the_plot(log: bool, values: tuple[float, ...], ticks: list[float]):
    drawn = LineChart("t", Axis("x"), Axis("y", log), [Series("s", range(len(values)), values)], "d")
    assert drawn.to_plotly()["layout"]["yaxis"]["tickvals"] == pytest.approx(ticks)
    _, up = drawn._scales()
    assert all(TOP - 1e-6 < up.place(tick) < TOP + PLOT_HEIGHT + 1e-6 for tick in up.ticks)
