"""The plot of a chart: axes, scales, the grid, and the marks of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.viz.draw.colours import BLUE, GREEN, HAIRLINE, INK, MUTED, ORANGE, PAPER, PURPLE, SKY
from minillm.viz.draw.svg import MARGIN, RIGHT, element, label, number
from minillm.viz.draw.ticks import one_two_five, round_step

LEFT, TOP, PLOT_HEIGHT = 84, 104, 268
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
MORE_COLOURS = (INK, PURPLE, BLUE, MUTED, GREEN)
"""From the sixth series on, in turn: each has a contrast of at least 3 : 1 on white."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down")
HOLLOW, DOTTED = "-open", "-open-dot"


@dataclass(frozen=True)
class Axis:
    """An axis. If `ticks` is empty, round numbers are chosen."""

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scale:
    """An axis in pixels."""

    place: Callable[[float], float]
    """A value's coordinate."""
    ticks: tuple[float, ...]


def axis_scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    """Map values to pixels from `start` (the smallest) to `end`; a linear axis contains 0."""
    low, high = min([*values, *axis.ticks]), max([*values, *axis.ticks])
    if axis.log:
        ends = tuple(sorted({low, high}))
        low, high = low / 1.15, high * 1.15
        ticks = tuple(one_two_five(low, high))
        if len(ticks) < len(ends):  # the values lie between two round numbers
            ticks = ends
        return Scale(lambda v: start + (end - start) * math.log(v / low) / math.log(high / low), axis.ticks or ticks)
    low, high = min(0.0, low), max(0.0, high)
    step = round_step((high - low) or 1.0, fewest=4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(first + 1, last)
    low, high = first * step, last * step
    ticks = axis.ticks or tuple(i * step for i in range(first, last + 1))
    return Scale(lambda v: start + (end - start) * (v - low) / (high - low), ticks)


def draw_grid(x: Axis, y: Axis, across: Scale, up: Scale) -> list[str]:
    """Ticks with their labels, horizontal lines, and the names of both axes."""
    bottom = TOP + PLOT_HEIGHT
    parts = []
    for tick in up.ticks:
        at = up.place(tick)
        parts.append(element("path", {"d": f"M{LEFT} {number(at)}H{RIGHT - 12}", "stroke": HAIRLINE}))
        parts.append(label(LEFT - 8, at + 4, tick_text(tick), size=11.5, anchor="end"))
    for tick in across.ticks:
        at = across.place(tick)
        parts.append(element("path", {"d": f"M{number(at)} {bottom}v5", "stroke": MUTED}))
        parts.append(label(at, bottom + 19, tick_text(tick), size=11.5, anchor="middle"))
    parts.append(element("path", {"d": f"M{LEFT} {bottom}H{RIGHT - 12}", "stroke": MUTED}))
    parts.append(label((LEFT + RIGHT) / 2, bottom + 42, x.label, size=12, anchor="middle"))
    # The y label is horizontal above its axis, where it is easy to read and overlaps no tick.
    return [*parts, label(MARGIN, TOP - 20, f"↑ {y.label}", size=12)]


def series_colour(index: int) -> str:
    """Colour of series number `index` (from 0)."""
    return COLOURS[index] if index < len(COLOURS) else MORE_COLOURS[index % len(MORE_COLOURS)]


def tick_text(value: float) -> str:
    """The label of a tick: the number written out, neither `100µ` nor `5e-05`, with commas from 10,000 on."""
    if not value:
        return "0"
    if abs(value) >= 10_000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    return (
        f"{value:g}"
        if abs(value) >= 1e-4
        else f"{value:.{min(9, 1 - math.floor(math.log10(abs(value))))}f}".rstrip("0")
    )


def draw_mark(mark: str, x: float, y: float, colour: str) -> str:
    """A point at (x, y): one of `SYMBOLS`, with `HOLLOW` or `DOTTED` behind its name if it is not filled."""
    shapes = {
        "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "square": "M-4 -4h8v8h-8z",
        "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
        "triangle-up": "M0 -5L5 4H-5z",
        "cross": "M-5 -1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3z",
        "triangle-down": "M0 5L5 -4H-5z",
    }
    symbol = mark.removesuffix(DOTTED).removesuffix(HOLLOW)
    paint = {"fill": colour} if mark == symbol else {"fill": PAPER, "stroke": colour, "stroke-width": 1.6}
    dot = "M-0.8 -0.8h1.6v1.6h-1.6z" if mark.endswith(DOTTED) else ""  # its outline alone fills it
    place = f"translate({number(x)} {number(y)})"
    return element("path", {"d": shapes[symbol] + dot, **paint, "transform": place})
