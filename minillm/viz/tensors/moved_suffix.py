"""A prompt before and after an edit: which keys stay, which are computed, by which angles the others turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, CACHED, GREEN, HAIRLINE, INK, MUTED, PAPER, VERMILLION
from minillm.viz.draw.glyphs import visible
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    RIGHT,
    Attributes,
    card,
    element,
    fit_mono,
    hatch,
    hatched,
    label,
    number,
    rectangle,
)

LEFT = 104
BEFORE, AFTER, CELL = 90, 194, 34
DIALS, RADIUS = 300, 46
MAX_TOKENS, MAX_PAIRS = 24, 6
KINDS: dict[str, tuple[str, Attributes]] = {
    "prefix": ("prefix: kept as it is", {"fill": CACHED, "fill-opacity": "0.6", "stroke": HAIRLINE}),
    "removed": ("removed", {"fill": hatched("removed"), "stroke": VERMILLION}),
    "new": ("new: computed", {"fill": GREEN, "fill-opacity": "0.35", "stroke": GREEN}),
    "suffix": ("suffix: keys rotated, values kept", {"fill": BLUE, "fill-opacity": "0.3", "stroke": BLUE}),
}
"""Name and look of each kind of token."""
TURNED = {"fill": BLUE, "fill-opacity": "0.2"}
"""The part of the circle by which a key turns."""


@dataclass(frozen=True)
class MovedSuffix(Picture):
    """`before[start:stop]` is replaced by `new`. `frequencies`: the angle per position of some channel pairs.

    Raises `ConfigError` for a span outside the text, a text of more than `MAX_TOKENS` tokens, an edit without a suffix,
    or 0 or more than `MAX_PAIRS` pairs.
    """

    before: Sequence[str]
    start: int
    stop: int
    new: Sequence[str]
    frequencies: Sequence[float]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop < len(self.before):
            raise ConfigError(
                f"the span {self.start}:{self.stop} of {len(self.before)} tokens leaves no suffix, or is outside; give "
                "0 ≤ start ≤ stop < number of tokens"
            )
        if max(len(self.before), len(self.after)) > MAX_TOKENS or not 1 <= len(self.frequencies) <= MAX_PAIRS:
            raise ConfigError(
                f"{max(len(self.before), len(self.after))} tokens and {len(self.frequencies)} pairs; the picture has "
                f"room for {MAX_TOKENS} and for 1 to {MAX_PAIRS}"
            )

    @property
    def after(self) -> list[str]:
        """The tokens of the edited text."""
        return [*self.before[: self.start], *self.new, *self.before[self.stop :]]

    @property
    def shift(self) -> int:
        """By how many positions the suffix moves."""
        return len(self.new) - (self.stop - self.start)

    def describe(self) -> str:
        """The picture in words."""
        turns = ", ".join(f"{_degrees(self.shift * f)}" for f in self.frequencies)
        return (
            f"{self.start} tokens are kept, {self.stop - self.start} removed, {len(self.new)} computed, and "
            f"{len(self.before) - self.stop} move by {self.shift:+d} positions. The keys of those turn, in the channel "
            f"pairs that are drawn, by {turns}."
        )

    def to_svg(self) -> str:
        """The picture."""
        return card(
            "moved-suffix",
            DIALS + 2 * RADIUS + 62,
            "After an edit, the suffix moves and its keys turn",
            self.describe(),
            element("defs", {}, hatch("removed", VERMILLION, 6, 1.2)),
            label(MARGIN, 34, "After an edit, the suffix moves and its keys turn", size=17, weight=650, fill=INK),
            *self._legend(),
            *self._strip("before", BEFORE, self.before, self._kinds(self.stop - self.start, "removed")),
            *self._strip("after", AFTER, self.after, self._kinds(len(self.new), "new")),
            *self._shift(),
            *self._dials(),
        )

    def __repr__(self) -> str:
        return "<MovedSuffix>"

    @property
    def _pitch(self) -> float:
        return min(64.0, (RIGHT - LEFT) / max(len(self.before), len(self.after)))

    def _kinds(self, changed: int, kind: str) -> list[str]:
        return ["prefix"] * self.start + [kind] * changed + ["suffix"] * (len(self.before) - self.stop)

    def _strip(self, name: str, y: float, tokens: Sequence[str], kinds: Sequence[str]) -> list[str]:
        """A row of tokens, their positions below."""
        parts = [
            label(MARGIN, y + 22, name, size=13, weight=600, fill=INK),
            label(MARGIN, y + CELL + 15, "position", size=11),
        ]
        for position, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
            x = LEFT + position * self._pitch
            look = {**KINDS[kind][1], "data-testid": "token", "data-state": kind}
            parts.append(rectangle(x + 1, y, self._pitch - 2, CELL, 3, look))
            text = fit_mono(visible(token), self._pitch - 6, 11)
            width = 7 * len(text) + 2
            middle = x + self._pitch / 2
            if kind == "removed":
                parts.append(rectangle(middle - width / 2, y + 9, width, 16, 2, {"fill": PAPER}))
            parts.append(label(middle, y + 21, text, size=11, family=MONO, anchor="middle", fill=INK))
            parts.append(label(middle, y + CELL + 15, str(position), size=11, anchor="middle"))
        return parts

    def _shift(self) -> list[str]:
        """The band from the suffix's old place to its new one."""
        top, bottom = BEFORE + CELL + 22, AFTER - 4
        old, new = (LEFT + at * self._pitch for at in (self.stop, self.start + len(self.new)))
        width = (len(self.before) - self.stop) * self._pitch
        corners = ((old, top), (old + width, top), (new + width, bottom), (new, bottom))
        way = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners) + "Z"
        look = {"fill": BLUE, "fill-opacity": "0.1", "stroke": BLUE, "stroke-dasharray": "4 4", "data-testid": "moved"}
        text = f"δ = {self.shift:+d}" if self.shift else "δ = 0: nothing turns"
        middle = (old + new + width) / 2
        return [
            element("path", {"d": way, **look}),
            label(middle, (top + bottom) / 2 + 5, text, size=14, weight=650, fill=INK, anchor="middle"),
        ]

    def _dials(self) -> list[str]:
        """For the first token of the suffix: the angle of some channel pairs, before (dashed) and after."""
        old, new = self.stop, self.start + len(self.new)
        token = visible(self.before[self.stop])
        parts = [
            label(
                MARGIN,
                DIALS - 22,
                f"the key of “{token}”, by channel pair: the rotation for position {old} (dashed) and {new}",
                size=13,
                weight=600,
                fill=INK,
            )
        ]
        room = (RIGHT - MARGIN) / len(self.frequencies)
        for i, frequency in enumerate(self.frequencies):
            x, y = MARGIN + room * (i + 0.5), DIALS + RADIUS
            parts.append(
                element(
                    "g",
                    {"data-testid": "pair", "data-turn": f"{self.shift * frequency:.4f}"},
                    element("circle", {"cx": x, "cy": y, "r": RADIUS, "fill": PAPER, "stroke": HAIRLINE}),
                    _sector(x, y, old * frequency, new * frequency),
                    _hand(x, y, old * frequency, MUTED, "4 3"),
                    _hand(x, y, new * frequency, BLUE, None),
                ),
            )
            parts.append(
                label(x, y + RADIUS + 20, _degrees(self.shift * frequency), size=13, anchor="middle", fill=INK)
            )
            parts.append(
                label(x, y + RADIUS + 37, f"{_degrees(frequency, False)} per position", size=11, anchor="middle")
            )
        return parts

    def _legend(self) -> list[str]:
        parts, x = [], float(LEFT)
        for name, look in KINDS.values():
            parts.append(rectangle(x, 54, 18, 14, 2, look))
            parts.append(label(x + 26, 66, name, size=12, fill=INK))
            x += 26 + 6.8 * len(name) + 22
        return parts


def _point(x: float, y: float, angle: float, radius: float) -> str:
    """Counter-clockwise from the right, as angles are drawn."""
    return f"{number(x + radius * math.cos(angle))} {number(y - radius * math.sin(angle))}"


def _hand(x: float, y: float, angle: float, colour: str, dash: str | None) -> str:
    way = f"M{number(x)} {number(y)}L{_point(x, y, angle, RADIUS - 4)}"
    width = 2 if dash else 3
    return element("path", {"d": way, "stroke": colour, "stroke-width": width, "stroke-dasharray": dash})


def _sector(x: float, y: float, old: float, new: float) -> str:
    """The part of the circle between both angles; a whole circle where it is a turn or more."""
    turned = new - old
    if abs(turned) >= 2 * math.pi:
        return element("circle", {"cx": x, "cy": y, "r": RADIUS - 14, **TURNED})
    large, sweep = int(abs(turned) > math.pi), int(turned < 0)
    radius = RADIUS - 14
    way = (
        f"M{number(x)} {number(y)}L{_point(x, y, old, radius)}A{radius} {radius} 0 {large} {sweep} "
        f"{_point(x, y, new, radius)}Z"
    )
    return element("path", {"d": way, **TURNED})


def _degrees(angle: float, signed: bool = True) -> str:
    degrees = math.degrees(angle)
    text = f"{degrees:+.0f}" if abs(degrees) >= 10 else f"{degrees:+.1f}" if abs(degrees) >= 1 else f"{degrees:+.2f}"
    return (text if signed else text.lstrip("+")).replace("-", "−") + "°"
