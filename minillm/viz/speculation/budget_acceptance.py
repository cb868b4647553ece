"""Acceptance of drafts that read only a part of the KV cache, by how many tokens of it they may read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from minillm.errors import ConfigError
from minillm.viz.draw.colours import BLUE, FAINT, GREEN, HAIRLINE, INK, MUTED, ORANGE, PAPER, PURPLE
from minillm.viz.draw.output import Picture
from minillm.viz.draw.plot import draw_mark
from minillm.viz.draw.svg import (
    BOLD,
    MARGIN,
    RIGHT,
    TITLE,
    card,
    element,
    fit_words,
    heading,
    label,
    number,
    rectangle,
    spans,
)

LEFT, TOP, HEIGHT = 74, 112, 250
BOTTOM = TOP + HEIGHT
LIST = 730
"""Left edge of the list of lines; the plot ends before it."""
STRIP = BOTTOM + 62
"""Top of the row of small bars, which show the part of the cache that is read."""
LOOKS = ((BLUE, "circle"), (ORANGE, "square"), (GREEN, "diamond"), (PURPLE, "triangle-up"))
"""Colour and mark of each line."""


@dataclass(frozen=True)
class BudgetLine:
    """One way to choose what a draft reads, with its acceptance at each budget."""

    name: str
    budgets: Sequence[int]
    """Most tokens of the cache that a draft reads, ascending."""
    acceptance: Sequence[float]
    """Accepted / judged drafts at each budget."""
    low: Sequence[float] = ()
    """At each budget, the lowest acceptance of a single prompt; with `high`, drawn as a bar."""
    high: Sequence[float] = ()


@dataclass(frozen=True)
class BudgetAcceptance(Picture):
    """Lines of acceptance over the budget, which is a part of the `context`, both in tokens.

    `reference`: the acceptance of another drafter, drawn across. Raises `ConfigError` for columns of different lengths,
    an acceptance outside 0 … 1, a budget outside 1 … `context`, or budgets that are not ascending.
    """

    lines: Sequence[BudgetLine]
    context: int
    reference: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.lines) <= len(LOOKS):
            raise ConfigError(f"{len(self.lines)} lines; this picture shows 1 to {len(LOOKS)}")
        for line in self.lines:
            sizes = {
                len(line.budgets),
                len(line.acceptance),
                *(len(column) for column in (line.low, line.high) if column),
            }
            if len(sizes) > 1 or sizes == {0}:
                raise ConfigError(
                    f"line {line.name!r} has columns of lengths {sorted(sizes)}; they must be equal, not 0"
                )
            if not all(1 <= budget <= self.context for budget in line.budgets):
                raise ConfigError(f"line {line.name!r}: budgets {list(line.budgets)} must be from 1 to {self.context}")
            if list(line.budgets) != sorted(set(line.budgets)):
                raise ConfigError(f"line {line.name!r}: budgets {list(line.budgets)} must be ascending")
            if not all(0 <= share <= 1 for share in (*line.acceptance, *line.low, *line.high)):
                raise ConfigError(f"line {line.name!r}: an acceptance must be from 0 to 1")
        if self.reference and not 0 <= self.reference[1] <= 1:
            raise ConfigError(f"reference {self.reference[0]!r}: acceptance {self.reference[1]} must be from 0 to 1")

    @property
    def budgets(self) -> list[int]:
        """All budgets, ascending."""
        return sorted({budget for line in self.lines for budget in line.budgets})

    def to_svg(self) -> str:
        """The picture: the lines, below them how much of the cache each budget is, on the right the values."""
        spread = any(line.low and line.high for line in self.lines)
        return card(
            "budget-acceptance",
            max(STRIP + 74, TOP + 40 + 62 * len(self.lines) + 60),
            "Acceptance by KV budget",
            self.describe(),
            spans(MARGIN, 38, ("How much of the cache must a draft read?", TITLE)),
            spans(
                MARGIN,
                64,
                ("drafts that the target accepts, of those it judged · context ", {}),
                (f"{self.context:,}", BOLD),
                (" tokens" + (" · thin bars: from the worst prompt to the best" if spread else ""), {}),
            ),
            *self._grid(),
            *self._strip(),
            *self._reference(),
            *(self._line(i, line) for i, line in enumerate(self.lines)),
            *self._list(),
        )

    def describe(self) -> str:
        """The picture in words."""
        words = [f"Acceptance by KV budget, of a context of {self.context} tokens."]
        for line in self.lines:
            pairs = ", ".join(f"{b} tokens {a:.0%}" for b, a in zip(line.budgets, line.acceptance, strict=True))
            words.append(f"{line.name}: {pairs}.")
        if self.reference:
            words.append(f"For comparison, {self.reference[0]}: {self.reference[1]:.0%}.")
        return " ".join(words)

    def __repr__(self) -> str:
        return "<BudgetAcceptance>"

    def _x(self, budget: float) -> float:
        low = math.log(self.budgets[0] / 1.25)
        return LEFT + (LIST - 40 - LEFT) * (math.log(budget) - low) / (math.log(self.context * 1.12) - low)

    def _grid(self) -> list[str]:
        parts = [rectangle(LEFT, TOP, LIST - 40 - LEFT, HEIGHT, 0, {"fill": FAINT})]
        parts.append(label(MARGIN, TOP - 14, "↑ accepted / judged", size=12))
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            look = {"stroke": HAIRLINE if share else MUTED}
            parts.append(element("path", {"d": f"M{LEFT} {number(_y(share))}H{LIST - 40}", **look}))
            parts.append(label(LEFT - 8, _y(share) + 4, f"{share:.0%}", size=11.5, anchor="end"))
        middle = (LEFT + LIST - 40) / 2
        parts += [label(self._x(b), BOTTOM + 18, f"{b:,}", size=11.5, anchor="middle", fill=INK) for b in self.budgets]
        return [*parts, label(middle, BOTTOM + 38, "tokens of the cache that a draft reads", size=12, anchor="middle")]

    def _strip(self) -> list[str]:
        """For each budget, a bar as long as the context, filled as far as a draft reads."""
        spacing = min((b - a for a, b in pairwise(map(self._x, self.budgets))), default=70.0)
        width, parts = min(64.0, spacing - 8), [label(MARGIN, STRIP + 11, "of the", size=11.5)]
        parts.append(label(MARGIN, STRIP + 25, "cache", size=11.5))
        for budget in self.budgets:
            share, left = budget / self.context, self._x(budget) - width / 2
            frame = rectangle(left, STRIP, width, 13, 2, {"fill": PAPER, "stroke": MUTED})
            about = {"fill": INK, "data-testid": "read", "data-share": f"{share:.3f}"}
            text = f"{number(100 * share)}%" if share >= 0.01 else "<1%"
            parts += [frame, rectangle(left, STRIP, width * share, 13, 2, about)]
            parts.append(label(left + width / 2, STRIP + 29, text, size=11, anchor="middle"))
        return parts

    def _reference(self) -> list[str]:
        if self.reference is None:
            return []
        name, share = self.reference
        way = f"M{LEFT} {number(_y(share))}H{LIST - 40}"
        line = {"d": way, "stroke": INK, "stroke-width": 1.5, "stroke-dasharray": "6 4", "data-testid": "reference"}
        text = label(LIST - 48, _y(share) + 16, f"{name}: {share:.0%}", size=12, fill=INK, anchor="end")
        return [element("path", line), text]

    def _line(self, index: int, line: BudgetLine) -> str:
        colour, symbol = LOOKS[index]
        shift = 5.0 * (index - (len(self.lines) - 1) / 2)  # so that the thin bars of two lines do not cover each other
        points = [(self._x(b) + shift, _y(a)) for b, a in zip(line.budgets, line.acceptance, strict=True)]
        way = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        bars = [
            element(
                "path",
                {"d": f"M{number(x)} {number(_y(a))}V{number(_y(b))}", "stroke": colour, "stroke-opacity": ".55"},
            )
            for (x, _), a, b in zip(points, line.low, line.high, strict=False)  # no spread: no bars
        ]
        marks = [
            element("g", {"data-testid": "point", "data-acceptance": f"{share:.3f}"}, draw_mark(symbol, x, y, colour))
            for (x, y), share in zip(points, line.acceptance, strict=True)
        ]
        path = element("path", {"d": way, "fill": "none", "stroke": colour, "stroke-width": 2.5})
        return element("g", {"data-testid": "line", "data-name": line.name}, *bars, path, *marks)

    def _list(self) -> list[str]:
        parts = [heading(LIST, TOP - 14, "what a draft reads")]
        for i, line in enumerate(self.lines):
            y = TOP + 12 + 62 * i
            colour, symbol = LOOKS[i]
            parts.append(element("path", {"d": f"M{LIST} {y - 4}h26", "stroke": colour, "stroke-width": 2.5}))
            parts.append(draw_mark(symbol, LIST + 13, y - 4, colour))
            parts.append(
                label(LIST + 36, y, fit_words(line.name, RIGHT - LIST - 36, 13), size=13, weight=600, fill=INK)
            )
            enough = next((b for i, b in enumerate(line.budgets) if min(line.acceptance[i:]) >= 0.8), None)
            text = f"80% from {enough:,} tokens on" if enough else "does not stay above 80%"
            parts.append(label(LIST + 36, y + 18, text, size=12))
        return parts


def _y(share: float) -> float:
    return BOTTOM - HEIGHT * share
