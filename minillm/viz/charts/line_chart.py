"""Line charts of measurements: one output holds an interactive plotly figure and an SVG of the same numbers.

A notebook front end with plotly shows the figure, everything else (GitHub, nbviewer, a terminal) the SVG. Plotly's JSON
is written directly: the library is not imported, and the same numbers always give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minillm.errors import ConfigError
from minillm.viz.draw.colours import HAIRLINE, INK, PAPER
from minillm.viz.draw.output import Chart
from minillm.viz.draw.plot import (
    DOTTED,
    HOLLOW,
    LEFT,
    PLOT_HEIGHT,
    SYMBOLS,
    TOP,
    Axis,
    Scale,
    axis_scale,
    draw_grid,
    draw_mark,
    series_colour,
    tick_text,
)
from minillm.viz.draw.svg import MARGIN, RIGHT, SANS, card, element, label, number

LEGEND_LINE = 20
MARKS = tuple(symbol + look for look in ("", HOLLOW, DOTTED) for symbol in SYMBOLS)
"""One mark per measured series, filled ones first, so that lines differ without colour; plotly's names."""
DASHES = (("7 5", "dash"), ("2 4", "dot"), ("10 4 2 4", "dashdot"), ("16 5", "longdash"), ("16 4 2 4", "longdashdot"))
"""One dash per modelled series, for the same reason: SVG's pattern and plotly's name."""


Look = tuple[str, str, "tuple[str, str] | None"]
"""Colour, mark, and dash of a modelled series."""


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` (the spread of a measurement) are drawn as bars where given."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: Literal["measured", "modelled"] = "measured"
    """Measured points are joined by a solid line; a model is a dashed line without points."""


@dataclass(frozen=True)
class LineChart(Chart):
    """A chart that displays itself. `summary` describes the chart in words; it becomes the SVG's description.

    Raises `ConfigError` if there is no series, if the columns of a series have different lengths or are empty, if a
    value is not finite, if a value on a logarithmic axis is not above 0, if a measured series is not among the first
    18, or if more than 5 are modelled: there are no more marks and dashes.
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    summary: str

    def __post_init__(self) -> None:
        if not self.series:
            raise ConfigError(f"the chart {self.title!r} has no series and shows nothing; give it at least one Series")
        for series in self.series:
            sizes = {len(series.x), len(series.y), len(series.low or series.y), len(series.high or series.y)}
            if len(sizes) > 1 or sizes == {0}:
                raise ConfigError(
                    f"series {series.name!r} has columns of lengths {sorted(sizes)}; all must be equal and above 0"
                )
            for axis, values in ((self.x, series.x), (self.y, [*series.y, *series.low, *series.high])):
                wrong = [v for v in values if not math.isfinite(v) or (axis.log and v <= 0)]
                if wrong:
                    kind = "finite numbers above 0" if axis.log else "finite numbers"
                    raise ConfigError(
                        f"series {series.name!r}: {wrong[0]} does not fit on the axis {axis.label!r}, which has {kind}"
                    )
        if any(series.style == "measured" for series in self.series[len(MARKS) :]):
            raise ConfigError(
                f"{len(self.series)} series, but only {len(MARKS)} marks exist; "
                f"put the measured series first, and at most {len(MARKS)} of them into one chart"
            )
        modelled = sum(series.style == "modelled" for series in self.series)
        if modelled > len(DASHES):
            raise ConfigError(
                f"{modelled} modelled series, but only {len(DASHES)} dashes exist; "
                f"put at most {len(DASHES)} of them into one chart"
            )

    def to_plotly(self) -> dict[str, object]:
        """The figure as plotly's JSON: `{"data": […], "layout": {…}}`."""
        across, up = self._scales()
        traces = [_trace(series, *look) for series, look in zip(self.series, self._looks(), strict=True)]
        layout = {
            "title": {"text": self.title},
            "xaxis": _plotly_axis(self.x, across.ticks),
            "yaxis": _plotly_axis(self.y, up.ticks),
            "font": {"family": SANS, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "height": 420,
            "hovermode": "x unified",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
            "margin": {"t": 90, "r": 28, "l": 90},
        }
        return {"data": traces, "layout": layout}

    def to_svg(self) -> str:
        """The same chart as a static picture."""
        across, up = self._scales()
        looks = self._looks()
        legend, lower = _legend(self.series, looks)
        plot = [
            *draw_grid(self.x, self.y, across, up),
            *(_line(series, *look, across, up) for series, look in zip(self.series, looks, strict=True)),
        ]
        return card(
            "chart",
            TOP + PLOT_HEIGHT + 56 + lower,
            self.title,
            self.summary,
            label(MARGIN, 34, self.title, size=17, weight=650, fill=INK),
            *(plot if not lower else [element("g", {"transform": f"translate(0 {lower})"}, *plot)]),
            *legend,
        )

    def _scales(self) -> tuple[Scale, Scale]:
        """The scales of the x and the y axis."""
        heights = [v for s in self.series for v in (*s.y, *s.low, *s.high)]
        across = axis_scale(self.x, [v for s in self.series for v in s.x], LEFT, RIGHT - 12)
        return across, axis_scale(self.y, heights, TOP + PLOT_HEIGHT, TOP)

    def _looks(self) -> list[Look]:
        """Colour, mark and dash of each series."""
        modelled = 0
        looks: list[Look] = []
        for index, series in enumerate(self.series):
            dash = DASHES[modelled] if series.style == "modelled" else None
            modelled += dash is not None
            looks.append((series_colour(index), MARKS[index % len(MARKS)], dash))
        return looks

    def __repr__(self) -> str:
        return f"<LineChart {self.title!r}>"


def _trace(series: Series, colour: str, mark: str, dash: tuple[str, str] | None) -> dict[str, object]:
    trace: dict[str, object] = {
        "type": "scatter",
        "name": series.name,
        "x": list(series.x),
        "y": list(series.y),
        "mode": "lines" if dash else "lines+markers",
        "line": {"color": colour, "dash": dash[1] if dash else "solid"},
        "marker": {"symbol": mark, "size": 9, "color": colour},
    }
    if series.low and series.high:
        above = [high - y for y, high in zip(series.y, series.high, strict=True)]
        below = [y - low for y, low in zip(series.y, series.low, strict=True)]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return trace


def _plotly_axis(axis: Axis, ticks: Sequence[float]) -> dict[str, object]:
    scale = {"type": "log" if axis.log else "linear", "rangemode": "normal" if axis.log else "tozero"}
    tick_labels = {"tickmode": "array", "tickvals": list(ticks), "ticktext": [tick_text(tick) for tick in ticks]}
    return {
        "title": {"text": axis.label, "standoff": 16},
        "gridcolor": HAIRLINE,
        "automargin": True,
        **scale,
        **tick_labels,
    }


def _line(series: Series, colour: str, mark: str, dash: tuple[str, str] | None, across: Scale, up: Scale) -> str:
    points = [(across.place(x), up.place(y)) for x, y in zip(series.x, series.y, strict=True)]
    way = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    look = {"stroke": colour, "stroke-width": 2, "stroke-dasharray": dash[0] if dash else None}
    line = element("path", {"d": way, "fill": "none", **look})
    bars = [
        element(
            "path",
            {"d": f"M{number(x)} {number(up.place(a))}V{number(up.place(b))}", "stroke": colour, "stroke-width": 1.5},
        )
        for (x, _), a, b in zip(points, series.low, series.high, strict=False)  # no spread: no bars
    ]
    marks = [] if dash else [draw_mark(mark, x, y, colour) for x, y in points]
    return element("g", {"data-testid": "series", "data-series": series.name}, line, *bars, *marks)


def _legend(series: Sequence[Series], looks: Sequence[Look]) -> tuple[list[str], int]:
    """The legend, in as many lines as it needs, and by how much that moves the plot down."""
    parts, x, y = [], float(MARGIN), 60
    for one, (colour, mark, dash) in zip(series, looks, strict=True):
        width = 62 + 6.6 * len(one.name)
        if x + width > RIGHT + 28 and x > MARGIN:  # 28: the gap behind the last name
            x, y = float(MARGIN), y + LEGEND_LINE
        look = {"stroke": colour, "stroke-width": 2, "stroke-dasharray": dash[0] if dash else None}
        parts.append(element("path", {"d": f"M{number(x)} {y}h26", **look}))
        parts += [] if dash else [draw_mark(mark, x + 13, y, colour)]
        parts.append(label(x + 34, y + 4, one.name, size=12, fill=INK))
        x += width
    return parts, y - 60
