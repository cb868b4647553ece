"""The roofline: the highest performance of a machine, and how far below it each piece of work runs.

The x axis is the arithmetic intensity, in operations per byte moved; the y axis is operations per second. The slope is
the limit of the memory bandwidth, the flat part the limit of the arithmetic units, and they meet at the ridge. Work
left of the ridge is memory-bound, work right of it compute-bound (Williams, Waterman and Patterson 2009). A dotted line
from a point up to the roof shows the unused performance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from minillm.errors import ConfigError
from minillm.viz.draw.colours import INK, MUTED, PAPER
from minillm.viz.draw.output import Picture
from minillm.viz.draw.plot import (
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
)
from minillm.viz.draw.svg import MARGIN, RIGHT, SANS_EM, card, element, fit_clauses, fit_words, label, number, words
from minillm.viz.draw.ticks import one_two_five

Source = Literal["measured", "modelled", "quoted"]
LOOKS: dict[Source, str] = {
    "measured": "filled: measured",
    "modelled": "hollow: modelled",
    "quoted": "hollow and ringed: quoted",
}
END = RIGHT - 12
BOTTOM = TOP + PLOT_HEIGHT
LEGEND_TOP = BOTTOM + 74
LEGEND_ROW = 22
NAME_SIZE = 11.5
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Roof:
    """The limits of one machine. Raises `ConfigError` for limits that are not above 0."""

    name: str
    bandwidth: float
    """Bytes per second."""
    rate: float
    """Operations per second; a multiplication and an addition are two."""
    source: Source = "measured"

    def __post_init__(self) -> None:
        _check(self.name, self.source, {"bandwidth": self.bandwidth, "rate": self.rate})

    @property
    def ridge(self) -> float:
        """The intensity, in operations per byte, above which work is compute-bound."""
        return self.rate / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """The most operations per second that work of this intensity can reach."""
        return min(self.rate, intensity * self.bandwidth)


@dataclass(frozen=True)
class Point:
    """One piece of work. Raises `ConfigError` for numbers that are not above 0."""

    name: str
    """A short name, which is written beside the mark."""
    intensity: float
    """Operations per byte that must be moved."""
    rate: float
    """Operations per second."""
    source: Source = "measured"
    group: str = ""
    """Points of one group share a mark, a colour and a line of the legend; empty: the name."""

    def __post_init__(self) -> None:
        _check(self.name, self.source, {"intensity": self.intensity, "rate": self.rate})

    @property
    def kind(self) -> str:
        """The name of its group."""
        return self.group or self.name


@dataclass(frozen=True)
class Roofline(Picture):
    """The picture, which shows itself in a notebook. Raises `ConfigError` for more groups than there are marks."""

    title: str
    roof: Roof
    points: Sequence[Point] = ()

    def __post_init__(self) -> None:
        if len(self._groups) > len(SYMBOLS):
            raise ConfigError(
                f"{len(self._groups)} groups of points, but only {len(SYMBOLS)} marks exist; "
                "put points that belong together into one group"
            )

    @property
    def _groups(self) -> list[str]:
        return list(dict.fromkeys(point.kind for point in self.points))

    def to_svg(self) -> str:
        """The picture: roof, ridge, points, the distance of each from the roof, and the legend."""
        unit, factor = _unit(self.roof.rate)
        across, up = self._scales(factor)
        places = [(across.place(p.intensity), up.place(p.rate / factor)) for p in self.points]
        legend = _legend(self._groups, self.points)
        flat = _flat_label(self.roof, across, up, factor, places)
        names = _names(self.points, places, [*self._roof_boxes(across, up, factor), flat])
        return card(
            "roofline",
            LEGEND_TOP + LEGEND_ROW * legend.count("\n") + 20,
            self.title,
            self.describe(),
            label(MARGIN, 34, fit_words(self.title, RIGHT - MARGIN, 17), size=17, weight=650, fill=INK),
            label(MARGIN, 56, fit_clauses(self._facts(), RIGHT - MARGIN, 13), size=13),
            *draw_grid(Axis("operations per byte moved", log=True), Axis(f"{unit}FLOP/s", log=True), across, up),
            _roof(self.roof, across, up, factor, places),
            *(self._point(p, *place, up, factor) for p, place in zip(self.points, places, strict=True)),
            *names,
            legend.replace("\n", ""),
        )

    def describe(self) -> str:
        """The picture in words."""
        roof = self.roof
        sentences = [
            f"{roof.name} moves {_amount(roof.bandwidth, 'B/s')} and computes {_amount(roof.rate, 'FLOP/s')} "
            f"({roof.source}), so the ridge is at {_digits(roof.ridge)} operations per byte."
        ]
        for point in self.points:
            limit = "bytes allow" if point.intensity < roof.ridge else "arithmetic allows"
            share = point.rate / roof.attainable(point.intensity)
            sentences.append(
                f"{_full_name(point)}: {_amount(point.rate, 'FLOP/s')} at {_digits(point.intensity)} operations per "
                f"byte ({point.source}), {share:.0%} of what {limit}."
            )
        return " ".join(sentences)

    def __repr__(self) -> str:
        return f"<Roofline {self.title!r}>"

    @property
    def _span(self) -> tuple[float, float]:
        """The range of intensities shown: those of the points, and a factor of 4 on either side of the ridge."""
        intensities = [self.roof.ridge / 4, self.roof.ridge * 4, *(p.intensity for p in self.points)]
        return min(intensities) / 1.4, max(intensities) * 1.4

    def _scales(self, factor: float) -> tuple[Scale, Scale]:
        low, high = self._span
        rates = [self.roof.attainable(low), self.roof.rate * 1.6, *(p.rate for p in self.points)]
        bottom, top = min(rates) / factor / 1.6, max(rates) / factor  # room for names below the lowest point
        across = axis_scale(Axis("", log=True, ticks=_powers_of_two(low, high)), [low, high], LEFT, END)
        up = axis_scale(Axis("", log=True, ticks=_decimal_ticks(bottom, top)), [bottom, top], BOTTOM, TOP)
        return across, up

    def _roof_boxes(self, across: Scale, up: Scale, factor: float) -> list[Box]:
        """Small boxes along the roof, which names must not overlap."""
        low, high = self._span
        steps = (low * (high / low) ** (i / 100) for i in range(101))
        line = ((across.place(x), up.place(self.roof.attainable(x) / factor)) for x in steps)
        return [(x - 3, y - 3, x + 3, y + 3) for x, y in line]

    def _facts(self) -> list[str]:
        roof = self.roof
        facts = [f"{roof.name}: {_amount(roof.bandwidth, 'B/s')} and {_amount(roof.rate, 'FLOP/s')}, {roof.source}"]
        shares = [p.rate / roof.attainable(p.intensity) for p in self.points if p.source == "measured"]
        if shares:
            facts.append(f"what was measured reaches {min(shares):.0%} to {max(shares):.0%} of the roof")
        return facts

    def _point(self, point: Point, x: float, y: float, up: Scale, factor: float) -> str:
        roof_y = up.place(self.roof.attainable(point.intensity) / factor)
        index = self._groups.index(point.kind)
        lost = {"d": f"M{number(x)} {number(y)}V{number(roof_y)}", "stroke": MUTED, "stroke-dasharray": "1 3"}
        about = {
            "data-testid": "point",
            "data-state": point.source,
            "data-group": point.kind,
            "data-name": point.name,
        }
        share = point.rate / self.roof.attainable(point.intensity)
        tip = f"{_full_name(point)}: {_amount(point.rate, 'FLOP/s')}, {share:.0%} of the roof, {point.source}"
        return element(
            "g", about, element("title", {}, words(tip)), element("path", lost), *_marks(index, point.source, x, y)
        )


def _marks(index: int, source: Source, x: float, y: float) -> list[str]:
    """The mark of a point: filled if measured, hollow if not, with a ring if quoted."""
    colour = series_colour(index)
    parts = [draw_mark(SYMBOLS[index], x, y, colour)]
    if source != "measured":
        parts.append(element("circle", {"cx": x, "cy": y, "r": 2.3, "fill": PAPER}))
    if source == "quoted":
        ring = {"cx": x, "cy": y, "r": 8.5, "fill": "none", "stroke": colour, "stroke-dasharray": "3 2"}
        parts.append(element("circle", ring))
    return parts


def _roof(roof: Roof, across: Scale, up: Scale, factor: float, places: Sequence[tuple[float, float]]) -> str:
    """Slope, flat part and ridge with their labels. Solid if measured, dashed if not."""
    ridge_x, flat_y = across.place(roof.ridge), up.place(roof.rate / factor)
    # A straight line on logarithmic axes. It starts at the left edge; the y axis reaches down to there (`_scales`).
    steps = [across.place(roof.ridge / 2) - ridge_x, up.place(roof.rate / 2 / factor) - flat_y]
    start_x, start_y = LEFT, flat_y + (LEFT - ridge_x) / steps[0] * steps[1]
    way = f"M{number(start_x)} {number(start_y)}L{number(ridge_x)} {number(flat_y)}H{number(END)}"
    line = {"d": way, "fill": "none", "stroke": INK, "stroke-width": 2}
    line["stroke-dasharray"] = None if roof.source == "measured" else "7 5"
    down = {"d": f"M{number(ridge_x)} {TOP}V{BOTTOM}", "stroke": MUTED, "stroke-dasharray": "2 4"}
    # The label is placed where the nearest point is furthest away.
    spots = [
        (ridge_x + s * (start_x - ridge_x), flat_y + s * (start_y - flat_y)) for s in (0.5, 0.35, 0.65, 0.25, 0.75)
    ]
    name_x, name_y = max(spots, key=lambda spot: min([60.0, *(math.dist(spot, place) for place in places)]))
    angle = math.degrees(math.atan2(steps[1], steps[0])) + 180
    flat = _flat_label(roof, across, up, factor, places)
    turned = {"transform": f"rotate({number(angle)} {number(name_x)} {number(name_y)})"}
    slope = label(name_x, name_y - 7, _amount(roof.bandwidth, "B/s"), fill=INK, weight=600, anchor="middle")
    return element(
        "g",
        {"data-testid": "roof", "data-state": roof.source},
        element("path", down),
        element("path", line),
        element("g", turned, slope),
        label(flat[2], flat[3] - 3, _amount(roof.rate, "FLOP/s"), fill=INK, weight=600, anchor="end"),
        *_ridge(roof, ridge_x, flat_y),
    )


def _flat_label(roof: Roof, across: Scale, up: Scale, factor: float, places: Sequence[tuple[float, float]]) -> Box:
    """The box for the rate of the flat part: above it, as far right as possible without overlapping a point."""
    base = up.place(roof.rate / factor) - 8
    width = len(_amount(roof.rate, "FLOP/s")) * 7.2
    ridge = across.place(roof.ridge) + 14
    for right in (END - step for step in range(0, int(END - ridge - width), 12)):
        box = (right - width, base - 12, right, base + 3)
        if not any(box[0] - 9 < x < box[2] + 9 and box[1] - 9 < y < box[3] + 9 for x, y in places):
            return box
    return END - width, base - 12, END, base + 3


def _ridge(roof: Roof, x: float, y: float) -> list[str]:
    """The mark of the ridge, and above the plot the names of the two regions that it separates."""
    name = f"ridge {_digits(roof.ridge)}"
    half = len(name) * SANS_EM * 12 / 2 + 16
    diamond = {
        "d": f"M{number(x - 6)} {number(y)}L{number(x)} {number(y - 6)}L{number(x + 6)} {number(y)}"
        f"L{number(x)} {number(y + 6)}z"
    }
    return [
        element("path", {"data-testid": "ridge", "fill": PAPER, "stroke": INK, "stroke-width": 2, **diamond}),
        label(x, TOP - 6, name, fill=INK, weight=600, anchor="middle"),
        label(x - half, TOP - 6, "◂ memory-bound", anchor="end"),
        label(x + half, TOP - 6, "compute-bound ▸"),
    ]


def _names(points: Sequence[Point], places: Sequence[tuple[float, float]], line: Sequence[Box]) -> list[str]:
    """The name of each point beside it, without overlapping a mark, another name or the roof (`line`)."""
    taken = [*line, *((x - 7, y - 7, x + 7, y + 7) for x, y in places)]
    parts = []
    for point, (x, y) in zip(points, places, strict=True):
        width = len(point.name) * SANS_EM * NAME_SIZE
        choices = [
            (x + 9, y + 4, "start", x + 9),
            (x + 7, y + 17, "start", x + 7),
            (x, y + 20, "middle", x - width / 2),
            (x - 9, y + 4, "end", x - 9 - width),
            (x, y - 11, "middle", x - width / 2),
            (x + 7, y - 9, "start", x + 7),
            (x - 7, y + 17, "end", x - 7 - width),
            (x - 7, y - 9, "end", x - 7 - width),
            (x + 9, y + 12, "start", x + 9),
            (x + 9, y - 4, "start", x + 9),
        ]
        boxes = [(left, base - 9, left + width, base + 3) for _, base, _, left in choices]
        free = [i for i, box in enumerate(boxes) if _inside(box) and not any(_overlap(box, other) for other in taken)]
        chosen = free[0] if free else 0
        taken.append(boxes[chosen])
        at_x, at_y, anchor, _ = choices[chosen]
        # A white outline keeps the name readable where a dotted line passes behind it.
        halo = {"stroke": PAPER, "stroke-width": 3.5, "paint-order": "stroke", "stroke-linejoin": "round"}
        look = {"x": at_x, "y": at_y, "font-size": NAME_SIZE, "fill": INK, "text-anchor": anchor, **halo}
        parts.append(element("text", look, words(point.name)))
    return parts


def _inside(box: Box) -> bool:
    return box[0] > LEFT and box[1] > TOP and box[2] < END and box[3] < BOTTOM


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _legend(groups: Sequence[str], points: Sequence[Point]) -> str:
    """One entry per group, then one per kind of number that occurs; a newline in the result is a new row."""
    of_group = {group: {p.source for p in points if p.kind == group} for group in groups}
    sources: list[Source] = [source for source in LOOKS if any(source in found for found in of_group.values())]
    entries: list[tuple[str, int, Source]] = [
        (group, i, min(of_group[group], key=list(LOOKS).index)) for i, group in enumerate(groups)
    ]
    if sources != ["measured"]:
        entries += [(LOOKS[source], 0, source) for source in sources]
    parts, x, y = [], float(LEFT), float(LEGEND_TOP)
    for text, index, source in entries:
        width = 34 + len(text) * SANS_EM * 12
        if x > LEFT and x + width > END:
            parts.append("\n")
            x, y = float(LEFT), y + LEGEND_ROW
        parts += [*_marks(index, source, x + 6, y - 4), label(x + 18, y, text, fill=INK)]
        x += width
    return "".join(parts)


def _full_name(point: Point) -> str:
    return f"{point.group}, {point.name}" if point.group else point.name


def _amount(value: float, unit: str) -> str:
    """Three digits with a prefix: `26.9 GB/s`."""
    factor, prefix = next(((f, p) for f, p in PREFIXES if value >= f), (1.0, ""))
    return f"{_digits(value / factor)} {prefix}{unit}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _unit(rate: float) -> tuple[str, float]:
    """The unit prefix for which `rate` has one to three digits before the decimal point, and its factor."""
    factor, prefix = next(((f, p) for f, p in PREFIXES if rate >= f), (1.0, ""))
    return prefix, factor


def _powers_of_two(low: float, high: float) -> tuple[float, ...]:
    """Powers of 2 from `low` to `high`; every second or third of them if there are more than 14."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = 1 + (last - first) // 14
    return tuple(2.0**e for e in range(first, last + 1, step))


def _decimal_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5 times powers of ten from `low` to `high`; only powers of ten if those are more than 16."""
    ticks = one_two_five(low, high)
    return tuple(ticks if len(ticks) <= 16 else [t for t in ticks if math.log10(t).is_integer()])


def _check(name: str, source: str, numbers: dict[str, float]) -> None:
    if source not in get_args(Source):
        raise ConfigError(f"{name!r}: source {source!r} must be one of {', '.join(get_args(Source))}")
    for what, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name!r}: {what} {value!r} must be a number above 0, because the axes are logarithmic")
