"""Where the time of one completion goes: a bar per configuration, divided into its consecutive parts.

From left to right, the parts are tokenisation, the queue, prefill, drafting and the target (each summed over all
steps), Python in between, and detokenisation. A dashed outline is the time that a change saved, a narrow hatched bar
the time that it cost. Like the other charts, one output holds plotly and an SVG of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import (
    BLUE,
    CACHED,
    GREEN,
    HAIRLINE,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    ink_on,
)
from minillm.viz.draw.output import Chart
from minillm.viz.draw.svg import (
    MARGIN,
    RIGHT,
    SANS,
    card,
    element,
    fit_clauses,
    fit_words,
    hatch,
    hatched,
    label,
    number,
    rectangle,
)
from minillm.viz.timeline.axis import milliseconds_axis, ms_text

COLOURS = {
    "tokenise": PURPLE,
    "queue": CACHED,
    "prefill": BLUE,
    "draft": ORANGE,
    "target": GREEN,
    "python": YELLOW,
    "detokenise": SKY,
}
"""The parts, in the order in which they are drawn."""
LETTERS = {
    "tokenise": "t",
    "queue": "q",
    "prefill": "P",
    "draft": "D",
    "target": "T",
    "python": "py",
    "detokenise": "d",
}
"""The second cue besides colour, inside each part that is wide enough, and in the legend."""
TOP, LINE, BAR = 108, 58, 24
LEFT, END = 210, RIGHT - 96
NOTE = 110
"""Width of the comparison at the right end of a row."""
SAVED = {"fill": "none", "stroke": MUTED, "stroke-dasharray": "3 3"}
LOST = {"fill": hatched("lost"), "stroke": VERMILLION}


@dataclass(frozen=True)
class Latency:
    """The latency of one configuration.

    `seconds`: part → seconds, with parts from `COLOURS`; a missing part took 0 s. `before`: name of an earlier row
    that this one is compared with; None for no comparison.
    """

    name: str
    seconds: Mapping[str, float]
    before: str | None = None

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class LatencyWaterfall(Chart):
    """Rows of `Latency` over one axis of milliseconds, with a line at `limit` seconds.

    Raises `ConfigError` for no rows, an unknown part, a negative or infinite time, a limit that is not a time above 0,
    a duplicate name, or a `before` that is not an earlier row.
    """

    title: str
    rows: Sequence[Latency]
    limit: float = 0.1

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError("a waterfall of no rows shows nothing; give it at least one Latency")
        if not 0 < self.limit < math.inf:
            raise ConfigError(f"limit = {self.limit} seconds; it must be above 0")
        above: set[str] = set()
        for row in self.rows:
            for part, seconds in row.seconds.items():
                if part not in COLOURS:
                    raise ConfigError(f"{row.name!r} has a part {part!r}; the parts are {', '.join(COLOURS)}")
                if not 0 <= seconds < math.inf:
                    raise ConfigError(f"{row.name!r}: {part} took {seconds} seconds; a part takes 0 or more")
            if row.name in above:
                raise ConfigError(f"there are two rows {row.name!r}; give each a name of its own")
            if row.before is not None and row.before not in above:
                raise ConfigError(f"{row.name!r} has before={row.before!r}, which is not an earlier row")
            above.add(row.name)

    def describe(self) -> str:
        """The picture in words."""
        lines = [f"{self.title}. Milliseconds, against a limit of {ms_text(self.limit)}."]
        for row in self.rows:
            verdict = "under" if row.total < self.limit else "over"
            change = self._change(row)
            outcome = f"{verdict} the limit{change and f', {change}'}"
            lines.append(f"{row.name}: {ms_text(row.total)}, {outcome} ({_parts_in_words(row)}).")
        return " ".join(lines)

    def to_plotly(self) -> dict[str, object]:
        """The figure as plotly's JSON: `{"data": […], "layout": {…}}`, one trace for each part."""
        rows = list(reversed(self.rows))  # plotly draws the first at the bottom
        traces = [
            {
                "type": "bar",
                "orientation": "h",
                "name": f"{LETTERS[part]}: {part}",
                "y": [row.name for row in rows],
                "x": [1000 * row.seconds.get(part, 0.0) for row in rows],
                "text": [LETTERS[part]] * len(rows),
                "textposition": "inside",
                "textangle": 0,
                "insidetextanchor": "middle",
                "marker": {"color": colour, "pattern": {"shape": "/" if part == "python" else ""}},
                "hovertemplate": "%{y}<br>" + part + " %{x:.1f} ms<extra></extra>",
            }
            for part, colour in COLOURS.items()
            if any(row.seconds.get(part) for row in rows)
        ]
        at = 1000 * self.limit
        longest = max(self.limit, *(row.total for row in rows))
        layout = {
            "title": {"text": self.title},
            "barmode": "stack",
            "uniformtext": {"mode": "hide", "minsize": 9},
            "xaxis": {"title": {"text": "milliseconds"}, "gridcolor": HAIRLINE, "range": [0, 1120 * longest]},
            "yaxis": {"automargin": True, "ticksuffix": "  "},
            "shapes": [
                {
                    "type": "line",
                    "x0": at,
                    "x1": at,
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": INK, "dash": "dash"},
                }
            ],
            "annotations": [self._limit_label(at), *map(_total_label, rows)],
            # At the bottom of the whole figure, in up to two lines: the axis title is directly below the plot.
            "legend": {"orientation": "h", "traceorder": "normal", "yref": "container", "y": 0.01, "yanchor": "bottom"},
            "font": {"family": SANS, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "height": 240 + 44 * len(rows),
            "margin": {"t": 84, "r": 20, "b": 116},
        }
        return {"data": traces, "layout": layout}

    def to_svg(self) -> str:
        """The same as a static picture."""
        scale = (END - LEFT) / max(1.1 * self.limit, *(row.total for row in self.rows))
        bottom = TOP + LINE * len(self.rows) - 6
        limit = LEFT + self.limit * scale
        segments = (
            f"M{number(limit)} {TOP + i * LINE - 8}v{BAR + 12}" for i in range(len(self.rows))
        )  # not over the text
        line = {"d": "".join(segments), "stroke": INK, "stroke-width": 1.5, "stroke-dasharray": "5 4"}
        return card(
            "waterfall",
            bottom + 52,
            self.title,
            self.describe(),
            hatch("python", YELLOW, 6, 3.5),
            hatch("lost", VERMILLION, 7, 1.2),
            label(MARGIN, 34, fit_words(self.title, RIGHT - MARGIN, 17), size=17, weight=650, fill=INK),
            *self._legend(),
            *(self._row(row, TOP + i * LINE, scale) for i, row in enumerate(self.rows)),
            element("path", line),
            label(limit, TOP - 19, f"{ms_text(self.limit)} limit", size=11.5, anchor="middle", fill=INK),
            *milliseconds_axis(LEFT, END, scale, bottom, max_ticks=10),
        )

    def __repr__(self) -> str:
        return f"<LatencyWaterfall {self.title!r}>"

    def _limit_label(self, at: float) -> dict[str, object]:
        place = {"x": at, "y": 1, "yref": "paper", "xanchor": "center", "yanchor": "bottom"}
        return {**place, "text": f"{ms_text(self.limit)} limit", "showarrow": False}

    def _before(self, row: Latency) -> Latency | None:
        return next((other for other in self.rows if other.name == row.before), None)

    def _change(self, row: Latency) -> str:
        """The comparison with the row's `before`, in words."""
        before = self._before(row)
        if before is None or not row.total or not before.total:
            return ""
        ratio = before.total / row.total
        return f"{ratio:.2f}× as fast as {before.name}"

    def _legend(self) -> list[str]:
        parts, x = [], float(MARGIN)
        for part in COLOURS:
            if not any(row.seconds.get(part) for row in self.rows):
                continue
            parts.append(rectangle(x, 50, 22, 15, 2, _paint(part)))
            ink = INK if part == "python" else ink_on(COLOURS[part])
            parts.append(label(x + 11, 61.5, LETTERS[part], size=11, weight=600, fill=ink, anchor="middle"))
            parts.append(label(x + 28, 62, part, size=12.5, fill=INK))
            x += 28 + 7.2 * len(part) + 22
        saved = [before.total - row.total for row in self.rows if (before := self._before(row))]
        if any(seconds >= 0 for seconds in saved):
            parts += [rectangle(x, 50, 22, 15, 2, SAVED), label(x + 28, 62, "time saved", size=12.5, fill=INK)]
            x += 28 + 7.2 * len("time saved") + 22
        if any(seconds < 0 for seconds in saved):
            parts += [rectangle(x, 55, 22, 5, 0, LOST), label(x + 28, 62, "time lost", size=12.5, fill=INK)]
        return parts

    def _row(self, row: Latency, top: float, scale: float) -> str:
        x, parts = float(LEFT), []
        for part in COLOURS:
            width = row.seconds.get(part, 0.0) * scale
            if not width:
                continue
            about = {"data-testid": "part", "data-part": part, "data-ms": f"{1000 * row.seconds[part]:.3f}"}
            parts.append(element("rect", {"x": x, "y": top, "width": width, "height": BAR, **_paint(part), **about}))
            if width > 18:
                ink = INK if part == "python" else ink_on(COLOURS[part])
                parts.append(
                    label(x + width / 2, top + 16.5, LETTERS[part], size=12, weight=600, fill=ink, anchor="middle")
                )
            x += width
        before = self._before(row)
        if before is not None:
            parts.append(_difference(x, LEFT + before.total * scale, top))
        if before is not None and self._change(row):
            ratio = f"{before.total / row.total:.2f}× as fast"
            parts.append(label(RIGHT, top + 32, ratio, size=11.5, anchor="end"))
            parts.append(label(RIGHT, top + 46, fit_words(f"as {before.name}", NOTE, 11.5), size=11.5, anchor="end"))
        parts_text = fit_clauses(_clauses(row), RIGHT - NOTE - 8 - LEFT, 11.5)
        return element(
            "g",
            {
                "data-testid": "latency",
                "data-system": row.name,
                "data-state": "under" if row.total < self.limit else "over",
            },
            label(LEFT - 12, top + 16.5, fit_words(row.name, LEFT - 12 - MARGIN, 13), size=13, fill=INK, anchor="end"),
            *parts,
            label(RIGHT, top + 16, ms_text(row.total), size=14, weight=650, fill=INK, anchor="end"),
            label(LEFT, top + BAR + 15, parts_text, size=11.5),
        )


def _total_label(row: Latency) -> dict[str, object]:
    """The row's total at the end of its bar."""
    place = {"x": 1000 * row.total, "y": row.name, "xanchor": "left", "xshift": 5}
    return {**place, "text": f"<b>{ms_text(row.total)}</b>", "showarrow": False, "bgcolor": PAPER}


def _paint(part: str) -> dict[str, str | float | None]:
    if part == "python":
        return {"fill": hatched("python"), "stroke": INK, "stroke-width": 0.6}
    return {"fill": COLOURS[part]}


def _difference(end: float, before: float, top: float) -> str:
    """The difference between two bars' ends: time saved (dashed outline), or lost (a hatched strip above the bar)."""
    if end <= before:
        place = {"x": end, "y": top + 0.5, "width": before - end, "height": BAR - 1}
        return element("rect", {**place, **SAVED, "data-testid": "saved"})
    place = {"x": before, "y": top - 6, "width": end - before, "height": 5}
    return element("rect", {**place, **LOST, "data-testid": "lost"})


def _clauses(row: Latency) -> list[str]:
    """The parts of a row, largest first; parts below 1% of the total are summed as `rest`."""
    order = sorted((p for p in COLOURS if row.seconds.get(p)), key=lambda p: -row.seconds[p])
    large = [p for p in order if row.seconds[p] >= 0.01 * row.total]
    clauses = [f"{part} {ms_text(row.seconds[part])}" for part in large]
    rest = sum(row.seconds[p] for p in order if p not in large)
    return [*clauses, f"rest {ms_text(rest)}"] if rest else clauses


def _parts_in_words(row: Latency) -> str:
    return ", ".join(_clauses(row)) or "nothing"
