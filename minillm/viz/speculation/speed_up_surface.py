"""The speed-up of the best number of drafts, by acceptance and by the price of a draft, with the break-even line.

Modelled: every draft is accepted with probability α if those before it were, drafting one takes c plain steps, and
verifying γ of them 1 + γ·row plain steps. A round then gives 1 + α + … + α^γ tokens in 1 + γ·(c + row) steps. Drafts
pay where α > c + row, because the first draft of a round is the most valuable one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot

from minillm.errors import ConfigError
from minillm.viz.draw.colours import FAINT, GREEN, HAIRLINE, INK, MUTED, PAPER, VERMILLION
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import BOLD, MARGIN, RIGHT, TITLE, card, element, fit_words, label, number, rectangle, spans

MAX_GAMMA = 8
ALPHAS = tuple(round(0.05 * i, 2) for i in range(21))
PRICES = tuple(round(0.05 * i, 2) for i in range(11))
LEFT, TOP, CELL, ROW = 76, 110, 28.0, 28.0
LIST, ITEM = 690, 72
"""Left edge of the list of points, and the height of one."""
HIDDEN = 22
"""A cell this near to a point, in pixels, has no number: it would lie below the point's letter."""
APART = 24
"""Pixels between two letters. Where points are nearer, the later letter is moved, with a line to its point."""
NEAR_LINE = 10
"""The same for the break-even line, in pixels to the right or left."""
BOTTOM = TOP + ROW * len(PRICES)


@dataclass(frozen=True)
class SpeedPoint:
    """A drafter in the picture: its acceptance `alpha`, the price `c` of a draft, and a `measured` speed-up, if any."""

    name: str
    alpha: float
    c: float
    measured: float | None = None


def best_speed_up(alpha: float, c: float, row: float, max_gamma: int = MAX_GAMMA) -> tuple[int, float]:
    """γ and its speed-up: the fastest number of drafts from 0 to `max_gamma`, the smallest of equals."""
    speeds = [sum(alpha**i for i in range(g + 1)) / (1 + g * (c + row)) for g in range(max_gamma + 1)]
    gamma = next(g for g, speed in enumerate(speeds) if speed > max(speeds) * (1 - 1e-9))  # equal but for rounding
    return gamma, speeds[gamma]


@dataclass(frozen=True)
class SpeedUpSurface(Picture):
    """The surface for one machine, with the drafters that were measured on it.

    `row`: what each verified draft adds to a step, in plain steps. Raises `ConfigError` for a negative `row`, an α
    outside 0 … 1 or a c outside the picture (0 … 0.5).
    """

    points: Sequence[SpeedPoint]
    row: float = 0.0
    max_gamma: int = MAX_GAMMA

    def __post_init__(self) -> None:
        if not self.row >= 0:
            raise ConfigError(f"row={self.row} must be 0 or more: a verified draft never shortens a step")
        for point in self.points:
            if not (0 <= point.alpha <= 1 and 0 <= point.c <= PRICES[-1]):
                raise ConfigError(
                    f"point {point.name!r} with alpha={point.alpha} and c={point.c} is outside the picture; alpha goes "
                    f"from 0 to 1, c from 0 to {PRICES[-1]}"
                )

    def to_svg(self) -> str:
        """The picture: each cell has its best γ, darker for a larger speed-up; losing cells are hollow."""
        cells = [self._cell(alpha, c) for c in PRICES for alpha in ALPHAS]
        return card(
            "speed-up-surface",
            max(BOTTOM + 84, TOP + 40 + ITEM * len(self.points)),
            "Speed-up of the best number of drafts",
            self.describe(),
            spans(MARGIN, 38, ("Speed-up of the best number of drafts", TITLE)),
            spans(
                MARGIN,
                64,
                ("in each cell: the best γ, at most ", {}),
                (f"{self.max_gamma}", BOLD),
                (" · darker: faster · a verified draft adds ", {}),
                (f"{self.row:.2f}", BOLD),
                (" plain steps to a step", {}),
            ),
            *cells,
            *_axes(),
            self._break_even(),
            *(self._way(i, point) for i, point in enumerate(self.points)),  # below the letters
            *(self._mark(i, point) for i, point in enumerate(self.points)),
            *self._list(),
            _legend(BOTTOM + 66),
        )

    def describe(self) -> str:
        """The picture in words."""
        head = (
            f"Modelled. Drafts pay where the acceptance α is above c + {self.row:.2f}; at most {self.max_gamma} drafts "
            "a round."
        )
        return " ".join([head, *(self._words(point) for point in self.points)])

    def __repr__(self) -> str:
        return "<SpeedUpSurface>"

    def _words(self, point: SpeedPoint) -> str:
        gamma, speed = best_speed_up(point.alpha, point.c, self.row, self.max_gamma)
        measured = f", measured {point.measured:.2f}×" if point.measured is not None else ""
        side = "pays" if gamma else "does not pay"
        return (
            f"{point.name}: α = {point.alpha:.2f}, c = {point.c:.2f}: {side}, best γ {gamma}, predicted "
            f"{speed:.2f}×{measured}."
        )

    def _cell(self, alpha: float, c: float) -> str:
        gamma, speed = best_speed_up(alpha, c, self.row, self.max_gamma)
        x, y = _x(alpha) - CELL / 2, _y(c) - ROW / 2
        fastest = best_speed_up(1.0, 0.0, self.row, self.max_gamma)[1]
        shade = 0.08 + 0.77 * (speed - 1) / (fastest - 1) if gamma else 0.0
        look = {"fill": GREEN, "fill-opacity": f"{shade:.2f}"} if gamma else {"fill": FAINT}
        about = {"data-testid": "cell", "data-state": "pays" if gamma else "loses", "data-gamma": gamma}
        covered = self._is_covered(alpha, c)
        box = rectangle(x, y, CELL - 1, ROW - 1, 2, {**look, "data-speed": f"{speed:.2f}"})
        text = label(
            x + CELL / 2,
            y + ROW / 2 + 4,
            str(gamma) if gamma else "·",
            size=11,
            anchor="middle",
            fill=INK if gamma else MUTED,
        )
        return element("g", about, box, "" if covered else text)

    def _is_covered(self, alpha: float, c: float) -> bool:
        """Whether a letter or the line lies on the middle of the cell."""
        near = any(hypot(x - _x(alpha), y - _y(c)) < HIDDEN for x, y in self._places)
        return near or abs(_x(alpha) - _x(c + self.row)) < NEAR_LINE

    def _break_even(self) -> str:
        """α = c + row, within the grid."""
        last = min(PRICES[-1], ALPHAS[-1] - self.row)
        if last < 0:
            return ""
        way = f"M{number(_x(self.row))} {number(_y(0))}L{number(_x(last + self.row))} {number(_y(last))}"
        look = {"stroke": VERMILLION, "stroke-width": 2.5, "stroke-dasharray": "7 4", "fill": "none"}
        return element("path", {"d": way, **look, "data-testid": "break-even"})

    @cached_property
    def _places(self) -> list[tuple[float, float]]:
        """Where the letters are."""
        places: list[tuple[float, float]] = []
        for point in self.points:
            x, y = _x(point.alpha), _y(point.c)
            way = -APART if y > (TOP + BOTTOM) / 2 else APART
            while any(hypot(x - other, y - height) < APART for other, height in places):
                y += way
            places.append((x, y))
        return places

    def _way(self, index: int, point: SpeedPoint) -> str:
        """The line from a letter that was moved to its point."""
        (x, y), end = self._places[index], _y(point.c)
        if y == end:
            return ""
        look = {"stroke": INK, "stroke-width": 1.5, "data-testid": "way"}
        return element("path", {"d": f"M{number(x)} {number(y)}V{number(end)}", **look})

    def _mark(self, index: int, point: SpeedPoint) -> str:
        x, y = self._places[index]
        ring = element("circle", {"cx": x, "cy": y, "r": 10.5, "fill": PAPER, "stroke": INK, "stroke-width": 2})
        letter = label(x, y + 4, _letter(index), size=12, weight=700, fill=INK, anchor="middle")
        return element("g", {"data-testid": "point", "data-name": point.name}, ring, letter)

    def _list(self) -> list[str]:
        parts = []
        for i, point in enumerate(self.points):
            y = TOP + 6 + ITEM * i
            gamma, speed = best_speed_up(point.alpha, point.c, self.row, self.max_gamma)
            ring = element(
                "circle", {"cx": LIST + 10, "cy": y + 4, "r": 10.5, "fill": PAPER, "stroke": INK, "stroke-width": 2}
            )
            parts += [ring, label(LIST + 10, y + 8, _letter(i), size=12, weight=700, fill=INK, anchor="middle")]
            name = fit_words(point.name, RIGHT - LIST - 30, 13)
            parts.append(label(LIST + 30, y + 1, name, size=13, weight=600, fill=INK))
            found = f"best γ {gamma}: {speed:.2f}× predicted" if gamma else "best γ 0: do not draft"
            found += f", {point.measured:.2f}× measured" if point.measured is not None else ""
            parts.append(label(LIST + 30, y + 19, f"α = {point.alpha:.2f}, c = {point.c:.2f}", size=12))
            parts.append(label(LIST + 30, y + 36, found, size=11.5))
        return parts


def _x(alpha: float) -> float:
    return LEFT + CELL / 2 + alpha / ALPHAS[1] * CELL


def _y(c: float) -> float:
    return BOTTOM - ROW / 2 - c / PRICES[1] * ROW


def _letter(index: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[index % 26]


def _axes() -> list[str]:
    parts = [label(MARGIN, TOP - 16, "↑ c: time to draft one token, in plain steps", size=12)]
    parts += [label(LEFT - 8, _y(c) + 4, f"{c:g}", size=11.5, anchor="end") for c in PRICES[::2]]
    parts += [label(_x(a), BOTTOM + 18, f"{a:g}", size=11.5, anchor="middle") for a in ALPHAS[::4]]
    middle = LEFT + CELL * len(ALPHAS) / 2
    return [
        *parts,
        label(
            middle,
            BOTTOM + 38,
            "α: probability that a draft is accepted if those before it were",
            size=12,
            anchor="middle",
        ),
    ]


def _legend(y: float) -> str:
    line = element(
        "path", {"d": f"M{LEFT} {y - 4}h30", "stroke": VERMILLION, "stroke-width": 2.5, "stroke-dasharray": "7 4"}
    )
    hollow = rectangle(LEFT + 330, y - 13, 18, 18, 2, {"fill": FAINT, "stroke": HAIRLINE})
    return element(
        "g",
        {"data-testid": "legend"},
        line,
        label(LEFT + 38, y, "break-even: α = c + what a row costs", size=12, fill=INK),
        hollow,
        label(LEFT + 339, y + 1, "·", size=11, anchor="middle"),
        label(LEFT + 356, y, "any draft makes it slower", size=12, fill=INK),
    )
