"""Counts beside expected counts, one panel per sampler, and Pearson's χ² test of each.

The test asks how likely counts at least as far from the expected ones are, if the sampler is right: its p-value. A
right sampler gives any p-value from 0 to 1 equally often, a wrong one gives a p-value near 0 if the sample is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.viz.draw.colours import GREEN, HAIRLINE, INK, MUTED, PAPER, VERMILLION
from minillm.viz.draw.output import Picture
from minillm.viz.draw.svg import (
    MARGIN,
    MONO,
    RIGHT,
    card,
    element,
    fit_words,
    hatch,
    hatched,
    label,
    number,
    rectangle,
    spans,
)

TOP, HEIGHT, PANEL, LEGEND = 108, 118, 206, 66
DEVIATES = 4.0
"""A count that is this many standard deviations off is marked."""
FEWEST = 5.0
"""Expected counts below this make the p-value unreliable."""


@dataclass(frozen=True)
class ChiSquare:
    """Counts of the cells of a sample, against the probabilities of a right sampler.

    Raises `ConfigError` if there are fewer than two cells, if probabilities do not sum to 1, or if a cell is expected
    fewer than five times.
    """

    observed: Sequence[int]
    probabilities: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.observed) != len(self.probabilities) or len(self.observed) < 2:
            raise ConfigError(
                f"{len(self.observed)} counts and {len(self.probabilities)} probabilities: give one of each per cell, "
                "for at least two cells"
            )
        if not math.isclose(sum(self.probabilities), 1.0, abs_tol=1e-6):
            raise ConfigError(f"the probabilities of the cells sum to {sum(self.probabilities):.6g}, must sum to 1")
        if min(self.expected) < FEWEST:
            raise ConfigError(
                f"a cell is expected {min(self.expected):.3g} times; below {FEWEST:g} the p-value is unreliable: merge "
                "cells or draw more"
            )

    @property
    def expected(self) -> list[float]:
        """The expected count of each cell."""
        total = sum(self.observed)
        return [total * probability for probability in self.probabilities]

    @property
    def statistic(self) -> float:
        """χ² = Σ (observed - expected)² / expected."""
        return sum((o - e) ** 2 / e for o, e in zip(self.observed, self.expected, strict=True))

    @property
    def degrees(self) -> int:
        """Degrees of freedom: cells that are free, given the total."""
        return len(self.observed) - 1

    @property
    def p_value(self) -> float:
        """The probability of a χ² at least as large, if the sampler is right: Q(degrees / 2, χ² / 2)."""
        half, a = self.statistic / 2, 1.0 if self.degrees % 2 == 0 else 0.5
        q = math.exp(-half) if a == 1.0 else math.erfc(math.sqrt(half))
        while a < self.degrees / 2 and half > 0:  # Q(a + 1, x) = Q(a, x) + x^a e^-x / Γ(a + 1)
            q += math.exp(a * math.log(half) - half - math.lgamma(a + 1))
            a += 1
        return min(q, 1.0)

    @property
    def deviations(self) -> list[float]:
        """How far each count is from the expected one, in standard deviations of a binomial count."""
        pairs = zip(self.observed, self.expected, self.probabilities, strict=True)
        return [(o - e) / math.sqrt(e * (1 - p)) for o, e, p in pairs]


@dataclass(frozen=True)
class ChiSquarePanels(Picture):
    """A panel for each test: the expected count of every cell as a hollow bar, the observed one as a filled bar.

    `cells` names the cells of all tests. A test with a p-value below `threshold` is refused. Raises `ConfigError`
    without tests, or for a test with another number of cells.
    """

    title: str
    cells: Sequence[str]
    tests: Sequence[tuple[str, ChiSquare]]
    threshold: float = 1e-6

    def __post_init__(self) -> None:
        if not self.tests:
            raise ConfigError("a picture of no tests shows nothing; give it at least one (name, ChiSquare)")
        for name, test in self.tests:
            if len(test.observed) != len(self.cells):
                raise ConfigError(f"test {name!r} has {len(test.observed)} cells, the picture names {len(self.cells)}")

    def to_svg(self) -> str:
        """The picture: the panels below each other, with one scale for all."""
        most = max(max(*test.observed, *test.expected) for _, test in self.tests)
        panels = [
            _panel(name, test, self.cells, TOP + i * PANEL, most, self.threshold)
            for i, (name, test) in enumerate(self.tests)
        ]
        return card(
            "chi-square",
            TOP + len(self.tests) * PANEL,
            self.title,
            self.describe(),
            element("defs", {}, hatch("deviates", VERMILLION, spacing=5, stroke=2.4)),
            label(MARGIN, 36, self.title, size=17, weight=650, fill=INK),
            *_legend(),
            *panels,
        )

    def describe(self) -> str:
        """The picture in words."""
        lines = []
        for name, test in self.tests:
            cells = zip(self.cells, test.observed, test.expected, strict=True)
            counts = ", ".join(f"{cell} {o} instead of {e:.0f}" for cell, o, e in cells)
            lines.append(f"{name}: {_summary(test, self.threshold)}. Counts: {counts}.")
        return " ".join(lines)

    def __repr__(self) -> str:
        return f"<ChiSquarePanels {self.title!r}>"


def p_text(p: float) -> str:
    """A p-value in words: `p = 0.34`, or `p < 10⁻⁶`."""
    return f"p = {p:.2g}" if p >= 1e-6 else "p < 10⁻⁶" if p >= 1e-12 else "p < 10⁻¹²"


def _summary(test: ChiSquare, threshold: float) -> str:
    verdict = "not the target's distribution" if test.p_value < threshold else "no difference found"
    return f"χ² = {test.statistic:.1f}, {test.degrees} degrees of freedom, {p_text(test.p_value)}: {verdict}"


def _legend() -> list[str]:
    shown = (
        ({"fill": PAPER, "stroke": INK, "stroke-dasharray": "3 2"}, "expected"),
        ({"fill": GREEN, "fill-opacity": 0.8}, "observed"),
        (
            {"fill": hatched("deviates"), "stroke": VERMILLION},
            f"observed, more than {DEVIATES:g} standard deviations off",
        ),
    )
    parts, x = [], float(MARGIN)
    for look, text in shown:
        parts += [rectangle(x, LEGEND - 10, 16, 12, 2, look), label(x + 24, LEGEND, text, size=12, fill=INK)]
        x += 54 + 6.6 * len(text)
    return parts


def _panel(name: str, test: ChiSquare, cells: Sequence[str], top: float, most: float, threshold: float) -> str:
    pitch = (RIGHT - MARGIN) / len(cells)
    refused = test.p_value < threshold
    sign, ink = ("✗ ", VERMILLION) if refused else ("✓ ", GREEN)
    title = spans(
        MARGIN,
        top - 12,
        (sign, {"fill": ink, "font-weight": 700}),
        (fit_words(name, 440, 13), {"fill": INK, "font-weight": 650}),
    )
    facts = label(RIGHT, top - 12, _summary(test, threshold), size=12, anchor="end", fill=INK)
    base = top + HEIGHT + 10
    line = element("path", {"d": f"M{MARGIN} {number(base)}H{RIGHT}", "stroke": HAIRLINE})
    bars = [
        _bars(cells[i], test.observed[i], test.expected[i], test.deviations[i], MARGIN + i * pitch, base, pitch, most)
        for i in range(len(cells))
    ]
    state = "refused" if refused else "passed"
    return element("g", {"data-testid": "panel", "data-state": state}, title, facts, line, *bars)


def _bars(
    cell: str, observed: int, expected: float, deviation: float, left: float, base: float, pitch: float, most: float
) -> str:
    width = min(30.0, (pitch - 14) / 2)
    middle = left + pitch / 2
    tall, real = (HEIGHT - 22) * expected / most, (HEIGHT - 22) * observed / most
    far = abs(deviation) > DEVIATES
    look = {"fill": hatched("deviates"), "stroke": VERMILLION} if far else {"fill": GREEN, "fill-opacity": 0.8}
    hollow = {"fill": PAPER, "stroke": INK, "stroke-dasharray": "3 2"}
    size = 11 if pitch >= 60 else 9.5
    return element(
        "g",
        {"data-testid": "cell", "data-state": "far" if far else "near", "data-observed": observed},
        rectangle(middle - width - 1, base - tall, width, tall, 2, hollow),
        rectangle(middle + 1, base - real, width, real, 2, look),
        label(middle, base - max(tall, real) - 6, f"{observed}", size=size, anchor="middle", fill=INK, weight=600),
        label(middle, base + 17, cell, size=size + 0.5, anchor="middle", fill=INK, family=MONO),
        label(middle, base + 32, f"exp. {expected:.0f}", size=size, anchor="middle", fill=MUTED),
    )
