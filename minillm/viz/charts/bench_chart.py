"""The results of a speed benchmark as bars: the speed of each system relative to a baseline, with the spread.

Like the line charts, one output holds an interactive plotly figure and an SVG of the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, DISCARDED, HAIRLINE, INK, MUTED, ORANGE, PAPER
from minillm.viz.draw.output import Chart
from minillm.viz.draw.svg import MARGIN, RIGHT, SANS, card, element, fit_words, label, number, rectangle
from minillm.viz.draw.ticks import round_step

TOP, LINE, BAR = 84, 34, 18
LEFT, END = 300, RIGHT - 96
OURS = "minillm"
OWN_NAMES = ("cold", "warm", "plain", "INT8 KV", "speculation", "paged batching", "all")
"""Systems of minillm's own benchmarks whose names do not start with `minillm`."""


@dataclass(frozen=True)
class Bar:
    """One system: the median of its paired ratios to the baseline, with the lowest and the highest of them."""

    name: str
    ratio: float
    low: float
    high: float

    @property
    def is_ours(self) -> bool:
        """Whether it is minillm."""
        return self.name.startswith((OURS, *OWN_NAMES))


@dataclass(frozen=True)
class BarChart(Chart):
    """Bars from 0, with a line at 1 for the baseline. minillm's bars are blue; the others are outlined in the SVG, and
    grey in plotly.

    Raises `ConfigError` if there are no bars.
    """

    title: str
    axis: str
    bars: Sequence[Bar]
    summary: str

    def __post_init__(self) -> None:
        if not self.bars:
            raise ConfigError(f"the chart {self.title!r} has no bars and shows nothing; give it at least one Bar")

    def to_plotly(self) -> dict[str, object]:
        """The figure as plotly's JSON: `{"data": […], "layout": {…}}`."""
        bars = list(reversed(self.bars))  # plotly draws the first at the bottom
        trace = {
            "type": "bar",
            "orientation": "h",
            "y": [bar.name for bar in bars],
            "x": [bar.ratio for bar in bars],
            "text": [f"{bar.ratio:.2f}×" for bar in bars],
            "marker": {"color": [BLUE if bar.is_ours else DISCARDED for bar in bars]},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [bar.high - bar.ratio for bar in bars],
                "arrayminus": [bar.ratio - bar.low for bar in bars],
            },
        }
        layout = {
            "title": {"text": self.title},
            "xaxis": {"title": {"text": self.axis}, "gridcolor": HAIRLINE, "rangemode": "tozero"},
            "yaxis": {"automargin": True},
            "shapes": [
                {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": ORANGE}}
            ],
            "font": {"family": SANS, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "height": 160 + 34 * len(bars),
            "margin": {"t": 70, "r": 20},
        }
        return {"data": [trace], "layout": layout}

    def to_svg(self) -> str:
        """The same chart as a static picture."""
        most = max(1.0, *(bar.high for bar in self.bars))
        scale = (END - LEFT) / most
        bottom = TOP + LINE * len(self.bars)
        one = LEFT + scale
        return card(
            "bars",
            bottom + 58,
            self.title,
            self.summary,
            label(MARGIN, 34, fit_words(self.title, RIGHT - MARGIN, 17), size=17, weight=650, fill=INK),
            *(_line(bar, TOP + i * LINE, scale) for i, bar in enumerate(self.bars)),
            element("path", {"d": f"M{number(one)} {TOP - 14}V{bottom}", "stroke": ORANGE, "stroke-width": 2}),
            label(one, TOP - 20, "1×", size=11.5, anchor="middle"),
            *_ticks(most, scale, bottom),
            label((LEFT + END) / 2, bottom + 44, self.axis, size=12, anchor="middle"),
        )

    def __repr__(self) -> str:
        return f"<BarChart {self.title!r}>"


def bench_chart(outcome: Mapping[str, Any], baseline: str | None = None) -> BarChart:
    """The chart of the rows in a benchmark's result that are compared with `baseline` (default: the first system).

    For prompts of several lengths, the length is part of a bar's name. Raises `ConfigError` if no row is compared with
    `baseline`.
    """
    rows = outcome["rows"]
    baseline = baseline or (rows[0]["system"] if rows else "")
    bars = [
        Bar(_name(row), row["ratio"], row["ratio_min"], row["ratio_max"]) for row in rows if row["baseline"] == baseline
    ]
    if not bars:
        known = sorted({row["baseline"] for row in rows if row["baseline"]})
        raise ConfigError(f"nothing was compared with {baseline!r}; there are: {', '.join(known) or 'no comparisons'}")
    ratios = "; ".join(f"{bar.name}: {bar.ratio:.2f} times ({bar.low:.2f} to {bar.high:.2f})" for bar in bars)
    cpu, threads = outcome["hardware"]["cpu"]["name"], outcome["config"].get("threads")
    on = f"{cpu}, {threads} thread{'s' if threads != 1 else ''}" if threads else cpu
    return BarChart(f"{outcome['name']}: {on}", f"times as fast as {baseline}", bars, f"Against {baseline}: {ratios}.")


def _name(row: Mapping[str, Any]) -> str:
    length = row["config"].get("prompt_tokens")
    return row["system"] if length is None else f"{row['system']}, {length} tokens"


def _line(bar: Bar, top: float, scale: float) -> str:
    filled = {"fill": BLUE} if bar.is_ours else {"fill": PAPER, "stroke": MUTED, "stroke-width": 1.5}
    middle, low, high = top + BAR / 2, LEFT + bar.low * scale, LEFT + bar.high * scale
    whisker = f"M{number(low)} {middle}H{number(high)}M{number(low)} {middle - 4}v8M{number(high)} {middle - 4}v8"
    return element(
        "g",
        {"data-testid": "bar", "data-system": bar.name},
        label(LEFT - 10, top + 13.5, fit_words(bar.name, LEFT - 10 - MARGIN, 12.5), size=12.5, fill=INK, anchor="end"),
        rectangle(LEFT, top, bar.ratio * scale, BAR, 2, filled),
        element("path", {"d": whisker, "stroke": INK, "stroke-width": 1.5, "fill": "none"}),
        label(
            max(high, LEFT + bar.ratio * scale) + 8, top + 13.5, f"{bar.ratio:.2f}×", size=12.5, weight=600, fill=INK
        ),
    )


def _ticks(most: float, scale: float, bottom: float) -> list[str]:
    step = round_step(most, fewest=3)
    parts = [element("path", {"d": f"M{LEFT} {bottom}H{END}", "stroke": MUTED})]
    for i in range(int(most / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        parts.append(element("path", {"d": f"M{number(x)} {bottom}v5", "stroke": MUTED}))
        parts.append(label(x, bottom + 19, f"{i * step:g}", size=11.5, anchor="middle"))
    return parts
